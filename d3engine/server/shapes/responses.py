"""OpenAI's responses without their state: what is asked and what is answered."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from msgspec import Struct

from d3engine.server.shapes.answers import DepthsOfTokens, DepthSummary
from d3engine.server.shapes.requests import Depth


class ResponsesRequest(Struct, kw_only=True):
    """POST /v1/responses: `input` is a text or a list of messages. What OpenAI has no name for here is named as in a
    chat."""

    model: str | None = None
    input: str | list[Any]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None

    top_k: int | None = None
    seed: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    depth: Depth = None
    return_depths: bool | None = None


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


class ModelResponse(TypedDict):
    """The answer to POST /v1/responses; of what is not served here it says so (`store` false, no tools)."""

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
    output: list[OutputMessage]
    background: bool
    parallel_tool_calls: bool
    previous_response_id: None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Literal["none"]
    tools: list[Any]
    top_p: float
    truncation: Literal["disabled"]
    usage: dict[str, Any] | None
    d3ext: NotRequired[DepthSummary]
