"""GET /openapi.json: the routes in OpenAPI's words, from the very shapes that bodies are read and written by.

What a route takes and gives stands once, in its shapes and in the rules that check them, and schemas are
made of that; nothing is written twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Annotated, Any, Literal, NotRequired, TypedDict, get_args, get_origin

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from d3engine.server.errors import ANTHROPICS_TYPES, TYPES
from d3engine.server.middleware.request_log import CLIENT_ID
from d3engine.server.requests.bodies import priority_bounds
from d3engine.server.requests.completions import prompt_schema
from d3engine.server.requests.refused import IGNORED_FIELDS
from d3engine.server.requests.sampling import DEPTH_HEADER, LONGEST_HEADER, logprob_bounds
from d3engine.server.schemas.answers import (
    ChatChunk,
    ChatCompletion,
    Completion,
    SleepState,
    Text,
    TokenizerInfo,
    Tokens,
    Unloaded,
)
from d3engine.server.schemas.embeddings import EmbeddingList, EmbeddingRequest
from d3engine.server.schemas.llama_cpp import (
    LlamaCompletion,
    LlamaCompletionRequest,
    LlamaInfillRequest,
    LlamaPrompt,
    LlamaProps,
    LlamaSlot,
    LlamaTemplateRequest,
)
from d3engine.server.schemas.messages import (
    MESSAGE_EVENTS,
    CountTokensRequest,
    Message,
    MessagesRequest,
    MessageTurn,
    TextBlock,
    ThinkingBlock,
    TokenCount,
    ToolUseBlock,
)
from d3engine.server.schemas.ollama import (
    OllamaChatAnswer,
    OllamaChatRequest,
    OllamaEmbedAnswer,
    OllamaEmbeddingsAnswer,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaError,
    OllamaGenerateAnswer,
    OllamaGenerateRequest,
    OllamaOptions,
    OllamaProcesses,
    OllamaShow,
    OllamaShowRequest,
    OllamaTags,
    OllamaTurn,
)
from d3engine.server.schemas.requests import (
    REFERENCE,
    AnswerForm,
    ChatRequest,
    CompletionRequest,
    Constraint,
    DetokenizeRequest,
    LoadAdapterRequest,
    NamedTool,
    TokenizeRequest,
    Tool,
    Turn,
    UnloadAdapterRequest,
    described,
)
from d3engine.server.schemas.responses import (
    RESPONSE_EVENTS,
    ModelResponse,
    OutputCall,
    OutputMessage,
    OutputReasoning,
    ResponsesRequest,
)
from d3engine.server.schemas.scores import Ranking, RerankRequest, ScoreList, ScoreRequest
from d3engine.server.state import AppState, Health, ModelCard, health, json_response, readiness, served_by
from d3engine.utils.version import __version__

ErrorType = Annotated[str, described(enum=sorted(set(TYPES.values())))]
AnthropicsErrorType = Annotated[str, described(enum=sorted({*ANTHROPICS_TYPES.values(), "invalid_request_error"}))]


class ErrorDetail(TypedDict):
    """What is wrong, and with which field."""

    message: str
    type: ErrorType
    param: str | None
    code: str | None


class Error(TypedDict):
    """Every answer that is an error."""

    error: ErrorDetail


class AnthropicsErrorDetail(TypedDict):
    """What is wrong, in Anthropic's words."""

    type: AnthropicsErrorType
    message: str


class AnthropicsError(TypedDict):
    """The same under /v1/messages."""

    type: Literal["error"]
    error: AnthropicsErrorDetail


