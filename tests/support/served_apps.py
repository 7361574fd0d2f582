"""An app served for real: uvicorn with our connections and our server, on a free port, in a thread of its own."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.types import ASGIApp

from d3engine.server.middleware.limits import AdmissionControl
from d3engine.server.middleware.settings import GuardSettings
from d3engine.server.running import GuardedServer, bind

GUARD = 60.0
"""Seconds after which a test has hung."""


class ServedApp:
    """Where it is, and how to end it."""

    def __init__(self, app: ASGIApp, traffic: AdmissionControl, settings: GuardSettings) -> None:
        self.bound = bind(settings)
        self.port = int(self.bound.getsockname()[1])
        self.said: list[str] = []
        self.server = GuardedServer(app, settings, traffic, self.said.append)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        self.connect().close()  # waits: the socket listens as soon as the server runs

    def _run(self) -> None:
        asyncio.run(self.server.serve([self.bound]))

    def connect(self, receive_bytes: int | None = None) -> socket.socket:
        """A connection; the kernel keeps about `receive_bytes` for a client that does not read."""
        while True:
            client = socket.socket()
            client.settimeout(GUARD)
            if receive_bytes is not None:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            try:
                client.connect(("127.0.0.1", self.port))
                return client
            except ConnectionRefusedError:
                client.close()
                assert self.thread.is_alive()

    def join(self) -> None:
        """Wait for its end."""
        self.thread.join(GUARD)
        assert not self.thread.is_alive(), "the server has not ended"


@contextmanager
def served(app: ASGIApp, traffic: AdmissionControl, settings: GuardSettings | None = None) -> Iterator[ServedApp]:
    """The app on a free port, until the block ends."""
    running = ServedApp(app, traffic, settings or GuardSettings(port=0))
    try:
        yield running
    finally:
        running.server.should_exit = running.server.force_exit = True
        running.join()


def request(path: str, body: bytes = b"", method: str = "POST", **headers: str) -> bytes:
    """A request as it goes over the wire."""
    given = {"Host": "127.0.0.1", "Content-Type": "application/json", "Content-Length": str(len(body))}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def read_answer(client: socket.socket) -> tuple[int, Any]:
    """The status and the body of the next answer on a connection, which says its length."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = client.recv(1)  # what follows may be the head of another answer
        assert piece, f"the connection has ended after {data!r}"
        data += piece
    head, body = data, b""
    lines = head.decode().lower().split("\r\n")
    length = int(next(line.split(":")[1] for line in lines if line.startswith("content-length:")))
    while len(body) < length:
        piece = client.recv(length - len(body))
        assert piece, f"the connection has ended after {len(body)} of {length} bytes"
        body += piece
    return int(lines[0].split()[1]), json.loads(body) if body[:1] in (b"{", b'"') else body


def read_to_the_end(client: socket.socket) -> bytes:
    """Everything until the connection ends, in whatever way it does."""
    data = b""
    try:
        while piece := client.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data
