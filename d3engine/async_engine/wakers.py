"""How readers learn that their slots have been filled: on an event loop by one call for all of them, or on a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from typing import Any

from d3engine.async_engine.slots import Slot


class LoopWaker:
    """Of all readers on one event loop. However far the loop is behind, one call at most waits in it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._filled: list[Slot] = []
        self._is_called = False
        self._readers: dict[int, asyncio.Future[None]] = {}

    @property
    def is_gone(self) -> bool:
        """Whether the loop is closed."""
        return self._loop.is_closed()

    def wake(self, slots: Iterable[Slot]) -> None:
        with self._lock:
            if not self._is_called:
                self._loop.call_soon_threadsafe(self._wake_readers)
                self._is_called = True
            self._filled += slots

    def _wake_readers(self) -> None:
        with self._lock:
            filled, self._filled = self._filled, []
            self._is_called = False
        for slot in filled:
            reader = self._readers.get(slot.key)
            if reader is not None and not reader.done():
                reader.set_result(None)

    async def take(self, slot: Slot) -> Any:
        """What waits in a slot, or what comes next. Raises what ended it."""
        while True:
            is_there, reply = slot.take()
            if is_there:
                return reply
            assert slot.key not in self._readers, "a slot has one reader"
            self._readers[slot.key] = reader = self._loop.create_future()
            try:
                await reader
            finally:
                del self._readers[slot.key]


class ThreadWaker:
    """Of one reader, who blocks his thread."""

    is_gone = False

    def __init__(self) -> None:
        self._event = threading.Event()

    def wake(self, slots: Iterable[Slot]) -> None:
        self._event.set()

    def take(self, slot: Slot) -> Any:
        """What waits in a slot, or what comes next. Raises what ended it."""
        while True:
            self._event.clear()
            is_there, reply = slot.take()
            if is_there:
                return reply
            self._event.wait()
