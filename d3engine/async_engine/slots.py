"""Where replies wait for their reader: one slot for each, so memory is bounded without any queue.

The engine's side fills slots and says which have something new; a `Notifier` wakes their readers. An event loop has one
for all of them, a plain thread one of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, Protocol

from d3engine.async_engine.merging import MergedDeltas
from d3engine.request.outputs import RequestOutput


class Notifier(Protocol):
    """Tells the readers of slots that there is something to take."""

    @property
    def is_gone(self) -> bool:
        """Whether they can never be woken again."""

    def wake(self, slots: Iterable[ReplyFuture]) -> None:
        """Wake them, from any thread. Raises `RuntimeError` if they are gone."""


class ReplyFuture:
    """For one reader: the outputs of a request, or what a method returned.

    Args:
        key: the number of the request.
        waker: of its reader.
        merges: whether what comes are deltas, so that none may be left out; otherwise the latest counts.

    Attributes:
        error: the exception that waits, behind replies or alone.
    """

    def __init__(self, key: int, notifier: Notifier, *, merges: bool = False) -> None:
        self.key = key
        self.notifier = notifier
        self._merges = merges
        self._lock = threading.Lock()
        self._waiting: list[Any] = []
        self.error: BaseException | None = None

    def put(self, replies: list[Any]) -> bool:
        """Fill it with what has come at once, a list that is its own from now on; returns whether its reader must be
        woken.

        Deltas that come at once are his one by one; those that he has left until more comes are joined with it. An
        exception, which is the last of all, is raised to him after what waits.
        """
        with self._lock:
            if self.error is not None:
                return False
            must_wake = not self._waiting
            if isinstance(replies[-1], BaseException):
                self.error = replies.pop()
            if replies:
                if not self._merges:
                    self._waiting = replies[-1:]
                elif must_wake:
                    self._waiting = replies
                else:
                    self._join(replies)
            return must_wake

    def _join(self, deltas: Iterable[RequestOutput]) -> None:
        first, *others = self._waiting
        joined = first if isinstance(first, MergedDeltas) else MergedDeltas(first)
        for delta in (*others, *deltas):
            joined.add(delta)
        self._waiting = [joined]

    def take(self) -> list[Any]:
        """All that waited, in order. Raises the exception that came after it, once nothing else waits."""
        with self._lock:
            if not self._waiting and self.error is not None:
                raise self.error
            replies, self._waiting = self._waiting, []
        if len(replies) == 1 and isinstance(replies[0], MergedDeltas):
            return [replies[0].whole()]
        return replies
