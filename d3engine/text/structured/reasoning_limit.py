"""Reasoning of bounded length before an answer's form: where it is too long, its end is written for the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np

from d3engine.request.constraint import Allowed, Constraint, Form


@dataclass(frozen=True)
class ReasoningLimit:
    """How reasoning is marked, and how long it may be.

    Attributes:
        opening: before it; empty where the prompt has begun it.
        closing: after it.
        closing_ids: the same as tokens.
        most: tokens of reasoning, without those of its end.
        bytes_of: what a token stands for.
        vocab_size: of the masks.
    """

    opening: bytes
    closing: bytes
    closing_ids: tuple[int, ...]
    most: int
    bytes_of: Callable[[int], bytes]
    vocab_size: int


@dataclass(frozen=True)
class _Place:
    """How far a sequence has come: `is_reasoning` is None until it is known whether it begins with one."""

    is_reasoning: bool | None
    num_tokens: int = 0
    num_closing: int = 0
    tail: bytes = b""


class LimitedReasoning:
    """A form whose reasoning is limited; a `Form`."""

    def __init__(self, form: Form, limit: ReasoningLimit) -> None:
        self._form = form
        self._limit = limit

    def begin(self, end_token_ids: frozenset[int]) -> Constraint:
        begun = _Place(None if self._limit.opening else True)
        return _LimitedPlace(self._form.begin(end_token_ids), self._limit, begun)


class _LimitedPlace:
    """Where one sequence stands; a `Constraint`."""

    def __init__(self, inner: Constraint, limit: ReasoningLimit, place: _Place) -> None:
        self._inner = inner
        self._limit = limit
        self._place = place

    @property
    def fault(self) -> str | None:
        return self._inner.fault

    @property
    def token_seconds(self) -> float:
        return self._inner.token_seconds

    def allowed(self, drafted: Sequence[int] = ()) -> Allowed | None:
        place = reduce(self._behind, drafted, self._place)
        if not place.is_reasoning or place.num_tokens < self._limit.most or self._inner.fault is not None:
            return self._inner.allowed(drafted)
        token = self._limit.closing_ids[place.num_closing]
        found: Allowed = np.zeros(-(-self._limit.vocab_size // 8), dtype=np.uint8)
        found[token >> 3] = 1 << (token & 7)
        return found

    def take(self, token: int) -> None:
        self._inner.take(token)
        self._place = self._behind(self._place, token)

    def copy(self) -> Constraint:
        return _LimitedPlace(self._inner.copy(), self._limit, self._place)

    def is_over(self, drafted: Sequence[int] = ()) -> bool:
        return self._inner.is_over(drafted)

    def _behind(self, place: _Place, token: int) -> _Place:
        """The place one token later."""
        if place.is_reasoning is False:
            return place
        limit, num_tokens = self._limit, place.num_tokens + 1
        tail = place.tail + limit.bytes_of(token)
        if place.is_reasoning is None:
            begins = tail.lstrip()
            if begins.startswith(limit.opening):
                return _Place(is_reasoning=True, num_tokens=num_tokens)
            is_open = limit.opening.startswith(begins)
            return _Place(None if is_open else False, num_tokens, tail=tail)
        if limit.closing in tail:
            return _Place(is_reasoning=False)
        num_closing = place.num_closing + (place.num_tokens >= limit.most)
        return replace(place, num_tokens=num_tokens, num_closing=num_closing, tail=tail[-len(limit.closing) :])
