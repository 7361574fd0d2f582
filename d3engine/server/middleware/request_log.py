"""One line of log and one trace for each request, and answers for what was raised inside."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from d3engine.server.errors import RequestError, as_request_error, error_response
from d3engine.server.tracing import Attributes, RequestTrace

if TYPE_CHECKING:
    from d3engine.server.tracing_export import SpanWriter

OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
}
"""Path -> OpenTelemetry's word for what is asked there; other paths have no traces."""
UNTRACED = frozenset({"host_not_allowed", "invalid_api_key"})
"""Who may not call at all writes nothing into anybody's traces."""


class TracingGuard:
    """Gives each request for an answer its trace, and hands that on when all other guards are through with it."""

    def __init__(self, app: ASGIApp, tracer: SpanWriter) -> None:
        self.app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation = OPERATIONS.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if operation is None:
            await self.app(scope, receive, send)
            return
        trace = scope["state"]["trace"] = RequestTrace(operation, scope["path"])
        was_cut = False
        try:
            await self.app(scope, receive, send)
        except asyncio.CancelledError:
            was_cut = True
            raise
        finally:
            self._end(trace, scope, was_cut)

    def _end(self, trace: RequestTrace, scope: Scope, was_cut: bool) -> None:
        exchange: RequestLog = scope["state"]["exchange"]
        if exchange.code in UNTRACED:
            return
        error = "cancelled" if was_cut else _error_of(trace, exchange, scope["state"].get("stream_error"))
        answered: Attributes = {"d3engine.request_id": exchange.request_id}
        answered["http.response.status_code"] = exchange.status
        self._tracer.write(trace, scope, answered, error)


def _error_of(trace: RequestTrace, exchange: RequestLog, in_stream: RequestError | None) -> str | None:
    """One word for what kept a request from being answered to its end, of a fixed set; None where nothing did."""
    if in_stream is not None:
        return in_stream.code or str(in_stream.status)
    if exchange.status >= 400 and exchange.status != CLIENT_LEFT:
        return exchange.code or str(exchange.status)
    return "client_closed_request" if exchange.status == CLIENT_LEFT or trace.is_unfinished else None


_log = logging.getLogger(__name__)

CLIENT_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""Asked every few seconds by machines: they have a line in the log only where they fail."""
EXPECTED = frozenset({"draining", "full"})
"""What a server says of itself by a status above 500 although nothing is wrong with it."""
CLIENT_LEFT = 499
"""In place of a status where the client had left."""


@dataclass(slots=True)
class RequestLog:
    """What was asked and how it was answered. Times in seconds on the monotonic clock."""

    request_id: str
    method: str
    path: str
    began: float = field(default_factory=time.monotonic)
    status: int = CLIENT_LEFT
    code: str | None = None
    """Of the error that a guard answered with, or what /health said was wrong; None where neither did."""


class ExchangeLog:
    """The outermost guard. `note` is called once for each exchange, when it has ended."""

    def __init__(self, app: ASGIApp, note: Callable[[RequestLog], None]) -> None:
        self.app = app
        self._note = note

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = RequestLog(_request_id(scope), scope["method"], scope["path"])
        scope.setdefault("state", {}).update(request_id=exchange.request_id, exchange=exchange)
        id_header = (b"x-request-id", exchange.request_id.encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                own = (id_header, (b"x-content-type-options", b"nosniff"))
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        finally:
            self._note(exchange)


class ErrorAnswers:
    """Answers what was raised inside of it, in the words of the path; a stream that has begun is cut off instead."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.app(scope, receive, send)
        except Exception as error:
            if scope["type"] != "http":
                raise
            # Apart: an error that a variable of this call keeps would keep the call, and with it the connection.
            await _answer(as_request_error(error), scope["state"]["exchange"], scope, receive, send)


async def _answer(error: RequestError, exchange: RequestLog, scope: Scope, receive: Receive, send: Send) -> None:
    if exchange.status == CLIENT_LEFT:
        exchange.code = error.code
        await error_response(error, scope["path"])(scope, receive, send)


def _request_id(scope: Scope) -> str:
    """The client's own id where it may be one, else a new one."""
    given: list[bytes] = [value for name, value in scope["headers"] if name == b"x-request-id"]
    if len(given) == 1 and CLIENT_ID.fullmatch(given[0]):
        return given[0].decode()
    return os.urandom(16).hex()


def log_exchange(exchange: RequestLog) -> None:
    """Its line in the log, without anything of the prompt or of the answer."""
    failed = exchange.status >= 500 and exchange.code not in EXPECTED
    level = logging.ERROR if failed else logging.INFO
    if not _log.isEnabledFor(level) or (exchange.path in QUIET_PATHS and not failed):
        return
    seconds = time.monotonic() - exchange.began
    why = f" {exchange.code}" if exchange.code else ""
    path = exchange.path[:200].encode("unicode_escape").decode()
    line = f"{exchange.method} {path} {exchange.status}{why} {seconds:.3f} s {exchange.request_id}"
    _log.log(level, line)
