"""GET /openapi.json, made of the shapes that bodies are read and written by, and the routes of operation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import Any, get_args, get_origin

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from d3engine.server.errors import ANTHROPICS_ROOT, OLLAMAS_ROOT, TYPES
from d3engine.server.middleware.request_log import CLIENT_ID
from d3engine.server.requests.bodies import priority_bounds
from d3engine.server.requests.completions import prompt_schema
from d3engine.server.requests.refused import IGNORED_FIELDS
from d3engine.server.requests.sampling import DEPTH_HEADER, LONGEST_HEADER, logprob_bounds
from d3engine.server.routes.api import Route
from d3engine.server.schemas import messages, ollama, requests, responses
from d3engine.server.schemas.answers import AnthropicsError, Error, HealthAnswer, Version
from d3engine.server.schemas.requests import REFERENCE
from d3engine.server.state import AppState, Health, health, json_response, readiness, served_by
from d3engine.utils.version import __version__

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def show_health(request: Request) -> Response:
    """200 while the server can be expected to answer; 503 with the reason once it cannot."""
    return _answer_of_operation(request, _health(served_by(request)))


async def show_readiness(request: Request) -> Response:
    """As /health, and 503 while it would refuse a request because of its queue."""
    served = served_by(request)
    return _answer_of_operation(request, readiness(_health(served), served.traffic))


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


def _answer_of_operation(request: Request, found: Health) -> Response:
    if not found.is_ok:
        request.state.exchange.code = found.status
    body = {"status": found.status} | ({} if found.reason is None else {"reason": found.reason})
    response = json_response(body, {"Cache-Control": "no-store"})
    response.status_code = 200 if found.is_ok else 503
    return response


REFERRED = (
    *(messages.MessageTurn, messages.TextBlock, messages.ThinkingBlock, messages.ToolUseBlock),
    *(ollama.OllamaOptions, ollama.OllamaTurn),
    *(responses.OutputCall, responses.OutputMessage, responses.OutputReasoning),
    *(requests.AnswerForm, requests.Constraint, requests.NamedTool, requests.Tool, requests.Turn),
)
"""Shapes that fields of others refer to by name."""

ALWAYS = (400, 401, 404, 408, 421, 431, 500, 503, 504)
"""Statuses of errors that any request may meet: what it calls, by which name, with which key, and when."""
WITH_BODY = (413, 415, 429, 499)
"""And those of a request that has a body."""
RETRY = frozenset({429, 503})
"""Statuses that may say when to come back."""

_HEADERS: dict[str, dict[str, Any]] = {
    "X-Request-Id": {
        "description": "The client's own, or a new one.",
        "schema": {"type": "string", "pattern": f"^{CLIENT_ID.pattern.decode()}$"},
    },
    IGNORED_FIELDS: {
        "description": "Fields of the request that this server does not know.",
        "schema": {"type": "string"},
    },
    "Retry-After": {"description": "Seconds.", "schema": {"type": "string", "pattern": "^[0-9]+$"}},
}


VENDORED = "/page/vendor/"
"""Libraries of the page, which are no part of the API."""


async def show_openapi(request: Request) -> Response:
    """This description."""
    state = request.app.state
    if not hasattr(state, "openapi"):  # it takes a while, and stays the same
        routes = [route for route in request.app.routes if isinstance(route, Route) and VENDORED not in route.path]
        state.openapi = description(routes, served_by(request))
    return json_response(state.openapi)


def description(routes: Sequence[Route], served: AppState) -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        (method,) = set(route.methods or ()) - {"HEAD"}
        paths.setdefault(path, {})[method.lower()] = _operation(path, method.lower(), route)
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    components = {"schemas": _schemas(routes, served), "headers": _HEADERS, "securitySchemes": keys}
    return {
        "openapi": "3.1.0",
        "security": [{"bearer": []}, {"key": []}, {}],
        "info": {"title": "d3engine", "version": __version__},
        "paths": paths,
        "components": components,
    }


def _schemas(routes: Sequence[Route], served: AppState) -> dict[str, Any]:
    """All shapes, with the bounds that depend on the model and the server's settings."""
    named = [
        one
        for route in routes
        for shape in (route.body, route.answer, *route.events, _error_of(route.path))
        for one in (shape, *get_args(shape))
    ]
    shapes = [one for one in (*named, *REFERRED) if isinstance(one, type)]
    _, schemas = msgspec.json.schema_components(shapes, schema_hook=_schema, ref_template=REFERENCE)
    schemas["CompletionRequest"]["properties"]["prompt"] = prompt_schema(served)
    logprobs, priorities = logprob_bounds(served.settings).schema, priority_bounds(served.settings).schema
    names = ("logprobs", "top_logprobs", "prompt_logprobs", "n_probs")
    bounds = dict.fromkeys(names, logprobs) | {"priority": priorities}
    for schema in schemas.values():
        for name in schema.get("properties", {}).keys() & bounds:
            for kind in schema["properties"][name].get("anyOf", ()):
                if kind.get("type") == "integer":
                    kind |= bounds[name]
    return schemas


