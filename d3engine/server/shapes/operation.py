"""The bodies of what those ask who operate a server, and of errors."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, TypedDict

from d3engine.server.errors import ANTHROPICS_TYPES, TYPES
from d3engine.server.model_ids import ModelCard
from d3engine.server.shapes.fields import described

ErrorType = Annotated[str, described(enum=sorted(set(TYPES.values())))]
AnthropicsErrorType = Annotated[str, described(enum=sorted({*ANTHROPICS_TYPES.values(), "invalid_request_error"}))]


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


class ModelList(TypedDict):
    """The answer to GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class HealthAnswer(TypedDict):
    """The answer to GET /health and /ready."""

    status: Literal["ok", "dead", "hung", "draining", "full"]
    reason: NotRequired[str]


class Version(TypedDict):
    """The answer to GET /version."""

    version: str
