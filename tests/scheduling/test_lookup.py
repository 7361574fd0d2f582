"""Lookups find the longest earlier match of a text's end, in Python as in the native library."""

import random

import numpy as np
import pytest

from d3engine import Engine, PromptLookup, SamplingParams
from d3engine.scheduling.lookup import APART, MAX_MATCH, MIN_MATCH, AnswerHistory, continuation


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


def test_earlier_answers_win_with_more_in_common() -> None:
    """Earlier answers are taken where they have more in common."""
    history = AnswerHistory()
    history.add(np.array([5, 1, 2, 3, 8, 9]), 100)
    history.add(np.array([2, 3, 7]), 100)
    text = np.array([2, 3, 4, 1, 2, 3], np.int32)
    assert continuation(text, 4) == [4, 1, 2, 3]
    assert continuation(text, 4, history.newest(100)) == [8, 9]  # to the end of that answer
    assert continuation(text, 4, history.newest(4)) == [4, 1, 2, 3]  # an equally long match in the text goes first
    assert continuation(np.array([0, 2, 3], np.int32), 4, history.newest(100)) == [7]


def test_history_keeps_the_newest_tokens_that_were_asked_for() -> None:
    history = AnswerHistory()
    for answer in range(9):
        history.add(np.full(3, answer), 6)
    assert history.newest(6).tolist() == [7, APART, 8, 8, 8, APART]
    assert history.newest(0).tolist() == []
    assert history.newest(100).size == 6


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_an_answer_that_comes_again_is_drafted_whole(backend: str) -> None:
    """Tokens stay; a request that does not ask for earlier answers sees none."""
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=0)
    counts = []
    for history in (0, 1000):
        policy = PromptLookup(draft_length=4, history=history)
        with Engine("demo", depth=policy, backend=backend, max_model_len=256) as engine:
            first, again = (engine.generate("The sea", greedy, use_tqdm=False)[0] for _ in range(2))
        assert again.outputs[0].token_ids == first.outputs[0].token_ids
        if backend == "native":
            assert again.outputs[0].logprobs == first.outputs[0].logprobs
        counts.append((first.metrics.tokens_per_verification, again.metrics.tokens_per_verification))
    assert counts[0][0] == counts[0][1] == counts[1][0]
    assert counts[1][1] > 4 > counts[0][1]
