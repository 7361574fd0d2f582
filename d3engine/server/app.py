"""The app: its routes, and the guards around them, which make answers of the errors that routes raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from d3engine.server.errors import RequestError
from d3engine.server.middleware.access import OPEN_PATHS, AccessGuard, hosts_of
from d3engine.server.middleware.bodies import BodyGuard
from d3engine.server.middleware.limits import AdmissionControl, DeadlineGuard, TrafficGuard
from d3engine.server.middleware.request_log import ErrorAnswers, ExchangeLog, RequestLog, TracingGuard, log_exchange
from d3engine.server.middleware.settings import GuardSettings
from d3engine.server.models import FurtherModels, ModelRouter
from d3engine.server.routes import api, embeddings, llama_cpp, ollama, openapi, sleep
from d3engine.server.routes.api import PAGE_PATHS, PAGE_ROUTES
from d3engine.server.settings import ServerSettings
from d3engine.server.state import AppState

if TYPE_CHECKING:
    from d3engine.async_engine.async_engine import AsyncEngine
    from d3engine.server.tracing_export import SpanWriter

ROUTES = tuple(route for family in (api, embeddings, sleep, ollama, llama_cpp, openapi) for route in family.ROUTES)

BODY_PATHS = frozenset(route.path for route in ROUTES if route.body is not None)


def create_app(
    client: AsyncEngine, settings: ServerSettings, further: Callable[[AppState], FurtherModels] | None = None
) -> Starlette:
    """The app that answers for an engine.

    Args:
        client: the engine, which the caller closes after the app has ended.
        settings: what the server's owner has decided.
        further: makes the further models of the app, which the caller closes too.

    Raises `MissingExtraError` where it is to be traced without the extra `otel`.
    """
    served = AppState(client, settings)
    models = FurtherModels((), served) if further is None else further(served)

    def note(exchange: RequestLog) -> None:
        log_exchange(exchange)
        served.meters.count_exchange(exchange)

    stack = guards(settings.guards, served.traffic, note, OPEN_PATHS | PAGE_PATHS, BODY_PATHS, tracer=served.tracer)
    if models.models or settings.enable_sleep_mode:
        stack.append(Middleware(ModelRouter, models=models))
    app = _App(routes=[*ROUTES, *PAGE_ROUTES], middleware=stack)
    app.state.served, app.state.traffic, app.state.further = served, served.traffic, models
    return app


SHOWN_HEADERS = ("X-Request-Id", "X-D3-Ignored-Fields", "Retry-After")
"""What pages of other origins may read of an answer, where they may call at all."""


def guards(
    settings: GuardSettings,
    traffic: AdmissionControl,
    note: Callable[[RequestLog], None],
    open_paths: frozenset[str] = OPEN_PATHS,
    body_paths: frozenset[str] | None = None,
    tracer: SpanWriter | None = None,
) -> list[Middleware]:
    """What `Starlette(middleware=...)` takes: the outermost first; None are `body_paths` where any may take a body.

    Who may call is asked before anything of a body is read; what is refused is still an answer that a page of an
    allowed origin can read, and has its line in the log.
    """
    stack = [Middleware(ExchangeLog, note=note)]
    if tracer is not None:
        stack.append(Middleware(TracingGuard, tracer=tracer))
    if settings.allowed_origins:
        stack.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.allowed_origins,
                allow_methods=("GET", "POST"),
                allow_headers=("*",),
                expose_headers=SHOWN_HEADERS,
            )
        )
    return [
        *stack,
        Middleware(ErrorAnswers),
        Middleware(AccessGuard, settings.api_keys, settings.metrics_keys, open_paths, hosts_of(settings)),
        Middleware(DeadlineGuard, traffic, settings.request_timeout, settings.write_timeout),
        Middleware(TrafficGuard, traffic=traffic),
        Middleware(BodyGuard, max_bytes=settings.max_body_bytes, timeout=settings.body_timeout, paths=body_paths),
    ]


class _App(Starlette):
    """Whose guards alone handle errors: Starlette's own handlers would stand in the way of every message too."""

    def build_middleware_stack(self) -> ASGIApp:
        app: ASGIApp = self._route
        for guard, arguments, named in reversed(self.user_middleware):
            app = guard(app, *arguments, **named)
        return app

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The router, which raises `RequestError` for a path or a method that is not there."""
        try:
            await self.router(scope, receive, send)
        except HTTPException as error:
            path = scope["path"][:256]  # not of the URL, in which Host has a say
            message, code = str(error.detail), "invalid_request"
            if error.status_code == 404:
                message, code = f"There is nothing at {path!r}.", "not_found"
            elif error.status_code == 405:
                allowed = (error.headers or {}).get("Allow", "other methods")
                message, code = f"{path!r} takes {allowed}, not {scope['method']}.", "method_not_allowed"
            raise RequestError(error.status_code, message, code=code, headers=error.headers) from None
