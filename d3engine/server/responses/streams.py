"""Server-sent events: one write for each output, pings into silence; an error before the first is an HTTP status."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from d3engine.server.errors import DONE, RequestError, as_request_error, failed_events
from d3engine.server.responses.running import DirectStream, unless_disconnected, with_plain_lines

HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


def named_event(content: Mapping[str, Any]) -> bytes:
    """One event, under the name that its content has as its type."""
    name: str = content["type"]
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(content) + b"\n\n"


@dataclass(frozen=True)
class StreamForm:
    """What of a stream depends on whose interface it is.

    Attributes:
        failed: makes what comes last instead of `end`, where an answer fails that has begun.
        ping: goes into a silence.
        end: comes last, after all events.
        media_type: of the stream. One of lines has no pings: there is no word for them.
    """

    failed: Callable[[RequestError], bytes]
    ping: bytes = b": still here\n\n"
    end: bytes = b""
    media_type: bytes = b"text/event-stream; charset=utf-8"


OPENAI_FORM = StreamForm(failed_events, end=DONE)
"""Of completions and chats."""


class EventStream(Response):
    """A response of events; a client that leaves ends its requests.

    Args:
        events: each item is one or more whole events. An error before the first is raised; a later one ends the stream.
        ping_interval: seconds of silence after which a ping keeps proxies from hanging up; 0: never.
        straight: by which events after the first may go past this response, while its connection has an outlet.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str] | None = None,
        *,
        ping_interval: float,
        form: StreamForm,
        straight: DirectStream | None = None,
    ) -> None:
        super().__init__(headers=headers or {})
        self.raw_headers = [
            (b"content-type", form.media_type),
            *HEADERS,
            *(given for given in self.raw_headers if given[0] != b"content-length"),
        ]
        self._events = events
        self._ping_interval = ping_interval if form.ping else 0.0
        self._form = form
        self._straight = straight or DirectStream()
        self._state: dict[str, Any] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._state = scope.setdefault("state", {})
        self._state["stream_failed"] = self._form.failed  # for a guard that ends it
        writer = _Writer(send, self.raw_headers, self._form.ping, self._straight)
        await unless_disconnected(scope, receive, self._run(writer))

    async def _run(self, writer: _Writer) -> None:
        last = self._form.end
        silence = _Silence(writer, self._ping_interval) if self._ping_interval else None
        try:
            async with aclosing(self._events) as events:
                try:
                    async for content in events:
                        await writer.write(content)
                        self._straight.outlet = self._state.get("outlet")
                except Exception as fault:
                    if not writer.has_begun:
                        raise
                    error = self._state["stream_error"] = as_request_error(fault)  # which no status says any more
                    last = self._form.failed(error)
                await writer.end(last)
        finally:
            if silence is not None:
                await silence.end()


class _Writer:
    """The sending side; each write is of whole events, so that a ping never falls into one.

    The response begins with the first of them, be it an event or a ping.
    """

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]], ping: bytes, straight: DirectStream) -> None:
        self._send = send
        self._headers = headers
        self._ping = ping
        self._straight = straight
        self._turn = asyncio.Lock()
        self._num_own = 0
        self.has_begun = False

    async def write(self, content: bytes) -> None:
        async with self._turn:
            await self._write(content)

    async def end(self, last: bytes) -> None:
        async with self._turn:
            await self._write(last, more=False)

    @property
    def num_writes(self) -> int:
        return self._num_own + self._straight.num_writes

    async def ping(self, num_writes: int) -> None:
        """Write a ping, unless more than `num_writes` writes have been made when its turn comes."""
        async with self._turn:
            if self.num_writes == num_writes:
                await self._write(self._ping)

    async def _write(self, content: bytes, *, more: bool = True) -> None:
        self._num_own += 1
        if not self.has_begun:
            self.has_begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await self._send({"type": "http.response.body", "body": with_plain_lines(content), "more_body": more})


class _Silence:
    """Looks once in an interval whether a writer has written, and has it ping where it has not. It does so by a timer:
    to set one takes a tenth of what a task would."""

    def __init__(self, writer: _Writer, interval: float) -> None:
        self._writer = writer
        self._interval = interval
        self._loop = asyncio.get_running_loop()
        self._pinging: asyncio.Task[None] | None = None
        self._wait()

    def _wait(self) -> None:
        self._timer = self._loop.call_later(self._interval, self._look, self._writer.num_writes)

    def _look(self, num_writes: int) -> None:
        is_silent = self._writer.num_writes == num_writes
        if is_silent and (self._pinging is None or self._pinging.done()):
            self._pinging = asyncio.ensure_future(self._writer.ping(num_writes))
        self._wait()

    async def end(self) -> None:
        """Look no more; a ping that waits for its turn is not written."""
        self._timer.cancel()
        if self._pinging is not None:
            self._pinging.cancel()
            await asyncio.gather(self._pinging, return_exceptions=True)
