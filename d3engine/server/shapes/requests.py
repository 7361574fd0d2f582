"""The bodies of requests: every field that is honoured, with OpenAI's name, or vLLM's where OpenAI has none.

A field that is null stands for one that is absent. What each may be beyond its type is checked where the engine checks
it, in `SamplingParams`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

Depth = Annotated[
    str | dict[str, Any] | None,
    Meta(description='"auto", "full", a model id that stands for a depth, or a policy as d3.json has it'),
]
Prompt = Annotated[
    str | list[str | int | list[int]],
    Meta(description="a text, token ids, or a list of either"),
]


class StreamOptions(Struct, kw_only=True):
    """What a stream tells beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Common(Struct, kw_only=True):
    """What completions and chat have in common."""

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None

    depth: Depth = None
    return_depths: bool | None = None


class CompletionRequest(Common, kw_only=True):
    """POST /v1/completions."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None


class ChatRequest(Common, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class Function(Struct, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call; `strict` makes no difference where a call must come."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, kw_only=True, forbid_unknown_fields=True):
    """One of a chat's `tools`."""

    type: Literal["function"]
    function: Function


class FunctionName(Struct, kw_only=True, forbid_unknown_fields=True):
    """Which function."""

    name: str


class NamedTool(Struct, kw_only=True, forbid_unknown_fields=True):
    """A `tool_choice` that names a function."""

    type: Literal["function"]
    function: FunctionName


class TokenizeRequest(Struct, kw_only=True):
    """POST /tokenize: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None
