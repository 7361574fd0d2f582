"""Tests that are coroutines, and an engine's loop as its process runs it."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import wraps
from queue import SimpleQueue
from typing import Any

from d3engine import Engine
from d3engine.async_engine import wire
from d3engine.async_engine.engine_loop import EngineLoop
from d3engine.async_engine.process_main import Inbox

HANG_SECONDS = 60.0
"""Against a test that hangs: none is judged by it."""


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The test on an event loop that ends with it."""

    @wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return run


@contextmanager
def looping(engine: Engine) -> Iterator[tuple[Inbox, SimpleQueue[Any]]]:
    """The inbox of an engine that a thread runs, and its replies (key, output)."""
    replies: SimpleQueue[Any] = SimpleQueue()
    loop = EngineLoop(engine, lambda batch: [replies.put(one) for one in batch] and None)
    inbox, runner = Inbox(engine, loop), threading.Thread(target=loop.run)
    runner.start()
    try:
        yield inbox, replies
    finally:
        inbox.take(wire.Stop())
        runner.join()


def assert_second_ends_first(replies: SimpleQueue[Any], first_goes_on: threading.Event) -> None:
    """Request 2 is answered while request 1 waits, which is once it goes on."""
    while not getattr((reply := replies.get(timeout=HANG_SECONDS / 2))[1], "finished", False):
        assert reply[0] == 2
    first_goes_on.set()
    assert replies.get(timeout=HANG_SECONDS)[0] == 1
