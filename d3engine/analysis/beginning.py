"""How far two answers are the same."""

from __future__ import annotations

from collections.abc import Sequence


def same_beginning(one: Sequence[int], other: Sequence[int]) -> int:
    """With how many equal token ids both begin."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))
