"""What those ask who operate a server: GET /health, /ready, /version, /metrics."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from d3engine.server.answers import json_response
from d3engine.server.health import Health, health, readiness
from d3engine.server.served import AppState, served_by
from d3engine.version import __version__

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def show_health(request: Request) -> Response:
    """200 while it can be expected to answer; 503 with the reason once it cannot."""
    return _answer(request, _health(served_by(request)))


async def show_readiness(request: Request) -> Response:
    """As /health, and 503 while it would refuse a request because of its queue."""
    served = served_by(request)
    return _answer(request, readiness(_health(served), served.traffic))


async def show_version(request: Request) -> Response:
    """Which d3engine this is."""
    return json_response({"version": __version__})


async def show_metrics(request: Request) -> Response:
    """All metrics, in the text format of Prometheus."""
    served = served_by(request)
    text = await served.exposition.text(served.client, served.traffic, served.meters)
    return Response(text, media_type=METRICS_TYPE)


def _health(served: AppState) -> Health:
    return health(served.client.heartbeat(), served.traffic, served.settings.guards.health_stall_seconds)


def _answer(request: Request, found: Health) -> Response:
    if not found.is_ok:
        request.state.exchange.code = found.status
    body = {"status": found.status} | ({} if found.reason is None else {"reason": found.reason})
    response = json_response(body, {"Cache-Control": "no-store"})
    response.status_code = 200 if found.is_ok else 503
    return response
