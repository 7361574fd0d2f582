"""Anthropic's messages: what is asked and what is answered, in text alone."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from msgspec import Struct

from d3engine.server.shapes.answers import DepthsOfTokens, DepthSummary
from d3engine.server.shapes.requests import Depth


class CountTokensRequest(Struct, kw_only=True):
    """POST /v1/messages/count_tokens: a conversation; `system` is a text or a list of texts."""

    model: str | None = None
    messages: list[Any]
    system: str | list[Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """POST /v1/messages. What Anthropic has no name for is named as in a chat."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None

    seed: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
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


class Message(TypedDict):
    """The answer to POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "model_context_window_exceeded"] | None
    stop_sequence: str | None
    usage: MessageUsage
    d3ext: NotRequired[DepthSummary]


class TokenCount(TypedDict):
    """The answer to POST /v1/messages/count_tokens."""

    input_tokens: int
