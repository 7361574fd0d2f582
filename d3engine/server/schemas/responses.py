"""OpenAI's responses without their state: what is asked and what is answered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Struct

from d3engine.server.schemas.answers import DepthsOfTokens, DepthSummary, event
from d3engine.server.schemas.requests import (
    RESPONSES,
    Depth,
    FunctionsName,
    Priority,
    ThinkingBudget,
    described,
    one_of,
)


class ResponseTool(Struct, kw_only=True, forbid_unknown_fields=True):
    """One of the `tools`: a function that the model may call; `strict` makes no difference where a call must come."""

    type: Literal["function"]
    name: FunctionsName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedResponseTool(Struct, kw_only=True, forbid_unknown_fields=True):
    """A `tool_choice` that names a function."""

    type: Literal["function"]
    name: FunctionsName


class TextFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    """The form of an answer; name and schema are there where the type is "json_schema", and only there."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseReasoning(Struct, kw_only=True):
    """How much the model thinks, where its chat template has a choice; its reasoning is never summarised."""

    effort: str | None = None


class ResponseText(Struct, kw_only=True, forbid_unknown_fields=True):
    """What the text must be; `verbosity` is no setting of the model and must be null."""

    format: TextFormat | None = None
    verbosity: None = None


@RESPONSES
class ResponsesRequest(Struct, kw_only=True):
    """POST /v1/responses: `input` is a text, or a list of messages, calls (function_call) and their results
    (function_call_output). What OpenAI has no name for here is named as in a chat."""

    model: str | None = None
    input: str | Annotated[list[Any], described(minItems=1)]
    instructions: str | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    text: ResponseText | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedResponseTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ResponseReasoning | None = None

    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: ThinkingBudget | None = None
    priority: Priority | None = None
    depth: Depth = None
    return_depths: bool | None = None
    if TYPE_CHECKING:
        max_output_tokens: int | None = None


class OutputText(TypedDict):
    """A text."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]
    d3ext: NotRequired[DepthsOfTokens]


class OutputMessage(TypedDict):
    """What the model says."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class ReasoningText(TypedDict):
    """Reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(TypedDict):
    """What the model thinks before it answers."""

    id: str
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[ReasoningText]
    status: Literal["in_progress", "completed", "incomplete"]
    d3ext: NotRequired[DepthsOfTokens]


class OutputCall(TypedDict):
    """A call of a function, its arguments as JSON."""

    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    status: Literal["in_progress", "completed", "incomplete"]
    d3ext: NotRequired[DepthsOfTokens]


OutputItem = Annotated[dict[str, Any], one_of("OutputReasoning", "OutputMessage", "OutputCall")]


class ReusedTokens(TypedDict):
    """How many tokens of the prompt were computed before."""

    cached_tokens: int
    cache_write_tokens: int


class ReasoningTokens(TypedDict):
    """How many of them were of reasoning."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """Tokens that went in and came out."""

    input_tokens: int
    input_tokens_details: ReusedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ModelResponse(TypedDict):
    """The answer to POST /v1/responses; of what is not served here it says so (`store` false)."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[OutputItem]
    background: bool
    parallel_tool_calls: bool
    previous_response_id: None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    d3ext: NotRequired[DepthSummary]


def _event(name: str, says: str, /, *types: str, **fields: Any) -> Any:
    return event(name, says, *(f"response.{one}" for one in types), sequence_number=int, **fields)


_STATES = ("created", "in_progress", "completed", "incomplete", "failed")
_OF_ITEM = {"item_id": str, "output_index": int}
_OF_PART = {**_OF_ITEM, "content_index": int}
_PART = Annotated[dict[str, Any], one_of("OutputText", "ReasoningText")]

RESPONSE_EVENTS: tuple[Any, ...] = (
    _event("ResponseEvent", "How far the response is.", *_STATES, response=ModelResponse),
    _event(
        "ItemEvent",
        "An item of the output begins, or is whole.",
        "output_item.added",
        "output_item.done",
        output_index=int,
        item=OutputItem,
    ),
    _event(
        "PartEvent",
        "A part of a message begins, or is whole.",
        "content_part.added",
        "content_part.done",
        **_OF_PART,
        part=_PART,
    ),
    _event(
        "ReasoningDelta",
        "What is new of reasoning.",
        "reasoning_text.delta",
        **_OF_PART,
        d3ext=DepthsOfTokens,
        delta=str,
    ),
    _event("ReasoningDone", "Reasoning is whole.", "reasoning_text.done", **_OF_PART, text=str),
    _event(
        "TextDelta",
        "What is new of a text.",
        "output_text.delta",
        **_OF_PART,
        d3ext=DepthsOfTokens,
        delta=str,
        logprobs=list[Any],
    ),
    _event("TextDone", "A text is whole.", "output_text.done", **_OF_PART, text=str, logprobs=list[Any]),
    _event(
        "ArgumentsDelta",
        "What is new of a call's arguments.",
        "function_call_arguments.delta",
        **_OF_ITEM,
        d3ext=DepthsOfTokens,
        delta=str,
    ),
    _event(
        "ArgumentsDone",
        "The arguments of a call are whole.",
        "function_call_arguments.done",
        **_OF_ITEM,
        name=str,
        arguments=str,
    ),
)
