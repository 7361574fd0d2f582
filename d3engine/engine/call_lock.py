"""Whether the engine still lives: open until it is closed, and sound until a fault of its own."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what `signal` wraps: its search for enum members costs more than a call
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

from d3engine.errors import EngineBusyError, EngineClosedError, EngineDeadError


class EngineState:
    """Of one engine. A fault in the core may have left any state behind, so it ends the engine for every caller."""

    def __init__(self) -> None:
        self._fault: BaseException | None = None
        self._closed = False

    @property
    def is_sound(self) -> bool:
        """Whether no fault has left the core in a state of its own."""
        return self._fault is None

    def check_open(self) -> None:
        """Raises `EngineClosedError` once the engine is closed."""
        if self._closed:
            raise EngineClosedError("the engine is closed")

    def check(self) -> None:
        """Raises `EngineClosedError` once the engine is closed, `EngineDeadError` once a fault has ended it."""
        self.check_open()
        if self._fault is not None:
            raise EngineDeadError(f"the engine has ended: {self._fault!r}") from self._fault

    @contextmanager
    def ended_by_faults(self) -> Iterator[None]:
        """What is done in here ends the engine, loudly, by whatever it raises."""
        self.check()
        try:
            yield
        except BaseException as fault:
            self._fault = fault
            if isinstance(fault, Exception):
                raise EngineDeadError(f"the engine has ended: {fault!r}") from fault
            raise  # an interrupt keeps its own name

    def close(self) -> bool:
        """Close the engine; returns whether it was open."""
        was_open, self._closed = not self._closed, True
        self._fault = None  # a fault's traceback holds on to what it passed through
        return was_open


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


Drop: TypeAlias = Callable[[list[str]], None]
"""Ends these requests, whose outputs no caller will take."""


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
