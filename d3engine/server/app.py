"""The app: which route answers what, and how errors leave it.

Routes raise, and the guards around them make answers of errors, so that all of them read alike.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.types import ASGIApp

from d3engine.async_engine.client import EngineClient
from d3engine.server.middleware.access import OPEN_PATHS
from d3engine.server.middleware.request_log import RequestLog, log_exchange
from d3engine.server.middleware.stack import guards
from d3engine.server.routes.api import (
    PAGE_PATHS,
    PAGE_ROUTES,
    count_message_tokens,
    create_chat_completion,
    create_completion,
    create_message,
    create_response,
    detokenize,
    list_models,
    show_model,
    tokenize,
    tokenizer_info,
)
from d3engine.server.routes.openapi import show_health, show_metrics, show_openapi, show_readiness, show_version
from d3engine.server.routing import Route, errors_raised
from d3engine.server.settings import ServerSettings
from d3engine.server.state import AppState

ROUTES = (
    Route("/v1/completions", create_completion, methods=["POST"]),
    Route("/v1/chat/completions", create_chat_completion, methods=["POST"]),
    Route("/v1/responses", create_response, methods=["POST"]),
    Route("/v1/messages", create_message, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_message_tokens, methods=["POST"]),
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{name:path}", show_model, methods=["GET"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/tokenizer_info", tokenizer_info, methods=["GET"]),
    Route("/health", show_health, methods=["GET"]),
    Route("/ready", show_readiness, methods=["GET"]),
    Route("/version", show_version, methods=["GET"]),
    Route("/metrics", show_metrics, methods=["GET"]),
    Route("/openapi.json", show_openapi, methods=["GET"]),
)

BODY_PATHS = frozenset(route.path for route in ROUTES if "POST" in (route.methods or ()))


def create_app(client: EngineClient, settings: ServerSettings) -> Starlette:
    """The app that answers for an engine.

    Args:
        client: the engine, which the caller closes after the app has ended.
        settings: what the server's owner has decided.

    Raises `MissingExtraError` where it is to be traced without the extra `otel`.
    """
    served = AppState(client, settings)

    def note(exchange: RequestLog) -> None:
        log_exchange(exchange)
        served.meters.count_exchange(exchange)

    app = _App(
        routes=[*ROUTES, *PAGE_ROUTES],
        middleware=guards(
            settings.guards, served.traffic, note, OPEN_PATHS | PAGE_PATHS, BODY_PATHS, tracer=served.tracer
        ),
    )
    app.state.served, app.state.traffic = served, served.traffic
    return app


class _App(Starlette):
    """Whose guards alone handle errors: Starlette's own handlers would stand in the way of every message too."""

    def build_middleware_stack(self) -> ASGIApp:
        app = errors_raised(self.router)
        for guard, arguments, named in reversed(self.user_middleware):
            app = guard(app, *arguments, **named)
        return app
