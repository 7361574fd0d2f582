"""Requests and answers of llama.cpp's server, by its own names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Struct

from d3engine.server.schemas.answers import DepthSummary
from d3engine.server.schemas.requests import LLAMA_CPP, NONE_OR_MORE, Messages, OtherFile, Tools, bounded, described

Mixed = Annotated[list[int | str], described(items={"type": ["integer", "string"]})]


@LLAMA_CPP
class LlamaSampling(Struct, kw_only=True):
    """How tokens are drawn, by llama.cpp's names; every sampling field of a completion is taken beside them."""

    model: str | None = None
    stream: bool | None = None
    max_tokens: Annotated[int, bounded(NONE_OR_MORE)] | None = None
    n_probs: int | None = None
    repeat_last_n: int | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    logit_bias: dict[str, float] | list[Any] | Literal[False] | None = None
    return_tokens: bool | None = None
    cache_prompt: bool | None = None
    id_slot: int | None = None
    if TYPE_CHECKING:
        n_predict: int | None = None


class LlamaCompletionRequest(LlamaSampling, kw_only=True):
    """POST /completion: a text, token ids, or a list of both that is one prompt."""

    prompt: str | Mixed


class LlamaInfillRequest(LlamaSampling, kw_only=True):
    """POST /infill: the text between two others; `prompt` is its beginning."""

    input_prefix: str | None = None
    input_suffix: str | None = None
    input_extra: list[OtherFile] | None = None
    prompt: str | None = None


class LlamaTemplateRequest(Struct, kw_only=True):
    """POST /apply-template."""

    messages: Messages
    model: str | None = None
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class LlamaPrompt(TypedDict):
    """The answer to POST /apply-template."""

    prompt: str


class LlamaTimings(TypedDict):
    """Tokens and milliseconds of a prompt and its answer."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class LlamaTokenLogprob(TypedDict):
    """A token that might have come."""

    id: int
    token: str
    bytes: list[int]
    logprob: float


class LlamaLogprob(LlamaTokenLogprob):
    """A token that came, and those that might have."""

    top_logprobs: list[LlamaTokenLogprob]


class LlamaCompletion(TypedDict):
    """The answer to POST /completion and /infill, or what is new of it; the last has all fields."""

    index: int
    content: str
    tokens: list[int]
    stop: bool
    id_slot: int
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: NotRequired[list[LlamaLogprob]]
    model: NotRequired[str]
    prompt: NotRequired[str]
    has_new_line: NotRequired[bool]
    truncated: NotRequired[bool]
    stop_type: NotRequired[Literal["eos", "word", "limit"]]
    stopping_word: NotRequired[str]
    tokens_cached: NotRequired[int]
    generation_settings: NotRequired[dict[str, Any]]
    timings: NotRequired[LlamaTimings]
    d3ext: NotRequired[DepthSummary]


class LlamaProps(TypedDict):
    """The answer to GET /props."""

    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    modalities: dict[str, bool]
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
    d3ext: dict[str, Any]


class LlamaSlot(TypedDict):
    """One of the sequences that may run at once. It shows nothing of prompts and answers."""

    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool
