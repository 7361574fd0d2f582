"""Anthropic's messages: what is asked and what is answered, in text and calls of functions."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Struct

from d3engine.server.schemas.answers import DepthsOfTokens, DepthSummary, event
from d3engine.server.schemas.requests import (
    MESSAGES,
    Depth,
    FunctionsName,
    Priority,
    StopStrings,
    ThinkingBudget,
    bounded,
    described,
    one_of,
    shaped_as,
)


class MessageTurn(Struct, kw_only=True):
    """One of the `messages`: a text, or blocks: text, thinking and tool_use (the assistant's), tool_result (the
    user's)."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[dict[str, Any]], described(minItems=1)]


class MessageTool(Struct, kw_only=True, forbid_unknown_fields=True):
    """One of the `tools`: a function that the model may call; `strict` makes no difference where a call must come."""

    name: FunctionsName
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None


class MessageToolChoice(Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether a function is called; the name belongs to "tool" alone."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessageThinking(Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the model thinks before it answers, and at most how long; "adaptive" leaves it to the model."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: ThinkingBudget | None = None
    display: Literal["summarized"] | None = None


class OutputConfig(Struct, kw_only=True, forbid_unknown_fields=True):
    """What the answer must be; `effort` is no setting of the model and must be null."""

    format: OutputFormat | None = None
    effort: None = None


class OutputFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    """JSON that satisfies a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class CountTokensRequest(Struct, kw_only=True):
    """POST /v1/messages/count_tokens: a conversation; `system` is a text or a list of texts."""

    model: str | None = None
    messages: Annotated[list[Annotated[Any, shaped_as("MessageTurn")]], described(minItems=1)]
    system: str | list[Annotated[Any, shaped_as("TextPart")]] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: MessageThinking | None = None
    chat_template_kwargs: dict[str, Any] | None = None


@MESSAGES
class MessagesRequest(CountTokensRequest, kw_only=True):
    """POST /v1/messages. What Anthropic has no name for is named as in a chat."""

    max_tokens: Annotated[int, bounded("max_tokens")]
    stop_sequences: StopStrings | None = None
    stream: bool | None = None
    output_config: OutputConfig | None = None

    priority: Priority | None = None
    depth: Depth = None
    return_depths: bool | None = None


class MessageUsage(TypedDict):
    """Tokens that went in and came out; those of the prompt that were computed before are counted apart."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class TextBlock(TypedDict):
    """A text."""

    type: Literal["text"]
    text: str
    d3ext: NotRequired[DepthsOfTokens]


class ThinkingBlock(TypedDict):
    """Reasoning before the answer; its signature is empty."""

    type: Literal["thinking"]
    thinking: str
    signature: str
    d3ext: NotRequired[DepthsOfTokens]


class ToolUseBlock(TypedDict):
    """A call of a function."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    d3ext: NotRequired[DepthsOfTokens]


Block = Annotated[dict[str, Any], one_of("ThinkingBlock", "TextBlock", "ToolUseBlock")]
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"] | None


class Message(TypedDict):
    """The answer to POST /v1/messages; `d3ext` of the tokens of a call stands in its block."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: StopReason
    stop_sequence: str | None
    usage: MessageUsage
    d3ext: NotRequired[DepthSummary]


class TokenCount(TypedDict):
    """The answer to POST /v1/messages/count_tokens."""

    input_tokens: int


class MessageEnd(TypedDict):
    """Why a message ends."""

    stop_reason: StopReason
    stop_sequence: str | None


_DELTA = """What is new of a block: {"type": "text_delta", "text"}, {"type": "thinking_delta", "thinking"}, or
    {"type": "input_json_delta", "partial_json"}."""

MESSAGE_EVENTS: tuple[Any, ...] = (
    event("MessageStart", "The message without its content.", "message_start", message=Message),
    event("BlockStart", "A block that is empty as yet.", "content_block_start", index=int, content_block=Block),
    event("BlockDelta", _DELTA, "content_block_delta", index=int, delta=dict[str, str], d3ext=DepthsOfTokens),
    event("BlockStop", "A block is whole.", "content_block_stop", index=int),
    event(
        "MessageDelta",
        "What is known at the end.",
        "message_delta",
        delta=MessageEnd,
        usage=MessageUsage,
        d3ext=DepthSummary,
    ),
    event("MessageStop", "The last event.", "message_stop"),
    event("Ping", "Goes into a silence.", "ping"),
)
