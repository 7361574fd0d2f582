"""Tracing: which requests have a trace, and how they ended."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

from d3engine.server.errors import RequestError
from d3engine.server.guards.exchange import CLIENT_LEFT, RequestLog
from d3engine.server.tracing.request_trace import Attributes, RequestTrace
from d3engine.server.tracing.tracer import Tracer

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

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
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
