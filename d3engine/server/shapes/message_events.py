"""The events of a streamed message, each under the name that is its type; errors are `AnthropicsError`."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from d3engine.server.shapes.answers import DepthsOfTokens, DepthSummary
from d3engine.server.shapes.messages import Block, Message, MessageUsage, StopReason


class MessageStart(TypedDict):
    """The message without its content."""

    type: Literal["message_start"]
    message: Message


class BlockStart(TypedDict):
    """A block that is empty as yet."""

    type: Literal["content_block_start"]
    index: int
    content_block: Block


class BlockDelta(TypedDict):
    """What is new of a block: {"type": "text_delta", "text"}, or {"type": "input_json_delta", "partial_json"}."""

    type: Literal["content_block_delta"]
    index: int
    delta: dict[str, str]
    d3ext: NotRequired[DepthsOfTokens]


class BlockStop(TypedDict):
    """A block is whole."""

    type: Literal["content_block_stop"]
    index: int


class MessageEnd(TypedDict):
    """Why a message ends."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(TypedDict):
    """What is known at the end."""

    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage
    d3ext: NotRequired[DepthSummary]


class MessageStop(TypedDict):
    """The last event."""

    type: Literal["message_stop"]


class Ping(TypedDict):
    """Goes into a silence."""

    type: Literal["ping"]


MESSAGE_EVENTS: tuple[Any, ...] = (MessageStart, BlockStart, BlockDelta, BlockStop, MessageDelta, MessageStop, Ping)
