"""Ollama's requests and answers, by the names of its API."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Struct

from d3engine.server.schemas.answers import DepthSummary, TopLogprob
from d3engine.server.schemas.embeddings import DIMENSIONS
from d3engine.server.schemas.requests import OLLAMA, Prompt, StopStrings, Tools, bounded, described, shaped_as
from d3engine.utils.arguments import Integers


@OLLAMA
class OllamaOptions(Struct, kw_only=True):
    """Ollama's `options` by their own names; every sampling field of a chat is taken beside them."""

    stop: str | StopStrings | None = None
    num_ctx: Annotated[int, bounded(Integers(1))] | None = None


Options = Annotated[dict[str, Any], shaped_as("OllamaOptions")]
Format = Annotated[str, described(enum=["", "json"])] | dict[str, Any]
Think = bool | Annotated[str, described(enum=["low", "medium", "high"])]
KeepAlive = str | float


class OllamaGenerating(Struct, kw_only=True):
    """What both routes that generate have in common; `stream` is on unless it is false."""

    model: str
    stream: bool | None = None
    format: Format | None = None
    options: Options | None = None
    keep_alive: KeepAlive | None = None
    think: Think | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class OllamaCall(Struct, kw_only=True):
    """A call of an earlier answer: `{"function": {"name", "arguments"}}`."""

    function: dict[str, Any]


class OllamaTurn(Struct, kw_only=True):
    """One of a chat's messages."""

    role: Annotated[str, described(enum=["system", "user", "assistant", "tool"])]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None


class OllamaChatRequest(OllamaGenerating, kw_only=True):
    """POST /api/chat; without messages it says that the model is loaded."""

    messages: list[Annotated[dict[str, Any], shaped_as("OllamaTurn")]] | None = None
    tools: Tools | None = None


class OllamaGenerateRequest(OllamaGenerating, kw_only=True):
    """POST /api/generate; without a prompt it says that the model is loaded."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None


class OllamaEmbedRequest(Struct, kw_only=True):
    """POST /api/embed: embeddings of length 1."""

    model: str
    input: Annotated[Prompt, described(anyOf=[{"type": "string"}, {"type": "array", "items": {"type": "string"}}])]
    truncate: bool | None = None
    dimensions: Annotated[int, bounded(DIMENSIONS)] | None = None
    options: Options | None = None
    keep_alive: KeepAlive | None = None


class OllamaEmbeddingsRequest(Struct, kw_only=True):
    """POST /api/embeddings, the older route: one embedding, not normalized."""

    model: str
    prompt: str | None = None
    options: Options | None = None
    keep_alive: KeepAlive | None = None


class OllamaShowRequest(Struct, kw_only=True):
    """POST /api/show."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


class OllamaTokenLogprob(TopLogprob):
    """A token that might have come."""


class OllamaLogprob(OllamaTokenLogprob):
    """A token that came, and those that might have."""

    top_logprobs: list[OllamaTokenLogprob]


class OllamaCalledFunction(TypedDict):
    """Which function, with which arguments."""

    name: str
    arguments: dict[str, Any]


class OllamaToolCall(TypedDict):
    """A call that the model makes."""

    function: OllamaCalledFunction


class OllamaMessage(TypedDict):
    """What the model says, or what is new of it."""

    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[OllamaToolCall]]


class OllamaProgress(TypedDict):
    """What all lines of an answer have; durations, in nanoseconds, and counts come with the last."""

    model: str
    created_at: str
    done: bool
    done_reason: NotRequired[Literal["stop", "length", "load"]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]
    logprobs: NotRequired[list[OllamaLogprob]]
    d3ext: NotRequired[DepthSummary]


class OllamaChatAnswer(OllamaProgress):
    """The answer to POST /api/chat, or a line of its stream."""

    message: OllamaMessage


class OllamaGenerateAnswer(OllamaProgress):
    """The answer to POST /api/generate, or a line of its stream."""

    response: str
    thinking: NotRequired[str]


class OllamaEmbedAnswer(TypedDict):
    """The answer to POST /api/embed."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsAnswer(TypedDict):
    """The answer to POST /api/embeddings."""

    embedding: list[float]


class OllamaDetails(TypedDict):
    """What the model is."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(TypedDict):
    """A model that can be asked; `digest` is of its files' names, sizes and times, not of their content."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaTags(TypedDict):
    """The answer to GET /api/tags."""

    models: list[OllamaModel]


class OllamaRunning(TypedDict):
    """A model that is loaded; it stays so as long as the server runs."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: int
    context_length: int


class OllamaProcesses(TypedDict):
    """The answer to GET /api/ps."""

    models: list[OllamaRunning]


class OllamaShow(TypedDict):
    """The answer to POST /api/show."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaError(TypedDict):
    """Every error under /api, and the last line of a stream that fails."""

    error: str
