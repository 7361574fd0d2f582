"""Exchange: one request and its answer, seen from outside: its id, its line in the log, and the last word on errors.

The one idea: guards and routes raise, and whatever comes this far becomes an answer here, so that no fault of a request
is seen by the server that runs the app.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from d3engine.server.errors import RequestError, as_request_error, error_response

_log = logging.getLogger(__name__)

CLIENT_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""Asked every few seconds by machines: they have a line in the log only where they fail."""
EXPECTED = frozenset({"draining", "full"})
"""What a server says of itself by a status above 500 although nothing is wrong with it."""
CLIENT_LEFT = 499
"""In place of a status where there was nobody left to answer."""


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
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange: RequestLog = scope["state"]["exchange"]
        try:
            await self.app(scope, receive, send)
        except Exception as error:
            # Apart: an error that a variable of this call keeps would keep the call, and with it the connection.
            await _answer(as_request_error(error), exchange, scope, receive, send)


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
