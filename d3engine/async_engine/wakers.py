"""How readers learn that their slots have been filled: on an event loop by one call for all of them, or on a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from d3engine.async_engine.slots import ReplyFuture

Tap: TypeAlias = "Callable[[Sequence[Any]], int]"
"""Takes so many of the first of what came at once for a reader who waits; for the rest he is woken."""


class LoopWaker:
    """Of all readers on one event loop. However far the loop is behind, one call at most waits in it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._filled: list[ReplyFuture] = []
        self._is_called = False
        self._readers: dict[int, tuple[asyncio.Future[list[Any]], Tap | None]] = {}

    @property
    def is_gone(self) -> bool:
        """Whether the loop is closed."""
        return self._loop.is_closed()

    def wake(self, slots: Iterable[ReplyFuture]) -> None:
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
            reader, tap = self._readers.get(slot.key, _NOBODY)
            if reader is None or reader.done():
                continue
            if tap is None:
                reader.set_result([])  # to look into his slot himself
            else:
                self._pour(slot, reader, tap)

    @staticmethod
    def _pour(slot: ReplyFuture, reader: asyncio.Future[list[Any]], tap: Tap) -> None:
        """Hand what waits to the tap, and what it leaves to the reader, who hears of errors, the tap's among them."""
        try:
            replies = slot.take()
            if replies and (taken := tap(replies)):
                replies = replies[taken:]
            if not replies and slot.error is not None:
                replies = slot.take()  # what came meanwhile, or else the error
            if replies:
                reader.set_result(replies)
        except Exception as error:
            reader.set_exception(error)

    async def take(self, slot: ReplyFuture, tap: Tap | None = None) -> list[Any]:
        """What waits in a slot, or what comes next and `tap` does not take. Raises what ended it."""
        while True:
            replies = slot.take()
            if replies:
                return replies
            assert slot.key not in self._readers, "a slot has one reader"
            reader: asyncio.Future[list[Any]] = self._loop.create_future()
            self._readers[slot.key] = reader, tap
            try:
                replies = await reader
            finally:
                del self._readers[slot.key]
            if replies:
                return replies


_NOBODY = None, None


class ThreadWaker:
    """Of one reader, who blocks his thread."""

    is_gone = False

    def __init__(self) -> None:
        self._event = threading.Event()

    def wake(self, slots: Iterable[ReplyFuture]) -> None:
        self._event.set()

    def take(self, slot: ReplyFuture) -> list[Any]:
        """What waits in a slot, or what comes next. Raises what ended it."""
        while True:
            self._event.clear()
            replies = slot.take()
            if replies:
                return replies
            self._event.wait()
