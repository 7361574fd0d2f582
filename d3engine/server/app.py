"""The app: which route answers what, and how errors leave it.

The one idea: routes raise; only here does an error become a response, so all of them read alike.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from d3engine.depth.policy import calibrated_for, policy_from_directory
from d3engine.server.errors import RequestError, as_request_error, error_response
from d3engine.server.guards.exchange import log_exchange
from d3engine.server.guards.stack import guards
from d3engine.server.guards.traffic import Traffic
from d3engine.server.model_ids import ModelIds
from d3engine.server.routes.models import list_models, show_model
from d3engine.server.served import Served
from d3engine.server.settings import ServerSettings

QUEUE_PER_SEQUENCE = 4
"""Requests that may wait for each that may run, unless the settings say otherwise."""

Endpoint = Callable[[Request], Awaitable[Response]]


def _route(method: str, path: str, endpoint: Endpoint) -> BaseRoute:
    """A route whose errors are answers; only what fails outside of all routes reaches Starlette."""

    @wraps(endpoint)
    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except Exception as error:
            return error_response(as_request_error(error))

    return Route(path, answer, methods=[method])


ROUTES = (
    _route("GET", "/v1/models", list_models),
    _route("GET", "/v1/models/{name:path}", show_model),
)


def create_app(client: Any, settings: ServerSettings) -> Starlette:
    """The app that answers for an engine.

    Args:
        client: the engine, which the caller closes after the app has ended.
        settings: what the server's owner has decided.
    """
    traffic = Traffic(_places(client, settings))
    app = Starlette(
        routes=list(ROUTES),
        middleware=guards(settings.guards, traffic, log_exchange),
        exception_handlers={HTTPException: _no_route, Exception: _failed},
    )
    models = ModelIds(
        settings,
        own=client.depth,
        num_layers=client.config.num_layers,
        max_model_len=client.max_model_len,
        calibrated=_is_calibrated(client),
        created=int(time.time()),
    )
    app.state.traffic = traffic
    app.state.served = Served(client, settings, models)
    return app


def _is_calibrated(client: Any) -> bool:
    """Whether the engine runs the very setting that calibration has left beside its weights."""
    directory = client.settings.directory
    return calibrated_for(directory) is not None and policy_from_directory(directory) == client.depth


def _places(client: Any, settings: ServerSettings) -> int:
    """How many sequences may run or wait."""
    running: int = client.settings.max_num_seqs
    waiting = settings.guards.max_queue
    return running + (QUEUE_PER_SEQUENCE * running if waiting is None else waiting)


async def _failed(request: Request, error: Exception) -> Response:
    return error_response(as_request_error(error))


async def _no_route(request: Request, error: Exception) -> Response:
    """What the router itself refuses: a path or a method that is not there."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:256]
    if error.status_code == 404:
        message, code = f"There is nothing at {path!r}.", "not_found"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "other methods")
        message, code = f"{path!r} takes {allowed}, not {request.method}.", "method_not_allowed"
    else:
        message, code = str(error.detail), "invalid_request"
    return error_response(RequestError(error.status_code, message, code=code, headers=error.headers))
