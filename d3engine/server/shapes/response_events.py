"""The events of a streamed response, each under the name that is its type, and numbered."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from d3engine.server.shapes.answers import DepthsOfTokens
from d3engine.server.shapes.responses import ModelResponse, OutputItem, OutputText


class _Numbered(TypedDict):
    sequence_number: int


class ResponseEvent(_Numbered):
    """How far the response is."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ModelResponse


class ItemEvent(_Numbered):
    """An item of the output begins, or is whole."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class PartEvent(_Numbered):
    """A part of a message begins, or is whole."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    item_id: str
    output_index: int
    content_index: int
    part: OutputText


class TextDelta(_Numbered):
    """What is new of a text."""

    type: Literal["response.output_text.delta"]
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[Any]
    d3ext: NotRequired[DepthsOfTokens]


class TextDone(_Numbered):
    """A text is whole."""

    type: Literal["response.output_text.done"]
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[Any]


class ArgumentsDelta(_Numbered):
    """What is new of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"]
    item_id: str
    output_index: int
    delta: str
    d3ext: NotRequired[DepthsOfTokens]


class ArgumentsDone(_Numbered):
    """The arguments of a call are whole."""

    type: Literal["response.function_call_arguments.done"]
    item_id: str
    output_index: int
    name: str
    arguments: str


RESPONSE_EVENTS: tuple[Any, ...] = (
    ResponseEvent,
    ItemEvent,
    PartEvent,
    TextDelta,
    TextDone,
    ArgumentsDelta,
    ArgumentsDone,
)
