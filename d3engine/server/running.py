"""Runs an app: its socket and its signals. The first begins a drain with an open port, the second ends the process."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from d3engine.errors import FailedError
from d3engine.server.connections import GuardedConnection
from d3engine.server.middleware.limits import AdmissionControl
from d3engine.server.middleware.settings import GuardSettings

CUT_SECONDS = 1
"""For requests that a drain has cut off to send their error."""
BACKLOG = 2048


def bind(settings: GuardSettings) -> socket.socket:
    """The socket of the server, to which no client can connect before it runs. Raises `FailedError`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        if sys.platform != "win32":  # where it would let another process take the very same port
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise FailedError(f"cannot listen at {address_of(settings.host, settings.port)}: {error.strerror}") from None
    return bound


def address_of(host: str, port: int) -> str:
    """Where a browser finds it."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def most_connections(settings: GuardSettings) -> int:
    """How many connections may be open: at most half of the files that the process may have open."""
    try:
        import resource
    except ImportError:  # on Windows
        return settings.max_connections
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if most_files == resource.RLIM_INFINITY:
        return settings.max_connections
    return max(1, min(settings.max_connections, most_files // 2))


class GuardedServer(uvicorn.Server):
    """Serves an app until a signal comes, then until its requests are answered; `say` prints how it ends, in a line."""

    def __init__(
        self, app: ASGIApp, settings: GuardSettings, traffic: AdmissionControl, say: Callable[[str], None]
    ) -> None:
        connection: Any = partial(GuardedConnection, settings.header_timeout, most_connections(settings))
        super().__init__(
            uvicorn.Config(
                app,
                http=connection,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",  # what goes wrong with a request, the guards say
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=settings.keep_alive_timeout,  # type: ignore[arg-type]
                timeout_graceful_shutdown=CUT_SECONDS,
            )
        )
        self._address = address_of(settings.host, settings.port)
        self._traffic = traffic
        self._drain_timeout = settings.drain_timeout
        self._say = say
        self._until: float | None = None
        self._started: Callable[[], None] | None = None
        self.num_cut = 0
        """Requests that were not answered to their end."""

    def when_started(self, act: Callable[[], None]) -> None:
        """Call this as soon as clients can connect."""
        self._started = act

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
            for bound in sockets or ():
                bound.getsockname()  # fails where uvloop could not listen and has closed it
        except OSError:  # of two servers that have bound one port the first to listen has it
            raise FailedError(f"cannot listen at {self._address}: {os.strerror(errno.EADDRINUSE)}") from None
        if self._started is not None:
            self._started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._traffic.is_draining:
            print("ended at once, at a second signal", file=sys.stderr, flush=True)
            os._exit(128 + sig)
        self.drain(signal.Signals(sig).name)

    def drain(self, why: str = "asked to") -> None:
        """Take no new requests, and end when those that are there have been answered."""
        self._traffic.is_draining = True
        self._until = time.monotonic() + self._drain_timeout
        if self._traffic.taken:
            seconds = f"{self._drain_timeout:g}"
            self._say(f"{why}: answers in progress have {seconds} seconds to end; a second signal ends them at once")

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; true when the server is to end."""
        if self._until is not None and (not self._traffic.taken or time.monotonic() >= self._until):
            self.num_cut = self._traffic.taken
            self._traffic.cut()
            self.should_exit = True
        return await super().on_tick(counter)
