"""The app: which route answers what, and how errors leave it.

The one idea: routes raise, and the guards around them make answers of errors, so that all of them read alike.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from d3engine.async_engine.client import EngineClient
from d3engine.server.errors import RequestError, as_request_error, error_response
from d3engine.server.guards.exchange import log_exchange
from d3engine.server.guards.stack import guards
from d3engine.server.guards.traffic import Traffic
from d3engine.server.routes.chat import create_chat_completion
from d3engine.server.routes.completions import create_completion
from d3engine.server.routes.models import list_models, show_model
from d3engine.server.routes.tokens import detokenize, tokenize, tokenizer_info
from d3engine.server.served import Served
from d3engine.server.settings import ServerSettings

QUEUE_PER_SEQUENCE = 4
"""Requests that may wait for each that may run, unless the settings say otherwise."""

ROUTES = (
    Route("/v1/completions", create_completion, methods=["POST"]),
    Route("/v1/chat/completions", create_chat_completion, methods=["POST"]),
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{name:path}", show_model, methods=["GET"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/tokenizer_info", tokenizer_info, methods=["GET"]),
)


def create_app(client: EngineClient, settings: ServerSettings) -> Starlette:
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
    app.state.traffic = traffic
    app.state.served = Served(client, settings)
    return app


def _places(client: EngineClient, settings: ServerSettings) -> int:
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
