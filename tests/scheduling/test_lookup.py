"""Lookups find the longest earlier match of a text's end, in Python as in the native library."""

from __future__ import annotations

import random

import numpy as np
import pytest

from d3engine.scheduling.lookup import MAX_MATCH, MIN_MATCH, continuation


def naive(text: list[int], most: int) -> list[int]:
    """By the definition: every earlier end, the longest match, the latest of equals."""
    best, found = MIN_MATCH - 1, None
    for end in range(len(text) - 1):
        same = 0
        while same < min(MAX_MATCH, end + 1) and text[end - same] == text[len(text) - 1 - same]:
            same += 1
        if same >= max(best, MIN_MATCH):
            best, found = same, end
    if found is None:
        return []
    tokens = list(text)
    for nth in range(most):
        tokens.append(tokens[found + 1 + nth])
    return tokens[len(text) :]


@pytest.mark.parametrize("seed", range(8))
def test_continuation_follows_the_longest_match(seed: int) -> None:
    numbers = random.Random(seed)
    for length in (1, 2, 3, 7, 40, 200):
        text = [numbers.randrange(2 + seed % 4) for _ in range(length)]
        assert continuation(np.array(text, np.int32), 5) == naive(text, 5), text


def test_a_text_without_a_match_has_no_continuation() -> None:
    assert continuation(np.array([4, 8, 15, 16, 23, 42], np.int32), 3) == []
    assert continuation(np.array([1, 2, 3, 2], np.int32), 3) == []  # one token in common is none
    assert continuation(np.array([7, 7, 7], np.int32), 4) == [7, 7, 7, 7]
