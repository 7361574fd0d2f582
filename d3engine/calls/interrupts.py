"""Signals between the steps: what a handler raises while the engine works waits until nothing is half done.

Only in the main thread, which alone runs Python's handlers. A handler still runs at once; its exception alone waits.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what `signal` wraps: its search for enum members costs more than a call
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_NUMBERS = tuple(_signal.valid_signals())
_getsignal = _signal.getsignal


class Interrupt:
    """What signal handlers have raised: Ctrl-C's `KeyboardInterrupt`, the error of a time limit by SIGALRM."""

    def __init__(self) -> None:
        self._raised: dict[int, BaseException] = {}
        self.is_over = False

    @property
    def seen(self) -> bool:
        """Whether an exception waits."""
        return bool(self._raised)

    def deliver(self) -> None:
        """Raise the exceptions that wait, if there are any, the last one with the others as its context."""
        if self._raised:
            try:
                raise self._raised.pop(next(iter(self._raised)))
            finally:
                self.deliver()

    def forget_ctrl_c(self) -> None:
        """Drop the `KeyboardInterrupt` that waits, if there is one."""
        if isinstance(self._raised.get(_signal.SIGINT), KeyboardInterrupt):
            del self._raised[_signal.SIGINT]

    def run(self, handler: Callable[[int, Any], Any], number: int, frame: Any) -> None:
        """Run a signal's handler, and keep what it raises; Ctrl-C pressed again interrupts at once."""
        try:
            handler(number, frame)
        except BaseException as error:
            if self.is_over or (number == _signal.SIGINT and number in self._raised):
                raise
            self._raised.setdefault(number, error)

    def end(self) -> None:
        """From now on handlers raise where they are; what waits is raised here."""
        self.is_over = True
        self.deliver()


class _Held:
    """A handler in whose place this stands, until the `Interrupt` is over."""

    def __init__(self, handler: Callable[[int, Any], Any], interrupt: Interrupt) -> None:
        self.handler = handler
        self.interrupt = interrupt

    def __call__(self, number: int, frame: Any) -> None:
        self.interrupt.run(self.handler, number, frame)


@contextmanager
def held_back() -> Iterator[Interrupt]:
    """What handlers raise in here waits for the caller, who may look at it; at the end it is raised."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    held: list[tuple[int, _Held]] = []
    try:
        for number, handler in [(n, found) for n in _NUMBERS if callable(found := _getsignal(n))]:
            if isinstance(handler, _Held):
                if not handler.interrupt.is_over:  # an outer call's, which holds it back
                    continue
                handler = handler.handler
            held.append((number, _Held(handler, interrupt)))
            _signal.signal(*held[-1])
        yield interrupt
    finally:
        try:
            _put_back(held)
        except BaseException:  # of a handler that is back in its place
            _put_back(held)
            raise
        finally:
            interrupt.end()


def _put_back(held: list[tuple[int, _Held]]) -> None:
    for number, guard in held:
        if _getsignal(number) is guard:  # otherwise a handler was installed meanwhile, which stays
            _signal.signal(number, guard.handler)
