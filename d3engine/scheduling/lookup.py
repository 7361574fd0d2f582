"""Lookup drafts: what followed the last tokens of a text where they stood before."""

from __future__ import annotations

import numpy as np

from d3engine.scheduling.kv_cache import IntArray

MIN_MATCH = 2
MAX_MATCH = 16
"""Tokens that two places must have in common, and how many are looked at; the native library has the same numbers."""


def continuation(text: IntArray, most: int, history: IntArray | None = None) -> list[int]:
    """Up to `most` tokens that followed the longest earlier match of the end of `text` [n], the latest of equals.

    A match that reaches into its own continuation repeats it. In `history`, texts apart by `APART`, a match must be
    longer than the best of the text itself. Empty without a match of `MIN_MATCH` tokens.
    """
    same, followed = _longest_match(text, text[:-1])
    if history is not None and history.size:
        elsewhere, others = _longest_match(text, history[:-1])
        if elsewhere > same:
            behind = history[others:][:most]
            ends = (behind == APART).nonzero()[0]
            found: list[int] = behind[: ends[0] if ends.size else most].tolist()
            return found
    return np.resize(text[followed:], most).tolist() if same else []


def _longest_match(text: IntArray, among: IntArray) -> tuple[int, int]:
    """Tokens that the end of `text` has in common with a place of `among`, and the place behind it; 0 for too few."""
    ends = (among == text[-1]).nonzero()[0]
    best, found = MIN_MATCH - 1, 0
    for end in ends[::-1].tolist():
        span = min(MAX_MATCH, end + 1, text.size)
        differs = (among[end + 1 - span : end + 1] != text[text.size - span :])[::-1]
        same = int(differs.argmax()) if differs.any() else span
        if same > best:
            best, found = same, end + 1
        if best == MAX_MATCH:
            break
    return (best, found) if found else (0, 0)


APART = -1
"""Between two texts of a history: no token."""


class AnswerHistory:
    """The newest tokens of finished answers: as many as a request has asked for."""

    def __init__(self) -> None:
        self._tokens = np.empty(0, np.int64)
        self._most = 0

    def add(self, token_ids: IntArray, most: int) -> None:
        """Take in an answer of a request that would see `most` tokens."""
        self._most = max(self._most, most)
        self._tokens = np.concatenate([self._tokens, token_ids, [APART]])[-self._most :]

    def clear(self) -> None:
        """Forget all answers."""
        self._tokens = self._tokens[:0]

    def newest(self, most: int) -> IntArray:
        """Int64, up to `most` tokens, answers apart by `APART`."""
        return self._tokens[max(0, self._tokens.size - most) :]
