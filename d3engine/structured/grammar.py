"""A compiled grammar, and how far one sequence has come in it.

The one idea: only tokens that a sequence keeps are taken for good. A question about a draft takes its tokens, asks, and
takes them back, so a rejected draft leaves nothing behind, and a preempted sequence, which keeps its tokens, finds its
place as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from d3engine.request.constraint import Allowed, Constraint
from d3engine.structured.checker import in_words

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Grammar:
    """A grammar over a vocabulary, in which id `vocab_size` stands for the end; a `Form`."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def begin(self, end_token_ids: frozenset[int]) -> Constraint:
        """At the beginning of a sequence that these tokens end."""
        return GrammarPlace(self._matcher.deep_copy(), self._vocab_size, end_token_ids)


class GrammarPlace:
    """Where one sequence stands; a `Constraint`."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, end_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._ends = np.array(sorted(end_token_ids), dtype=np.int64)
        self.fault: str | None = None

    def allowed(self, drafted: Sequence[int] = ()) -> Allowed | None:
        with self._behind(drafted) as goes_on:
            return self._mask() if goes_on else None

    def take(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            self._fail()

    def copy(self) -> Constraint:
        other = GrammarPlace(self._matcher.deep_copy(), self._vocab_size, frozenset(self._ends.tolist()))
        other.fault = self.fault
        return other

    def is_over(self, drafted: Sequence[int] = ()) -> bool:
        with self._behind(drafted) as goes_on:
            return not goes_on

    @contextmanager
    def _behind(self, drafted: Sequence[int]) -> Iterator[bool]:
        """Stand behind these tokens for a while; whether the grammar goes on there."""
        taken = self._matcher.try_consume_tokens(list(drafted)) if drafted else 0
        try:
            # A token that cannot be taken is one that ends the sequence: nothing else was allowed.
            yield taken == len(drafted) and not (self._matcher.is_stopped() and self.fault is None)
        finally:
            if taken and not self._matcher.rollback(taken):
                self._fail()

    def _mask(self) -> Allowed:
        if self.fault is not None:
            return np.zeros(-(-self._vocab_size // 8), dtype=np.uint8)
        found: Allowed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8).copy()
        if self._matcher.is_error():
            self._fail()
            return self._mask()
        may_end = found[self._vocab_size >> 3] >> (self._vocab_size & 7) & 1
        bits = (1 << (self._ends & 7)).astype(np.uint8)
        if may_end:
            np.bitwise_or.at(found, self._ends >> 3, bits)
        else:
            np.bitwise_and.at(found, self._ends >> 3, ~bits)
        return found[: -(-self._vocab_size // 8)]

    def _fail(self) -> None:
        self.fault = f"structured_outputs: {in_words(self._matcher.get_error())}"
