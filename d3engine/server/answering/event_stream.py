"""Server-sent events: one write for each output, pings into silence, and errors where a client looks for them.

The one idea: nothing is sent before the first event is there. Until then an error is an HTTP status, as everywhere
else; only after it does it become an event.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Protocol

import orjson
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from d3engine.server.answering.running import unless_disconnected
from d3engine.server.answering.straight import Straight
from d3engine.server.errors import RequestError, as_request_error, error_body

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def named_event(content: Mapping[str, Any]) -> bytes:
    """One event, under the name that its content has as its type."""
    name: str = content["type"]
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(content) + b"\n\n"


class StreamForm(Protocol):
    """What of a stream depends on whose interface it is."""

    ping: bytes
    """Goes into a silence."""
    end: bytes
    """Comes last, after all events."""

    def failed(self, error: RequestError) -> bytes:
        """Comes last instead, where an answer fails that has begun."""


class OpenAIForm:
    """Of completions and chats."""

    ping = b": still here\n\n"
    end = b"data: [DONE]\n\n"

    def failed(self, error: RequestError) -> bytes:
        return b"data: " + error_body(error) + b"\n\n" + self.end


class EventStream(Response):
    """A response of events; a client that leaves ends its requests.

    Args:
        events: each item is one or more whole events. An error before the first is raised; a later one ends the stream.
        headers: further ones of the response.
        ping_interval: seconds of silence after which a ping keeps proxies from hanging up; 0: never.
        form: whose events they are.
        straight: by which events after the first may go past this response, while its connection has an outlet.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str] | None = None,
        *,
        ping_interval: float,
        form: StreamForm,
        straight: Straight | None = None,
    ) -> None:
        super().__init__(headers={**HEADERS, **(headers or {})})
        del self.headers["content-length"]
        self._events = events
        self._ping_interval = ping_interval or None
        self._form = form
        self._straight = straight or Straight()
        self._state: dict[str, Any] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._state = scope.setdefault("state", {})
        self._state["stream_failed"] = self._failed  # for a guard that ends it
        await unless_disconnected(receive, self._run(send))

    def _failed(self, error: RequestError) -> bytes:
        """The last event instead; a guard finds there what no status says any more."""
        self._state["stream_error"] = error
        return self._form.failed(error)

    async def _run(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = asyncio.ensure_future(anext(events))
            try:
                await asyncio.wait({first}, timeout=self._ping_interval)
                if first.done() and (error := first.exception()) is not None:
                    raise error
                await self._send_all(first, events, self._writer(send))
            finally:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)

    def _writer(self, send: Send) -> _Writer:
        return _Writer(send, self.raw_headers, self._form.ping, self._straight)

    async def _send_all(
        self, first: asyncio.Future[bytes], events: AsyncGenerator[bytes, None], writer: _Writer
    ) -> None:
        await writer.start()
        last = self._form.end
        pinging = asyncio.ensure_future(writer.ping(self._ping_interval)) if self._ping_interval else None
        try:
            await writer.write(await first)
            self._straight.open(self._state.get("outlet"))
            async for content in events:
                await writer.write(content)
        except Exception as error:
            last = self._failed(as_request_error(error))
        finally:
            if pinging is not None:
                pinging.cancel()
                await asyncio.gather(pinging, return_exceptions=True)
        await writer.end(last)


class _Writer:
    """The sending side; each write is of whole events, so that a ping never falls into one."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]], ping: bytes, straight: Straight) -> None:
        self._send = send
        self._headers = headers
        self._ping = ping
        self._straight = straight
        self._num_own = 0

    async def start(self) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})

    async def write(self, content: bytes) -> None:
        self._num_own += 1
        await self._send(_body(content, more=True))

    @property
    def _num_writes(self) -> int:
        return self._num_own + self._straight.num_writes

    async def ping(self, interval: float) -> None:
        """Write a ping whenever nothing was written for an interval, until cancelled."""
        while True:
            before = self._num_writes
            await asyncio.sleep(interval)
            if self._num_writes == before:
                await self.write(self._ping)

    async def end(self, last: bytes) -> None:
        await self._send(_body(last, more=False))


def _body(content: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}
