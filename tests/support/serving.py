"""A real uvicorn in a thread, with connections of our own, for tests that talk HTTP over a socket."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import uvicorn
from starlette.types import ASGIApp

from d3engine.server.connections import GuardedConnection

HANG_SECONDS = 120.0
"""Against tests that hang: no test is judged by it."""


class _Server(uvicorn.Server):
    """Says when it answers."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.answers = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.answers.set()


@contextmanager
def serving(app: ASGIApp, lifespan: Literal["on", "off"] = "off") -> Iterator[str]:
    """The address of an app that is served on a free port: `http://127.0.0.1:PORT`."""
    listener = socket.create_server(("127.0.0.1", 0))
    http: Any = partial(GuardedConnection, HANG_SECONDS)
    server = _Server(uvicorn.Config(app, http=http, log_config=None, lifespan=lifespan, timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        assert server.answers.wait(HANG_SECONDS)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(HANG_SECONDS)
        listener.close()
