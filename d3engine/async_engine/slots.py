"""Where a reply waits for its reader: one slot for each, so memory is bounded without any queue.

The engine's side fills slots and says which have something new; waking is the business of a `Waker`, of which an event
loop has one for all its readers and a plain thread one each.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, Protocol

from d3engine.async_engine.merging import MergedDeltas
from d3engine.request.outputs import RequestOutput


class Waker(Protocol):
    """Tells the readers of slots that there is something to take."""

    @property
    def is_gone(self) -> bool:
        """Whether they can never be woken again."""

    def wake(self, slots: Iterable[Slot]) -> None:
        """Wake them, from any thread. Raises `RuntimeError` if they are gone."""


class Slot:
    """For one reader: the outputs of a request, or what a method returned.

    Args:
        key: the number of the request.
        waker: of its reader.
        merges: whether what comes is a delta, so that those which wait must be joined; otherwise the latest counts.

    Attributes:
        error: the exception that waits, behind a reply or alone.
    """

    def __init__(self, key: int, waker: Waker, *, merges: bool = False) -> None:
        self.key = key
        self.waker = waker
        self._merges = merges
        self._lock = threading.Lock()
        self._waiting: Any = None
        self._is_full = False
        self.error: BaseException | None = None

    def put(self, reply: Any) -> bool:
        """Fill it; returns whether its reader must be woken. An exception is raised to him after what waits."""
        with self._lock:
            if self.error is not None:
                return False
            must_wake = not self._is_full
            if isinstance(reply, BaseException):
                self.error = reply
            elif not (self._is_full and self._merges):
                self._waiting, self._is_full = reply, True
            else:
                if isinstance(self._waiting, RequestOutput):
                    self._waiting = MergedDeltas(self._waiting)
                self._waiting.add(reply)
            return must_wake

    def take(self) -> tuple[bool, Any]:
        """Whether something waited, and what. Raises the exception that came after it, once nothing else waits."""
        with self._lock:
            if not self._is_full:
                if self.error is not None:
                    raise self.error
                return False, None
            reply, self._waiting, self._is_full = self._waiting, None, False
        return True, reply.whole() if isinstance(reply, MergedDeltas) else reply
