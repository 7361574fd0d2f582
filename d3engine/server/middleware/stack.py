"""The guards of an app, in the order in which a request meets them."""

from __future__ import annotations

from collections.abc import Callable

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from d3engine.server.middleware.access import OPEN_PATHS, HostGuard, KeyGuard, hosts_of
from d3engine.server.middleware.bodies import BodyGuard
from d3engine.server.middleware.limits import AdmissionControl, DeadlineGuard, TrafficGuard
from d3engine.server.middleware.request_log import ErrorAnswers, ExchangeLog, RequestLog, TracingGuard
from d3engine.server.middleware.settings import GuardSettings
from d3engine.server.tracing import Tracer

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
