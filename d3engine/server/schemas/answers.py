"""The bodies of answers, as they are written; chunks of streams among them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypeAlias, TypedDict

from d3engine.server.errors import ANTHROPICS_TYPES, TYPES
from d3engine.server.schemas.requests import described

ErrorType = Annotated[str, described(enum=sorted(set(TYPES.values())))]
AnthropicsErrorType = Annotated[str, described(enum=sorted({*ANTHROPICS_TYPES.values(), "invalid_request_error"}))]


def event(name: str, says: str, /, *types: str, **fields: Any) -> Any:
    """The shape of an event, of one of these types; its `d3ext` may be absent."""
    typed_dict: Any = TypedDict
    literal: Any = Literal
    not_required: Any = NotRequired
    own = {field: not_required[kind] if field == "d3ext" else kind for field, kind in fields.items()}
    made = typed_dict(name, {"type": literal[types], **own})
    made.__doc__ = says
    return made


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


class HealthAnswer(TypedDict):
    """The answer to GET /health and /ready."""

    status: Literal["ok", "dead", "hung", "draining", "full"]
    reason: NotRequired[str]


class Version(TypedDict):
    """The answer to GET /version."""

    version: str


class CachedTokens(TypedDict):
    """How many tokens of the prompts were computed before."""

    cached_tokens: int


class PredictedTokens(TypedDict):
    """Drafted tokens that the model took as its own, and those that it did not, which no other count has."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(TypedDict):
    """Tokens that went in and came out; the details of completions where a policy drafts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: NotRequired[PredictedTokens]


class DepthsOfTokens(TypedDict):
    """For each token: the layers it ran, and where its text begins in the choice's, in characters."""

    depths: list[int]
    token_offsets: list[int]


class DepthSummary(TypedDict):
    """What a request's depth policy came to, over all its choices."""

    policy: dict[str, Any]
    certified: bool
    num_layers: int
    mean_layers: float | None
    layers_run: int
    layers_saved: int
    kv_bytes_saved: int
    decode_seconds: float | None  # from the first token to the last, as the engine has had them


class PromptProgress(TypedDict):
    """How far a prompt is computed; `cache` of its tokens were before, and `processed` has them too."""

    total: int
    cache: int
    processed: int


PromptLogprobs: TypeAlias = list[dict[str, dict[str, Any]] | None]
"""For each token of the prompt: id -> {logprob, rank, decoded_token}; nothing of the first."""


class CompletionLogprobs(TypedDict):
    """One entry for each token; `text_offset` is its place in the choice's text, in characters."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(TypedDict):
    """One answer to one prompt, or in a stream what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[list[int]]
    token_ids: NotRequired[list[int]]
    d3ext: NotRequired[DepthsOfTokens]


class Completion(TypedDict):
    """The answer to POST /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
    d3ext: NotRequired[DepthSummary]
    prompt_progress: NotRequired[PromptProgress]


class TopLogprob(TypedDict):
    """A token that might have come."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token that came, and those that might have."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """One entry for each token of the answer."""

    content: list[TokenLogprob]
    refusal: None


class FunctionCall(TypedDict):
    """Which function, and its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A call that the model makes."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(TypedDict):
    """What the model says; nothing where it calls functions instead."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    token_ids: NotRequired[list[int]]
    d3ext: NotRequired[DepthsOfTokens]


class ChatCompletion(TypedDict):
    """The answer to POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[list[int]]
    d3ext: NotRequired[DepthSummary]


class FunctionCallDelta(TypedDict):
    """What is new of a call's function; its name comes once."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """What is new of a call; all but its index and arguments come once."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionCallDelta


class ChatDelta(TypedDict):
    """What is new of a message; its role comes once."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChatChunkChoice(TypedDict):
    """What is new of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    token_ids: NotRequired[list[int]]
    d3ext: NotRequired[DepthsOfTokens]


class ChatChunk(TypedDict):
    """One event of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[int]]
    d3ext: NotRequired[DepthSummary]
    prompt_progress: NotRequired[PromptProgress]


class TokenPiece(TypedDict):
    """A token and what it spells."""

    id: int
    piece: str


class Tokens(TypedDict):
    """The answer to POST /tokenize; tokens have their pieces where llama.cpp's `with_pieces` asks for them."""

    count: int
    max_model_len: int
    tokens: list[int | TokenPiece]
    token_strs: NotRequired[list[str]]


class Text(TypedDict):
    """The answer to POST /detokenize: the text by vLLM's name and by llama.cpp's."""

    prompt: str
    content: str


class Unloaded(TypedDict):
    """POST /v1/unload_lora_adapter."""

    id: str
    object: Literal["model"]
    deleted: bool


class SleepState(TypedDict):
    """GET /is_sleeping, and what /sleep and /wake_up leave behind."""

    is_sleeping: bool


class TokenizerInfo(TypedDict):
    """GET /tokenizer_info, which lm-eval's remote tokenizer reads."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
