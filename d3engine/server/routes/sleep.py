"""Sleep and wake: the memory of a model is freed on demand, and loaded again, by vLLM's routes."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from d3engine.errors import require
from d3engine.server.errors import RequestError
from d3engine.server.routes.api import Route, further_models
from d3engine.server.schemas.answers import SleepState
from d3engine.server.state import json_response, served_by

SLEEPS = {"level": "1", "mode": "wait"}
"""What may be asked of a sleep: weights and KV cache are freed, after the requests in progress."""


async def sleep(request: Request) -> Response:
    """Free weights and KV cache of a model after its requests in progress, where the server allows it."""
    _check_may_sleep(request)
    await further_models(request).sleep(_model_of(request, "model", *SLEEPS))
    return _state(request)


async def wake_up(request: Request) -> Response:
    """Load a model that sleeps, where the server allows it."""
    _check_may_sleep(request)
    await further_models(request).wake_up(_model_of(request, "model"))
    return _state(request)


async def is_sleeping(request: Request) -> Response:
    """Whether a model sleeps."""
    return _state(request)


def _state(request: Request) -> Response:
    found: SleepState = {"is_sleeping": further_models(request).is_sleeping(request.query_params.get("model"))}
    return json_response(found)


def _model_of(request: Request, *names: str) -> str | None:
    """The model that the query names. Raises `RequestError` for a parameter that cannot be honoured."""
    for name, value in request.query_params.multi_items():
        require(name in names, name, value, f"absent: the parameters here are {', '.join(names)}")
        require(value == SLEEPS.get(name, value), name, value, f"{SLEEPS.get(name)} or absent")
    return request.query_params.get("model")


def _check_may_sleep(request: Request) -> None:
    """Refuse what the server's owner does not allow, and pages of other origins: no body asks their browser first."""
    settings = served_by(request).settings
    if not settings.enable_sleep_mode:
        message = "Models sleep and wake on demand only where the server was started with --enable-sleep-mode."
        raise RequestError(403, message, code="sleep_not_allowed")
    origin, allowed = request.headers.get("origin"), settings.guards.allowed_origins
    is_own = origin is None or origin.partition("://")[2] == request.headers.get("host")
    if not (is_own or origin in allowed or "*" in allowed):
        raise RequestError(403, "Pages of other origins put no model to sleep.", code="origin_not_allowed")


ROUTES = (
    Route(
        "/sleep",
        sleep,
        answer=SleepState,
        method="POST",
        queries={"model": {}, **{name: {"enum": [value]} for name, value in SLEEPS.items()}},
        loads=True,
    ),
    Route("/wake_up", wake_up, answer=SleepState, method="POST", queries={"model": {}}, loads=True),
    Route("/is_sleeping", is_sleeping, answer=SleepState, queries={"model": {}}),
)
