"""Bodies of requests for embeddings and for scores of documents, and of their answers."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, TypedDict

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


class ScoreRequest(Struct, kw_only=True):
    """POST /v1/score: one text with each of several, or pairs."""

    text_1: str | list[str]
    text_2: str | list[str]
    instruction: str | None = None
    model: str | None = None
    priority: Priority | None = None


class RerankRequest(Struct, kw_only=True):
    """POST /v1/rerank, as Jina and Cohere have it."""

    query: str
    documents: list[str]
    top_n: int | None = None
    return_documents: bool | None = None
    instruction: str | None = None
    model: str | None = None
    priority: Priority | None = None


class Score(TypedDict):
    """Of one pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreList(TypedDict):
    """The answer to POST /v1/score."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class RankedText(TypedDict):
    """A document."""

    text: str


class Ranked(TypedDict):
    """One document, by its place in the request."""

    index: int
    relevance_score: float
    document: NotRequired[RankedText]


class Ranking(TypedDict):
    """The answer to POST /v1/rerank: the best documents first."""

    id: str
    model: str
    results: list[Ranked]
    usage: EmbeddingUsage
