"""The bodies of requests: every field that is honoured, with OpenAI's name, or vLLM's where OpenAI has none.

A field that is null stands for one that is absent. What each may be beyond its type is checked where the engine checks
it, in `SamplingParams`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Struct

from d3engine.request.bounds import Integers
from d3engine.request.params import MAX_TOKENS
from d3engine.request.structured import MAX_CHARACTERS, MAX_CHOICES
from d3engine.server.shapes.fields import (
    MAX_TOOLS,
    AllowedTokenIds,
    BadWords,
    CacheSalt,
    Depth,
    FunctionsName,
    LogitBias,
    MaxTokens,
    Priority,
    Seed,
    StopStrings,
    StopTokenIds,
    Temperature,
    TokenId,
    TopK,
    TopP,
    Word,
    bounded,
    described,
    shaped_as,
)

Prompt = str | list[str | int | list[int]]
"""A text, token ids, or a list of either."""
Messages = Annotated[list[Annotated[dict[str, Any], shaped_as("Turn")]], described(minItems=1)]
Tools = Annotated[list[Annotated[dict[str, Any], shaped_as("Tool")]], described(minItems=1, maxItems=MAX_TOOLS)]


class StreamOptions(Struct, kw_only=True):
    """What a stream tells beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Common(Struct, kw_only=True):
    """What completions and chat have in common."""

    model: str | None = None
    n: Annotated[int, bounded("n")] | None = None
    max_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    presence_penalty: Annotated[float, bounded("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, bounded("frequency_penalty")] | None = None
    logit_bias: LogitBias | None = None
    seed: Seed | None = None
    stop: Word | StopStrings | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    top_k: TopK | None = None
    min_p: Annotated[float, bounded("min_p")] | None = None
    repetition_penalty: Annotated[float, bounded("repetition_penalty")] | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, bounded("min_tokens")] | None = None
    allowed_token_ids: AllowedTokenIds | None = None
    bad_words: BadWords | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    response_format: Annotated[dict[str, Any], shaped_as("AnswerForm")] | None = None
    structured_outputs: Annotated[dict[str, Any], shaped_as("Constraint")] | None = None

    depth: Depth = None
    return_depths: bool | None = None


NONE_OR_MORE = Integers(0, MAX_TOKENS)
"""A prompt that is echoed may be scored alone."""


class CompletionRequest(Common, kw_only=True):
    """POST /v1/completions."""

    prompt: Prompt
    max_tokens: Annotated[int, bounded(NONE_OR_MORE)] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: Annotated[int, bounded("n")] | None = None
    add_special_tokens: bool | None = None


class ChatRequest(Common, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    tool_choice: (
        Annotated[str, described(enum=["none", "auto", "required"])]
        | Annotated[dict[str, Any], shaped_as("NamedTool")]
        | None
    ) = None
    parallel_tool_calls: bool | None = None


class TextPart(Struct, kw_only=True):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class CalledFunction(Struct, kw_only=True):
    """What an earlier answer called, with its arguments as JSON."""

    name: str
    arguments: str | dict[str, Any]


class EarlierCall(Struct, kw_only=True):
    """A call of an earlier answer."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] | None = None


class Turn(Struct, kw_only=True):
    """One of a chat's `messages`; the model's template says which roles there are, and may read further fields."""

    role: str
    content: str | list[TextPart] | None = None
    tool_calls: list[EarlierCall] | None = None
    tool_call_id: str | None = None


class NamedSchema(Struct, kw_only=True, forbid_unknown_fields=True):
    """A JSON schema with a name; `strict` makes no difference, since every answer satisfies it."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class AnswerForm(Struct, kw_only=True, forbid_unknown_fields=True):
    """A `response_format`; the schema is there where the type says so, and only there."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


Text = Annotated[str, described(minLength=1, maxLength=MAX_CHARACTERS)]


class Constraint(Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`: exactly one of the first five."""

    json: Text | dict[str, Any] | None = None
    regex: Text | None = None
    choice: Annotated[list[Text], described(minItems=1, maxItems=MAX_CHOICES, uniqueItems=True)] | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    whitespace_pattern: Text | None = None
    disable_any_whitespace: bool | None = None


class Function(Struct, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call; `strict` makes no difference where a call must come."""

    name: FunctionsName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, kw_only=True, forbid_unknown_fields=True):
    """One of a chat's `tools`."""

    type: Literal["function"]
    function: Function


class FunctionName(Struct, kw_only=True, forbid_unknown_fields=True):
    """Which function."""

    name: FunctionsName


class NamedTool(Struct, kw_only=True, forbid_unknown_fields=True):
    """A `tool_choice` that names a function."""

    type: Literal["function"]
    function: FunctionName


class TokenizeRequest(Struct, kw_only=True):
    """POST /tokenize: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None
