"""One caller at a time: the engine's state is not made for two, and says so instead of answering wrongly."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeAlias

from d3engine.calls.interrupts import Interrupt, held_back
from d3engine.errors import EngineBusyError

Drop: TypeAlias = Callable[[list[str]], None]
"""Ends these requests, whose outputs nobody will ask for."""


class CallLock:
    """Who works in the engine, and which requests were left behind meanwhile.

    A reader may leave a stream at any time: the garbage collector closes one that was forgotten, from any thread and
    in the middle of a step. Its request then waits in a list for the end of the call that is running.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: list[str] = []

    @contextmanager
    def call(self, drop: Drop) -> Iterator[Interrupt]:
        """A call that is alone in the engine, and done before a signal handler's exception is raised.

        Raises `EngineBusyError` while another call is running, be it another thread's or one that this one is
        inside of (a signal handler's, say).
        """
        with held_back() as interrupt:
            if not self._lock.acquire(blocking=False):
                raise EngineBusyError(
                    "the engine is busy: it takes one call at a time; threads that share it must take turns"
                )
            try:
                self._drop_left(drop)
                try:
                    yield interrupt
                finally:
                    self._drop_left(drop)
            finally:
                self._lock.release()

    def leave(self, request_id: str, drop: Drop) -> None:
        """Drop a request: now, or when the call that is running has ended."""
        self._left.append(request_id)
        with suppress(EngineBusyError), self.call(drop):
            pass

    def _drop_left(self, drop: Drop) -> None:
        while self._left:
            drop([self._left.pop()])
