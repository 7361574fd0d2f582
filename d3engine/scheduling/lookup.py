"""Lookup drafts: what followed the last tokens of a text where they stood before."""

from __future__ import annotations

import numpy as np

from d3engine.cache.kv_cache import IntArray

MIN_MATCH = 2
MAX_MATCH = 16
"""Tokens that two places must have in common, and how many are looked at; the native library has the same numbers."""


def continuation(text: IntArray, most: int) -> list[int]:
    """Up to `most` tokens that followed the longest earlier match of the end of `text` [n], the latest of equals.

    A match that reaches into its own continuation repeats it. Empty without a match of `MIN_MATCH` tokens.
    """
    length = text.size
    ends = (text[:-1] == text[-1]).nonzero()[0]
    best, found = MIN_MATCH - 1, -1
    for end in ends[::-1].tolist():
        span = min(MAX_MATCH, end + 1)
        differs = (text[end + 1 - span : end + 1] != text[length - span :])[::-1]
        same = int(differs.argmax()) if differs.any() else span
        if same > best:
            best, found = same, end
        if best == MAX_MATCH:
            break
    if found < 0:
        return []
    followed = text[found + 1 :]
    return np.resize(followed, most).tolist()
