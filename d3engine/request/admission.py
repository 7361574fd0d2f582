"""When requests that wait may join the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from d3engine.errors import require_integer


class Admission(Protocol):
    """Decides at which engine steps waiting requests may join."""

    def admits(self, engine_step: int) -> bool:
        """Whether requests may join at this step of the engine, counted from 0."""


@dataclass(frozen=True)
class Immediate:
    """Requests join at the next step, as every engine does it."""

    def admits(self, engine_step: int) -> bool:
        return True


@dataclass(frozen=True)
class IntervalAdmission:
    """Requests join together every `steps` engine steps, after `steps / 2` of them on average."""

    steps: int

    def __post_init__(self) -> None:
        require_integer("steps", self.steps, 1)

    def admits(self, engine_step: int) -> bool:
        return engine_step % self.steps == 0
