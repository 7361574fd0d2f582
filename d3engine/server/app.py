"""The app: which route answers what, and how errors leave it.

Routes raise, and the guards around them make answers of errors, so that all of them read alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from d3engine.server.errors import RequestError
from d3engine.server.middleware.access import OPEN_PATHS, HostGuard, KeyGuard, hosts_of
from d3engine.server.middleware.bodies import BodyGuard
from d3engine.server.middleware.limits import AdmissionControl, DeadlineGuard, TrafficGuard
from d3engine.server.middleware.request_log import ErrorAnswers, ExchangeLog, RequestLog, TracingGuard, log_exchange
from d3engine.server.middleware.settings import GuardSettings
from d3engine.server.models import FurtherModels, ModelRouter
from d3engine.server.routes.api import (
    PAGE_PATHS,
    PAGE_ROUTES,
    Route,
    count_message_tokens,
    create_chat_completion,
    create_completion,
    create_message,
    create_response,
    detokenize,
    list_models,
    load_lora_adapter,
    show_model,
    tokenize,
    tokenizer_info,
    unload_lora_adapter,
)
from d3engine.server.routes.embeddings import create_embeddings
from d3engine.server.routes.llama_cpp import (
    llama_apply_template,
    llama_completion,
    llama_infill,
    llama_props,
    llama_slots,
)
from d3engine.server.routes.ollama import (
    ollama_chat,
    ollama_embed,
    ollama_embeddings,
    ollama_generate,
    ollama_ps,
    ollama_show,
    ollama_tags,
    ollama_version,
)
from d3engine.server.routes.openapi import show_health, show_metrics, show_openapi, show_readiness, show_version
from d3engine.server.routes.scores import create_ranking, create_scores
from d3engine.server.routes.sleep import is_sleeping, sleep, wake_up
from d3engine.server.settings import ServerSettings
from d3engine.server.state import AppState
from d3engine.server.tracing import Tracer

if TYPE_CHECKING:
    from d3engine.async_engine.async_engine import AsyncEngine

ROUTES = (
    Route("/v1/completions", create_completion, methods=["POST"]),
    Route("/v1/chat/completions", create_chat_completion, methods=["POST"]),
    Route("/v1/responses", create_response, methods=["POST"]),
    Route("/v1/messages", create_message, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_message_tokens, methods=["POST"]),
    Route("/v1/embeddings", create_embeddings, methods=["POST"]),
    Route("/v1/score", create_scores, methods=["POST"]),
    Route("/score", create_scores, methods=["POST"]),
    Route("/v1/rerank", create_ranking, methods=["POST"]),
    Route("/rerank", create_ranking, methods=["POST"]),
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{name:path}", show_model, methods=["GET"]),
    Route("/v1/load_lora_adapter", load_lora_adapter, methods=["POST"]),
    Route("/v1/unload_lora_adapter", unload_lora_adapter, methods=["POST"]),
    Route("/sleep", sleep, methods=["POST"]),
    Route("/wake_up", wake_up, methods=["POST"]),
    Route("/is_sleeping", is_sleeping, methods=["GET"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/tokenizer_info", tokenizer_info, methods=["GET"]),
    Route("/api/chat", ollama_chat, methods=["POST"]),
    Route("/api/generate", ollama_generate, methods=["POST"]),
    Route("/api/embed", ollama_embed, methods=["POST"]),
    Route("/api/embeddings", ollama_embeddings, methods=["POST"]),
    Route("/api/show", ollama_show, methods=["POST"]),
    Route("/api/tags", ollama_tags, methods=["GET"]),
    Route("/api/ps", ollama_ps, methods=["GET"]),
    Route("/api/version", ollama_version, methods=["GET"]),
    Route("/completion", llama_completion, methods=["POST"]),
    Route("/completions", llama_completion, methods=["POST"]),
    Route("/infill", llama_infill, methods=["POST"]),
    Route("/apply-template", llama_apply_template, methods=["POST"]),
    Route("/props", llama_props, methods=["GET"]),
    Route("/slots", llama_slots, methods=["GET"]),
    Route("/health", show_health, methods=["GET"]),
    Route("/ready", show_readiness, methods=["GET"]),
    Route("/version", show_version, methods=["GET"]),
    Route("/metrics", show_metrics, methods=["GET"]),
    Route("/openapi.json", show_openapi, methods=["GET"]),
)

BODY_PATHS = frozenset(route.path for route in ROUTES if "POST" in (route.methods or ())) - {"/sleep", "/wake_up"}


def create_app(
    client: AsyncEngine,
    settings: ServerSettings,
    further: Callable[[AppState], FurtherModels] | None = None,
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
    tracer: Tracer | None = None,
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
    stack.append(Middleware(ErrorAnswers))
    hosts = hosts_of(settings)
    if hosts is not None:
        stack.append(Middleware(HostGuard, hosts=hosts))
    return [
        *stack,
        Middleware(KeyGuard, api_keys=settings.api_keys, metrics_keys=settings.metrics_keys, open_paths=open_paths),
        Middleware(DeadlineGuard, request_timeout=settings.request_timeout, write_timeout=settings.write_timeout),
        Middleware(TrafficGuard, traffic=traffic),
        Middleware(BodyGuard, max_bytes=settings.max_body_bytes, timeout=settings.body_timeout, paths=body_paths),
    ]


class _App(Starlette):
    """Whose guards alone handle errors: Starlette's own handlers would stand in the way of every message too."""

    def build_middleware_stack(self) -> ASGIApp:
        app = errors_raised(self.router)
        for guard, arguments, named in reversed(self.user_middleware):
            app = guard(app, *arguments, **named)
        return app


def errors_raised(router: ASGIApp) -> ASGIApp:
    """The router, which raises `RequestError` for a path or a method that is not there."""

    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await router(scope, receive, send)
        except HTTPException as error:
            raise _no_route(error, scope) from None

    return route


def _no_route(error: HTTPException, scope: Scope) -> RequestError:
    path = scope["path"][:256]  # not of the URL, in which Host has a say
    if error.status_code == 404:
        message, code = f"There is nothing at {path!r}.", "not_found"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "other methods")
        message, code = f"{path!r} takes {allowed}, not {scope['method']}.", "method_not_allowed"
    else:
        message, code = str(error.detail), "invalid_request"
    return RequestError(error.status_code, message, code=code, headers=error.headers)
