"""What callers tell the loop that owns an engine. A request is named by a number that is never given twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from d3engine.request.engine_request import EngineRequest


@dataclass(frozen=True, slots=True)
class Add:
    """Queue a request, whose outputs are for `key`."""

    key: int
    prepared: EngineRequest


@dataclass(frozen=True, slots=True)
class Leave:
    """Nobody reads the request of `key` any more."""

    key: int


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request by the id that its caller knows it by; its reader hears of it."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Ask:
    """Call a method of the engine that takes no arguments; what it returns is for `key`."""

    key: int
    method: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """What came for `key` cannot be done: it is told so in its turn."""

    key: int
    error: Exception


@dataclass(frozen=True, slots=True)
class Stop:
    """End the loop."""


ASKED: Final = frozenset({"stats", "reset_prefix_cache"})
"""The methods that may be asked for."""

Message: TypeAlias = Add | Leave | Abort | Ask | Refuse | Stop
