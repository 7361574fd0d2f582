"""Bodies of requests for embeddings, and of their answers."""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

from msgspec import Struct

from d3engine.request.params import POOLINGS
from d3engine.server.schemas.requests import Priority, Prompt, bounded, described
from d3engine.utils.arguments import Integers

DIMENSIONS = Integers(1)


class EmbeddingRequest(Struct, kw_only=True):
    """POST /v1/embeddings; `pooling` and `normalize` are this server's own."""

    input: Prompt
    model: str | None = None
    encoding_format: Annotated[str, described(enum=["float", "base64"])] | None = None
    dimensions: Annotated[int, bounded(DIMENSIONS)] | None = None
    pooling: Annotated[str, described(enum=list(POOLINGS))] | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    priority: Priority | None = None


class Embedding(TypedDict):
    """Of one input: numbers, or their bytes as float32 of the lower byte first in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    """Tokens that went in."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(TypedDict):
    """The answer to POST /v1/embeddings."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
