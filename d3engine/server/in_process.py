"""An app called as a function, for those who have a request and no socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope


@dataclass(frozen=True, slots=True)
class Answered:
    """A whole answer; `request_id` is its X-Request-Id."""

    status: int
    request_id: str
    body: bytes


async def post(app: ASGIApp, path: str, body: bytes) -> Answered:
    status, headers, parts = 0, {}, []
    async with aclosing(messages_of(app, path, body)) as messages:
        async for message in messages:
            if message["type"] == "http.response.start":
                status, headers = message["status"], dict(message["headers"])
            else:
                parts.append(message.get("body", b""))
    return Answered(status, headers.get(b"x-request-id", b"").decode(), b"".join(parts))


async def messages_of(app: ASGIApp, path: str, body: bytes) -> AsyncGenerator[Message, None]:
    """The ASGI messages by which an app answers a POST of JSON. Closing it ends the request, as leaving does."""
    # The app waits for its reader, as for a socket.
    sent: asyncio.Queue[Message | Exception | None] = asyncio.Queue(1)

    async def run() -> None:
        try:
            await app(scope_of(path, len(body)), whole(body), sent.put)
            await sent.put(None)
        except Exception as error:
            await sent.put(error)

    running = asyncio.create_task(run())
    try:
        while (message := await sent.get()) is not None:
            if isinstance(message, Exception):
                raise message
            yield message
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def whole(body: bytes) -> Receive:
    """A request that has come whole, and whose client never leaves: leaving is cancelling."""
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not unread:
            await asyncio.get_running_loop().create_future()
        return unread.pop()

    return receive


def scope_of(path: str, length: int) -> Scope:
    headers = {"host": "localhost", "content-type": "application/json", "content-length": str(length)}
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": None,
        "server": None,
        "state": {},
    }
