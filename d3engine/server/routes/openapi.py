"""GET /openapi.json: the routes in OpenAPI's words, from the very shapes that bodies are read and written by.

The one idea: what a route takes and gives stands here once, and schemas are made of it; nothing is written twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from d3engine.server.answers import json_response
from d3engine.server.asking.depth import DEPTH_HEADER
from d3engine.server.model_ids import ModelCard
from d3engine.server.shapes.answers import (
    ChatChunk,
    ChatCompletion,
    Completion,
    Text,
    TokenizerInfo,
    Tokens,
)
from d3engine.server.shapes.messages import CountTokensRequest, Message, MessagesRequest, TokenCount
from d3engine.server.shapes.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from d3engine.server.shapes.responses import ResponsesRequest
from d3engine.version import __version__


class ErrorDetail(TypedDict):
    """What is wrong, and with which field."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    """Every answer that is an error."""

    error: ErrorDetail


class ModelList(TypedDict):
    """The answer to GET /v1/models."""

    object: str
    data: list[ModelCard]


@dataclass(frozen=True)
class Described:
    """What a route takes and gives, as shapes; `chunk` is that of an event where an answer may be a stream."""

    says: str
    body: Any = None
    answer: Any = None
    chunk: Any = None
    takes_depth: bool = False
    has_own_errors: bool = False


DESCRIBED = {
    "/v1/completions": Described("Go on from prompts.", CompletionRequest, Completion, Completion, True),
    "/v1/chat/completions": Described("Answer a conversation.", ChatRequest, ChatCompletion, ChatChunk, True),
    "/v1/responses": Described("Answer a conversation, as OpenAI's responses.", ResponsesRequest, takes_depth=True),
    "/v1/messages": Described(
        "Answer a conversation, as Anthropic has it.", MessagesRequest, Message, takes_depth=True, has_own_errors=True
    ),
    "/v1/messages/count_tokens": Described(
        "Count a conversation's tokens.", CountTokensRequest, TokenCount, has_own_errors=True
    ),
    "/v1/models": Described("The ids of the model.", answer=ModelList),
    "/v1/models/{name}": Described("One id of the model.", answer=ModelCard),
    "/tokenize": Described("The token ids of a text or a conversation.", TokenizeRequest, Tokens),
    "/detokenize": Described("The text of token ids.", DetokenizeRequest, Text),
    "/tokenizer_info": Described("Special tokens and chat template.", answer=TokenizerInfo),
}
"""Path -> what is known of it; a route that is not here has an answer of any form."""

_REFERENCE = "#/components/schemas/{name}"


async def show_openapi(request: Request) -> Response:
    """The description of all routes of the app that took this request."""
    state = request.app.state
    if not hasattr(state, "openapi"):  # it takes a while, and stays the same
        state.openapi = description([route for route in request.app.routes if isinstance(route, Route)])
    return json_response(state.openapi)


def description(routes: Sequence[Route]) -> dict[str, Any]:
    """An OpenAPI 3.1 document of these routes."""
    shapes = [shape for known in DESCRIBED.values() for shape in (known.body, known.answer, known.chunk) if shape]
    _, schemas = msgspec.json.schema_components([*shapes, Error], schema_hook=_schema, ref_template=_REFERENCE)
    paths: dict[str, Any] = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        paths.setdefault(path, {}).update(_operations(path, route))
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": "3.1.0",
        "security": [{"bearer": []}, {"key": []}, {}],
        "info": {"title": "d3engine", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": keys},
    }


def _schema(kind: type) -> dict[str, Any]:
    """Of what msgspec has none for: `object` may be anything. For others msgspec asks for this very exception."""
    if kind is not object:
        raise NotImplementedError
    return {"description": "anything"}


def _operations(path: str, route: Route) -> Iterator[tuple[str, dict[str, Any]]]:
    known = DESCRIBED.get(path) or Described((route.endpoint.__doc__ or route.name).split("\n")[0])
    for method in sorted(set(route.methods or ()) - {"HEAD"}):
        operation: dict[str, Any] = {
            "summary": known.says,
            "operationId": f"{method.lower()}_{route.name}",
            "parameters": list(_parameters(path, known)),
            "responses": {"200": _answers(known), "default": _error(known)},
        }
        if known.body is not None:
            operation["requestBody"] = {"required": True} | _content("", known.body)
            del operation["requestBody"]["description"]
        yield method.lower(), operation


def _parameters(path: str, known: Described) -> Iterator[dict[str, Any]]:
    text = {"type": "string"}
    if "{name}" in path:
        yield {"name": "name", "in": "path", "required": True, "schema": text}
    yield {"name": "X-Request-Id", "in": "header", "required": False, "schema": text}
    if known.takes_depth:
        yield {"name": DEPTH_HEADER, "in": "header", "required": False, "schema": text}


def _answers(known: Described) -> dict[str, Any]:
    if known.answer is None:
        return {"description": "The answer."}
    found = _content("The answer.", known.answer)
    if known.chunk is not None:
        found["content"]["text/event-stream"] = {"schema": _reference(known.chunk)}
    return found


def _error(known: Described) -> dict[str, Any]:
    return {"description": "An error, in Anthropic's form."} if known.has_own_errors else _content("An error.", Error)


def _content(says: str, shape: Any) -> dict[str, Any]:
    return {"description": says, "content": {"application/json": {"schema": _reference(shape)}}}


def _reference(shape: Any) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(name=shape.__name__)}
