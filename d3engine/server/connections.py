"""HTTP as uvicorn speaks it, with bounds on heads and bodies that never end, and one write for what comes at once."""

from __future__ import annotations

import asyncio
import weakref
from contextlib import suppress
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from d3engine.server.errors import RequestError, error_body
from d3engine.server.middleware.bodies import check_framing

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 256
MAX_CHUNK_FRAMING = 16 * 1024
"""Bytes of chunk sizes, chunk extensions and trailers, beyond `FRAMING_PER_BYTE` for each byte of the body."""
FRAMING_PER_BYTE = 8
MOST_GATHERED = 64 * 1024
"""Bytes of one write: after them it must show whether the client reads."""
OF_UPGRADES = (b"upgrade", b"http2-settings")
RETRY_SECONDS = 1
"""After which a connection that was one too many may be tried again."""
LINGER_SECONDS = 5.0
"""For a client to end a body that was refused, so that it reads why; what comes is thrown away."""


class WriteBuffer:
    """A transport for uvicorn: what is written in one turn of the event loop is one write, for which the kernel takes
    as long as for each of its parts.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self.transport = transport
        self._call_soon = loop.call_soon
        self._size = 0
        self.waiting: list[bytes] = []
        self.is_closing = transport.is_closing
        self.abort = transport.abort
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading
        self.get_extra_info = transport.get_extra_info

    def write(self, data: bytes) -> None:
        """Write it with what comes in the same turn; at once where that would be much."""
        if not self.waiting:
            self._call_soon(self.flush)
        self.waiting.append(data)
        self._size += len(data)
        if self._size >= MOST_GATHERED:
            self.flush()

    def flush(self) -> None:
        if self.waiting and not self.is_closing():
            self.transport.write(b"".join(self.waiting))
        self.waiting.clear()
        self._size = 0

    def close(self) -> None:
        self.flush()
        self.transport.close()


class DirectWriter:
    """Of one streamed answer: writes chunks to the socket at once, past all that stands between a route and that."""

    def __init__(self, cycle: RequestResponseCycle, gathered: WriteBuffer) -> None:
        self._cycle = weakref.ref(cycle)  # whose scope holds this: no garbage is left for the collector to find
        self._flow = cycle.flow
        self._gathered = gathered
        self._write = gathered.transport.write
        self._is_closing = gathered.is_closing

    @property
    def is_free(self) -> bool:
        """Whether what is written now goes on its way: the client is there, and what was written has not piled up."""
        cycle = self._cycle()
        if cycle is None or cycle.disconnected or cycle.response_complete or not cycle.chunked_encoding:
            return False
        return not (self._flow.write_paused or self._is_closing())

    def write(self, content: bytes) -> None:
        if self._gathered.waiting:
            self._gathered.flush()
        self._write(b"%x\r\n%b\r\n" % (len(content), content))


class UnchunkedCycle(RequestResponseCycle):
    """Of a client of HTTP/1.0, which knows no chunks: an answer without a length ends where the connection does."""

    has_length = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            self.chunked_encoding = None if self.has_length else False
        elif not self.has_length:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class GuardedConnection(HttpToolsProtocol):
    """One connection.

    Args:
        header_timeout: seconds until the head of a request is there.
        max_connections: that are open at once. One more takes the place of the one that has been idle longest, and is
            refused where all are at work.
    """

    def __init__(self, header_timeout: float, max_connections: int = 1024, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._max_connections = max_connections
        self._idle_since: float | None = None
        self._header_timeout = header_timeout
        self._timer: asyncio.TimerHandle | None = None
        self._in_head = True
        self._in_message = False
        self._is_upgrade = False
        self._head_bytes = 0
        self._framing_fault: RequestError | None = None
        self._is_chunked = False
        self._num_begun = self._num_of_bodies = 0  # messages, and bytes of their bodies, in what is being read
        self._framing_left = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._gathered = WriteBuffer(transport, self.loop)
        super().connection_made(cast(asyncio.Transport, self._gathered))
        self._client_left: asyncio.Future[None] = self.loop.create_future()
        self._set_timer(self._header_timeout, self._head_is_late)
        if len(self.connections) > self._max_connections:
            self._make_room()
        self._idle_since = self.loop.time()

    def _make_room(self) -> None:
        """End the connection that has been idle longest, or this one."""
        there = [one for one in self.connections if isinstance(one, GuardedConnection)]
        there = [one for one in there if not one.transport.is_closing()]
        idle = [(one._idle_since, id(one), one) for one in there if one._idle_since is not None]
        if len(there) <= self._max_connections:
            return
        if idle:
            _, _, longest = min(idle)
            longest._stop_timer()
            longest.transport.close()
        else:
            message = "The server has as many connections as it takes; try again later."
            self._refuse(503, message, "too_many_connections", b"retry-after: %d\r\n" % RETRY_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        self._client_left.set_result(None)

    def data_received(self, data: bytes) -> None:
        has_begun = self._in_head and self._in_message
        body_begins = 0 if self._in_message and not self._in_head else data.find(b"\r\n\r\n") + 4
        self._num_begun = self._num_of_bodies = 0
        self._feed(data)
        self._count_framing(len(data) - body_begins, has_begun or body_begins == 0)
        if has_begun and self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, f"The head of the request is longer than {MAX_HEAD_BYTES} bytes.", "head_too_long")

    def _feed(self, data: bytes) -> None:
        """Parse it, as uvicorn does. No upgrade is answered, so a request for one is any other of HTTP/1.1: Java's own
        client asks for HTTP/2 with each.
        """
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.send_400_response("")
        except httptools.HttpParserUpgrade as stopped:  # behind the head, whose body it would take for a protocol
            head = self._head_without_upgrade()
            self.parser, self._is_upgrade = httptools.HttpRequestParser(self), False
            with suppress(AttributeError):  # httptools before 0.6.3
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self._num_begun -= 1
            self._feed(head + data[stopped.args[0] :])

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                value = b",".join(one for one in value.split(b",") if one.strip().lower() not in OF_UPGRADES)
            if name not in OF_UPGRADES:
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    def _count_framing(self, size: int, has_begun: bool) -> None:
        """Refuse a chunked body whose chunk extensions or trailers are too long; `size` has come of it just now."""
        if not self._is_chunked or self._in_head or self._num_begun + has_begun != 1:
            return
        self._framing_left += (1 + FRAMING_PER_BYTE) * self._num_of_bodies - size
        if self._framing_left < 0:
            if self.cycle.response_complete:
                self.transport.close()
            else:
                message = "The chunk extensions or trailers of the body are too long."
                self._refuse(400, message, "chunk_extensions_too_long")

    # -- what the parser calls -----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if not self._in_head or self._timer is None:
            self._set_timer(self._header_timeout, self._head_is_late)
        self._in_head = self._in_message = True
        self._head_bytes = 0
        self._num_begun += 1
        self._framing_left = MAX_CHUNK_FRAMING
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer, which no guard has seen
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            raise ValueError("too many headers")

    def on_headers_complete(self) -> None:
        self._is_upgrade = self.parser.should_upgrade() and any(name == b"upgrade" for name, _ in self.headers)
        if self._is_upgrade:
            return
        self._in_head = False
        self._idle_since = None
        self._stop_timer()
        try:
            check_framing(self.headers)
        except RequestError as error:
            self._framing_fault = error
            raise
        self._is_chunked = any(name == b"transfer-encoding" for name, _ in self.headers)
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.__class__ = UnchunkedCycle
        self.scope["state"]["abort_connection"] = self.transport.abort
        self.scope["state"]["client_left"] = self._client_left
        self.scope["state"]["outlet"] = DirectWriter(self.cycle, self._gathered)

    def on_body(self, body: bytes) -> None:
        self._num_of_bodies += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_upgrade:
            return
        self._in_message = False
        self._stop_timer()
        self.scope["state"]["has_come_whole"] = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.pipeline:
            self._idle_since = self.loop.time()
        if self._in_message and not self._in_head and self.cycle.response_complete:
            self._set_timer(LINGER_SECONDS, self.transport.abort)

    # -- how it ends -----------------------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        fault = self._framing_fault
        if fault is not None:
            self._refuse(fault.status, fault.message, str(fault.code))
        else:
            self._refuse(400, "This is not HTTP that the server reads.", "invalid_http")

    def _head_is_late(self) -> None:
        if self._in_message:
            seconds = f"{self._header_timeout:g}"
            self._refuse(408, f"The head of the request did not come within {seconds} seconds.", "head_timeout")
        elif self.transport is not None:
            self.transport.close()

    def _refuse(self, status: int, message: str, code: str, header: bytes = b"") -> None:
        """Answer what is no request, unless another is being answered, and end the connection."""
        if self.transport is None or self.transport.is_closing():
            return
        cycle = self.cycle
        if not self.pipeline and (cycle is None or cycle.response_complete or not cycle.response_started):
            body = error_body(RequestError(status, message, code=code))
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + header + head + body)
        self.transport.close()

    def _set_timer(self, seconds: float, act: Any) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, act)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
