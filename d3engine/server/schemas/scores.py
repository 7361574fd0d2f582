"""Bodies of requests for scores of documents, and of their answers."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from msgspec import Struct

from d3engine.server.schemas.embeddings import EmbeddingUsage
from d3engine.server.schemas.requests import Priority


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