class ModelList(TypedDict):
    """The answer to GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class HealthAnswer(TypedDict):
    """The answer to GET /health and /ready."""

    status: Literal["ok", "dead", "hung", "draining", "full"]
    reason: NotRequired[str]


class Version(TypedDict):
    """The answer to GET /version."""

    version: str


METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def show_health(request: Request) -> Response:
    """200 while it can be expected to answer; 503 with the reason once it cannot."""
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
    AnswerForm,
    Constraint,
    MessageTurn,
    NamedTool,
    OllamaOptions,
    OllamaTurn,
    OutputCall,
    OutputMessage,
    OutputReasoning,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolUseBlock,
    Turn,
)
"""Shapes that fields of others refer to by name."""


@dataclass(frozen=True)
class Described:
    """What a route takes and gives.

    Attributes:
        says: in a few words.
        body: of its requests.
        answer: a whole one: a shape, or a list of one.
        media: the type of an answer that is no JSON.
        events: those that an answer is made of where it may be a stream.
        lines: the same, of a stream of lines of JSON.
        ends_with_done: whether "[DONE]" comes after them.
        takes_depth: whether the header names a depth.
        error: the body of every error.
        unwell: the body of a 503 where that is no error but the answer.
        loads: whether it is forbidden unless the server's owner allows it.
        queries: name of a query parameter -> what its schema says beyond being a text.
    """

    says: str
    body: Any = None
    answer: Any = None
    media: str = "application/json"
    events: tuple[Any, ...] = ()
    lines: tuple[Any, ...] = ()
    ends_with_done: bool = False
    takes_depth: bool = False
    error: Any = Error
    unwell: Any = None
    loads: bool = False
    queries: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


_COMPLETION = Described(
    "Go on from a prompt, as llama.cpp has it.",
    LlamaCompletionRequest,
    LlamaCompletion,
    events=(LlamaCompletion, Error),
    takes_depth=True,
)

DESCRIBED = {
    "/v1/completions": Described(
        "Go on from prompts.",
        CompletionRequest,
        Completion,
        events=(Completion, Error),
        ends_with_done=True,
        takes_depth=True,
    ),
    "/v1/chat/completions": Described(
        "Answer a conversation.",
        ChatRequest,
        ChatCompletion,
        events=(ChatChunk, Error),
        ends_with_done=True,
        takes_depth=True,
    ),
    "/v1/responses": Described(
        "Answer a conversation, as OpenAI's responses.",
        ResponsesRequest,
        ModelResponse,
        events=RESPONSE_EVENTS,
        takes_depth=True,
    ),
    "/v1/messages": Described(
        "Answer a conversation, as Anthropic has it.",
        MessagesRequest,
        Message,
        events=(*MESSAGE_EVENTS, AnthropicsError),
        takes_depth=True,
        error=AnthropicsError,
    ),
    "/v1/messages/count_tokens": Described(
        "Count a conversation's tokens.", CountTokensRequest, TokenCount, error=AnthropicsError
    ),
    "/v1/embeddings": Described("Embed texts.", EmbeddingRequest, EmbeddingList),
    "/v1/score": Described("Score pairs of texts.", ScoreRequest, ScoreList),
    "/score": Described("Score pairs of texts.", ScoreRequest, ScoreList),
    "/v1/rerank": Described("Rank documents for a query.", RerankRequest, Ranking),
    "/rerank": Described("Rank documents for a query.", RerankRequest, Ranking),
    "/v1/models": Described("The ids of the model.", answer=ModelList),
    "/v1/models/{name}": Described("One id of the model.", answer=ModelCard),
    "/v1/load_lora_adapter": Described(
        "Load a LoRA adapter, where the server allows it.", LoadAdapterRequest, ModelCard, loads=True
    ),
    "/v1/unload_lora_adapter": Described(
        "Unload a LoRA adapter, where the server allows it.", UnloadAdapterRequest, Unloaded, loads=True
    ),
    "/sleep": Described(
        "Free weights and KV cache of a model after its requests in progress, where the server allows it.",
        answer=SleepState,
        queries={"model": {}, "level": {"enum": ["1"]}, "mode": {"enum": ["wait"]}},
        loads=True,
    ),
    "/wake_up": Described(
        "Load a model that sleeps, where the server allows it.", answer=SleepState, queries={"model": {}}, loads=True
    ),
    "/is_sleeping": Described("Whether a model sleeps.", answer=SleepState, queries={"model": {}}),
    "/tokenize": Described("The token ids of a text or a conversation.", TokenizeRequest, Tokens),
    "/detokenize": Described("The text of token ids.", DetokenizeRequest, Text),
    "/tokenizer_info": Described("Special tokens and chat template.", answer=TokenizerInfo),
    "/api/chat": Described(
        "Answer a conversation, as Ollama has it.",
        OllamaChatRequest,
        OllamaChatAnswer,
        lines=(OllamaChatAnswer, OllamaError),
        takes_depth=True,
        error=OllamaError,
    ),
    "/api/generate": Described(
        "Answer a prompt, as Ollama has it.",
        OllamaGenerateRequest,
        OllamaGenerateAnswer,
        lines=(OllamaGenerateAnswer, OllamaError),
        takes_depth=True,
        error=OllamaError,
    ),
    "/api/embed": Described("Embed texts, as Ollama has it.", OllamaEmbedRequest, OllamaEmbedAnswer, error=OllamaError),
    "/api/embeddings": Described(
        "Embed a text, as Ollama had it.", OllamaEmbeddingsRequest, OllamaEmbeddingsAnswer, error=OllamaError
    ),
    "/api/show": Described("What the model is, as Ollama says it.", OllamaShowRequest, OllamaShow, error=OllamaError),
    "/api/tags": Described("The ids of the model, as Ollama lists them.", answer=OllamaTags, error=OllamaError),
    "/api/ps": Described("The model that is loaded, as Ollama lists it.", answer=OllamaProcesses, error=OllamaError),
    "/api/version": Described("The version of Ollama's API.", answer=Version, error=OllamaError),
    "/completion": _COMPLETION,
    "/completions": _COMPLETION,
    "/infill": Described(
        "Write the text between two others, as llama.cpp has it.",
        LlamaInfillRequest,
        LlamaCompletion,
        events=(LlamaCompletion, Error),
        takes_depth=True,
    ),
    "/apply-template": Described(
        "The text of a conversation by the model's template.", LlamaTemplateRequest, LlamaPrompt
    ),
    "/props": Described("What the server does by default, as llama.cpp says it.", answer=LlamaProps),
    "/slots": Described("The sequences that may run at once.", answer=list[LlamaSlot]),
    "/health": Described(
        "200 while the server can be expected to answer; 503 with the reason once it cannot.",
        answer=HealthAnswer,
        unwell=HealthAnswer,
    ),
    "/ready": Described(
        "As /health, and 503 while it would refuse a request because of its queue.",
        answer=HealthAnswer,
        unwell=HealthAnswer,
    ),
    "/version": Described("Which d3engine this is.", answer=Version),
    "/metrics": Described("All metrics, in the text format of Prometheus.", media="text/plain"),
    "/openapi.json": Described("This description.", answer=dict[str, Any]),
}
"""Path -> what is known of it."""


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


VENDORED = "/page/vendor/"
"""Libraries of the page, which are no part of the API."""


async def show_openapi(request: Request) -> Response:
    """The description of all routes of the app that took this request."""
    state = request.app.state
    if not hasattr(state, "openapi"):  # it takes a while, and stays the same
        routes = [route for route in request.app.routes if isinstance(route, Route) and VENDORED not in route.path]
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
    named = [
        one
        for known in DESCRIBED.values()
        for shape in (known.body, known.answer, *known.events, *known.lines, known.error)
        for one in (shape, *get_args(shape))
    ]
    shapes = [one for one in (*named, *REFERRED) if isinstance(one, type)]
    _, schemas = msgspec.json.schema_components(shapes, schema_hook=_schema, ref_template=REFERENCE)
    schemas["CompletionRequest"]["properties"]["prompt"] = prompt_schema(served)
    for name in ("CompletionRequest", "ChatRequest"):
        for one in ("logprobs", "top_logprobs", "prompt_logprobs"):
            for kind in schemas[name]["properties"].get(one, {}).get("anyOf", ()):
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
    from d3engine.server.routes.api import TYPES as MEDIA

    return MEDIA[f".{path.rpartition('.')[2]}"] if "." in path else "text/html"


def _parameters(path: str, known: Described) -> Iterator[dict[str, Any]]:
    text = {"type": "string"}
    if "{name}" in path:
        yield {"name": "name", "in": "path", "required": True, "schema": {**text, "minLength": 1}}
    yield {"name": "X-Request-Id", "in": "header", "required": False, "schema": text}
    for name, more in known.queries.items():
        yield {"name": name, "in": "query", "required": False, "schema": {**text, **more}}
    if known.takes_depth:
        says = "As the field `depth`, for clients that cannot add one: a name, or an object as JSON."
        schema = {**text, "maxLength": LONGEST_HEADER}
        yield {"name": DEPTH_HEADER, "in": "header", "required": False, "description": says, "schema": schema}


def _answer(known: Described) -> dict[str, Any]:
    content = _content(known.answer, known.media)
    if known.events:
        content["text/event-stream"] = {"schema": _event(known)}
    if known.lines:
        content["application/x-ndjson"] = {"schema": {"anyOf": [_reference(shape) for shape in known.lines]}}
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
    """What each status means."""
    found = {}
    own = (*(WITH_BODY if known.body is not None else ()), *((403,) if known.loads else ()))
    for status in sorted((*ALWAYS, *own)):
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
    if get_origin(shape) is list:
        return {media: {"schema": {"type": "array", "items": _reference(get_args(shape)[0])}}}
    return {media: {"schema": _reference(shape) if isinstance(shape, type) else {"type": "object"}}}


def _reference(shape: Any) -> dict[str, str]:
    return {"$ref": REFERENCE.format(name=shape.__name__)}
