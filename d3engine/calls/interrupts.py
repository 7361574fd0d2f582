"""Ctrl-C between the steps: pressed while the engine works, it waits until nothing is half done.

Only where Python's own handler is in place, and in the main thread, which alone hears signals: whoever has installed a
handler of his own (asyncio does) keeps it.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what `signal` wraps: its search for enum members costs more than a call
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interrupt:
    """Whether Ctrl-C was pressed."""

    def __init__(self) -> None:
        self.seen = False

    def deliver(self) -> None:
        """Raise the `KeyboardInterrupt` that was held back, if there is one."""
        if self.seen:
            self.seen = False
            raise KeyboardInterrupt


@contextmanager
def held_back() -> Iterator[Interrupt]:
    """Ctrl-C only sets `seen`, which is for the caller to look at; pressed again it interrupts at once."""
    interrupt = Interrupt()

    def on_signal(number: int, frame: Any) -> None:
        if interrupt.seen:
            raise KeyboardInterrupt
        interrupt.seen = True

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or _signal.getsignal(_signal.SIGINT) is not _signal.default_int_handler:
        yield interrupt
        return
    _signal.signal(_signal.SIGINT, on_signal)
    try:
        yield interrupt
    finally:
        now = _signal.signal(_signal.SIGINT, _signal.default_int_handler)
        if now is not on_signal:  # somebody has installed his own meanwhile
            _signal.signal(_signal.SIGINT, now)