def _schema(kind: type) -> dict[str, Any]:
    """Of what msgspec has none for: `object` may be anything. For others msgspec asks for this very exception."""
    if kind is not object:
        raise NotImplementedError
    return {"description": "anything"}


def _error_of(path: str) -> Any:
    """The body of every error at a path."""
    if path.startswith(ANTHROPICS_ROOT):
        return AnthropicsError
    return ollama.OllamaError if path.startswith(OLLAMAS_ROOT + "/") else Error


def _operation(path: str, method: str, route: Route) -> dict[str, Any]:
    error = _error_of(path)
    operation: dict[str, Any] = {
        "summary": (route.endpoint.__doc__ or "").strip(),
        "operationId": f"{method}_{route.name}",
        "parameters": list(_parameters(path, route)),
        "responses": {"200": _answer(route, error), **_errors(route, error)},
    }
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": _content(route.body)}
    return operation


def _parameters(path: str, route: Route) -> Iterator[dict[str, Any]]:
    text = {"type": "string"}
    if "{name}" in path:
        yield {"name": "name", "in": "path", "required": True, "schema": {**text, "minLength": 1}}
    yield {"name": "X-Request-Id", "in": "header", "required": False, "schema": text}
    for name, more in route.queries.items():
        yield {"name": name, "in": "query", "required": False, "schema": {**text, **more}}
    if route.events:
        says = "As the field `depth`, for clients that cannot add one: a name, or an object as JSON."
        schema = {**text, "maxLength": LONGEST_HEADER}
        yield {"name": DEPTH_HEADER, "in": "header", "required": False, "description": says, "schema": schema}


def _answer(route: Route, error: Any) -> dict[str, Any]:
    content = _content(route.answer, route.media)
    shapes = [_reference(shape) for shape in (*route.events, *([error] if route.has_error_events else []))]
    if route.events and error is ollama.OllamaError:
        content["application/x-ndjson"] = {"schema": {"anyOf": shapes}}
    elif route.events:
        content["text/event-stream"] = {"schema": _event(shapes, ends_with_done=route.ends_with_done)}
    names = ["X-Request-Id", *([IGNORED_FIELDS] if route.body is not None else [])]
    return {"description": "The answer.", "headers": _headers(*names), "content": content}


def _event(shapes: list[dict[str, str]], *, ends_with_done: bool) -> dict[str, Any]:
    """One event: its data are JSON of one of these shapes, and its name, where it has one, is their type."""
    data: dict[str, Any] = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": shapes},
    }
    if ends_with_done:
        data = {"anyOf": [{"const": "[DONE]"}, data]}
    return {"type": "object", "properties": {"event": {"type": "string"}, "data": data}, "required": ["data"]}


def _errors(route: Route, error: Any) -> dict[str, dict[str, Any]]:
    found = {}
    own = (*(WITH_BODY if route.body is not None else ()), *((403,) if route.loads else ()))
    for status in sorted((*ALWAYS, *own)):
        is_unwell = status == 503 and route.unwell is not None
        phrase = "Client Closed Request" if status == 499 else HTTPStatus(status).phrase
        names = ["X-Request-Id", *(["Retry-After"] if status in RETRY and not is_unwell else [])]
        found[str(status)] = {
            "description": f"{phrase}: {TYPES.get(status, 'invalid_request_error')}.",
            "headers": _headers(*names),
            "content": _content(route.unwell if is_unwell else error),
        }
    return found


def _headers(*names: str) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _content(shape: Any, media: str = "application/json") -> dict[str, Any]:
    if media != "application/json":
        return {media: {"schema": {"type": "string"}}}
    if get_origin(shape) is list:
        return {media: {"schema": {"type": "array", "items": _reference(get_args(shape)[0])}}}
    return {media: {"schema": _reference(shape) if isinstance(shape, type) else {"type": "object"}}}


def _reference(shape: Any) -> dict[str, str]:
    return {"$ref": REFERENCE.format(name=shape.__name__)}


ROUTES = (
    Route("/health", show_health, answer=HealthAnswer, unwell=HealthAnswer),
    Route("/ready", show_readiness, answer=HealthAnswer, unwell=HealthAnswer),
    Route("/version", show_version, answer=Version),
    Route("/metrics", show_metrics, media="text/plain"),
    Route("/openapi.json", show_openapi, answer=dict[str, Any]),
)
