"""GET /openapi.json: the routes in OpenAPI's words, from the very shapes that bodies are read and written by.

The one idea: what a route takes and gives stands once, in its shapes and in the rules that check them, and schemas are
made of that; nothing is written twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from d3engine.server.answers import json_response
from d3engine.server.asking.depth import DEPTH_HEADER, LONGEST_HEADER
from d3engine.server.asking.ignored import IGNORED_FIELDS
from d3engine.server.asking.prompts import prompt_schema
from d3engine.server.asking.sampling import logprob_bounds
from d3engine.server.asking.work import priority_bounds
from d3engine.server.errors import TYPES
from d3engine.server.guards.exchange import CLIENT_ID
from d3engine.server.routes.described import DESCRIBED, REFERRED, Described
from d3engine.server.served import AppState, served_by
from d3engine.server.shapes.fields import REFERENCE
from d3engine.version import __version__

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
        "description": "Fields of the request that nobody here knows.",
        "schema": {"type": "string"},
    },
    "Retry-After": {"description": "Seconds.", "schema": {"type": "string", "pattern": "^[0-9]+$"}},
}


async def show_openapi(request: Request) -> Response:
    """The description of all routes of the app that took this request."""
    state = request.app.state
    if not hasattr(state, "openapi"):  # it takes a while, and stays the same
        routes = [route for route in request.app.routes if isinstance(route, Route)]
        state.openapi = description(routes, served_by(request))
    return json_response(state.openapi)


def description(routes: Sequence[Route], served: AppState) -> dict[str, Any]:
    """An OpenAPI 3.1 document of these routes."""
    paths: dict[str, Any] = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        paths.setdefault(path, {}).update(_operations(path, route))
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    components = {"schemas": _schemas(served), "headers": _HEADERS, "securitySchemes": keys}
    return {
        "openapi": "3.1.0",
        "security": [{"bearer": []}, {"key": []}, {}],
        "info": {"title": "d3engine", "version": __version__},
        "paths": paths,
        "components": components,
    }


def _schemas(served: AppState) -> dict[str, Any]:
    """All shapes, with the bounds that depend on the model and the server's settings."""
    named = [one for known in DESCRIBED.values() for one in (known.body, known.answer, *known.events, known.error)]
    shapes = [one for one in (*named, *REFERRED) if isinstance(one, type)]
    _, schemas = msgspec.json.schema_components(shapes, schema_hook=_schema, ref_template=REFERENCE)
    schemas["CompletionRequest"]["properties"]["prompt"] = prompt_schema(served)
    for name in ("CompletionRequest", "ChatRequest"):
        for field in ("logprobs", "top_logprobs", "prompt_logprobs"):
            for kind in schemas[name]["properties"].get(field, {}).get("anyOf", ()):
                if kind["type"] == "integer":
                    kind |= logprob_bounds(served.settings).schema
    for schema in schemas.values():
        for kind in schema.get("properties", {}).get("priority", {}).get("anyOf", ()):
            if kind["type"] == "integer":
                kind |= priority_bounds(served.settings).schema
    return schemas


def _schema(kind: type) -> dict[str, Any]:
    """Of what msgspec has none for: `object` may be anything. For others msgspec asks for this very exception."""
    if kind is not object:
        raise NotImplementedError
    return {"description": "anything"}


def _operations(path: str, route: Route) -> Iterator[tuple[str, dict[str, Any]]]:
    known = DESCRIBED.get(path) or Described("A file of the page.", media=_media(path))
    for method in sorted(set(route.methods or ()) - {"HEAD"}):
        operation: dict[str, Any] = {
            "summary": known.says,
            "operationId": f"{method.lower()}_{route.name}{'' if path in DESCRIBED else path.replace('/', '_')}",
            "parameters": list(_parameters(path, known)),
            "responses": {"200": _answer(known), **_errors(known)},
        }
        if known.body is not None:
            operation["requestBody"] = {"required": True, "content": _content(known.body)}
        yield method.lower(), operation


def _media(path: str) -> str:
    from d3engine.server.routes.page import TYPES as MEDIA

    return MEDIA[f".{path.rpartition('.')[2]}"] if "." in path else "text/html"


def _parameters(path: str, known: Described) -> Iterator[dict[str, Any]]:
    text = {"type": "string"}
    if "{name}" in path:
        yield {"name": "name", "in": "path", "required": True, "schema": {**text, "minLength": 1}}
    yield {"name": "X-Request-Id", "in": "header", "required": False, "schema": text}
    if known.takes_depth:
        says = "As the field `depth`, for clients that cannot add one: a name, or an object as JSON."
        schema = {**text, "maxLength": LONGEST_HEADER}
        yield {"name": DEPTH_HEADER, "in": "header", "required": False, "description": says, "schema": schema}


def _answer(known: Described) -> dict[str, Any]:
    content = _content(known.answer, known.media)
    if known.events:
        content["text/event-stream"] = {"schema": _event(known)}
    names = ["X-Request-Id", *([IGNORED_FIELDS] if known.body is not None else [])]
    return {"description": "The answer.", "headers": _headers(*names), "content": content}


def _event(known: Described) -> dict[str, Any]:
    """One event: its data are JSON of one of these shapes, and its name, where it has one, is their type."""
    shapes = [_reference(shape) for shape in known.events]
    data: dict[str, Any] = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": shapes},
    }
    if known.ends_with_done:
        data = {"anyOf": [{"const": "[DONE]"}, data]}
    return {"type": "object", "properties": {"event": {"type": "string"}, "data": data}, "required": ["data"]}


def _errors(known: Described) -> dict[str, dict[str, Any]]:
    """What is told by each status."""
    found = {}
    for status in sorted((*ALWAYS, *(WITH_BODY if known.body is not None else ()))):
        is_unwell = status == 503 and known.unwell is not None
        names = ["X-Request-Id", *(["Retry-After"] if status in RETRY and not is_unwell else [])]
        found[str(status)] = {
            "description": _says(status),
            "headers": _headers(*names),
            "content": _content(known.unwell if is_unwell else known.error),
        }
    return found


def _says(status: int) -> str:
    phrase = "Client Closed Request" if status == 499 else HTTPStatus(status).phrase
    return f"{phrase}: {TYPES.get(status, 'invalid_request_error')}."


def _headers(*names: str) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _content(shape: Any, media: str = "application/json") -> dict[str, Any]:
    if media != "application/json":
        return {media: {"schema": {"type": "string"}}}
    return {media: {"schema": _reference(shape) if isinstance(shape, type) else {"type": "object"}}}


def _reference(shape: Any) -> dict[str, str]:
    return {"$ref": REFERENCE.format(name=shape.__name__)}
