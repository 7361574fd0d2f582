"""Intervals against published values, and scores that are what the outputs say."""

from itertools import product
from math import comb

import pytest

from d3engine.depth import D3, FullDepth
from d3engine.depth.statistics import LLAMA2_7B
from d3engine.engine.engine import Engine
from d3engine.errors import InvalidValueError
from d3engine.request.params import SamplingParams
from d3engine.research.evaluation.accuracy import (
    Score,
    compare,
    mcnemar_p,
    measure,
    paired_difference_interval,
    take_problems,
    wilson_interval,
)
from d3engine.research.evaluation.work import Work


def score(right: str) -> Score:
    flags = tuple(flag == "1" for flag in right)
    return Score(FullDepth(), LLAMA2_7B, Work(9, 36, 9), 0, 4.0, 1.0, flags)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),  # Newcombe, Statistics in Medicine 17, 1998, p. 857: method 3
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (29, 29, 0.8830, 1.0),
    ],
)
def test_wilsons_interval_has_the_published_values(successes: int, trials: int, low: float, high: float) -> None:
    interval = wilson_interval(successes, trials)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=6e-5)


def test_wilsons_interval_is_symmetric_and_holds_the_share() -> None:
    for successes in range(11):
        interval, mirrored = wilson_interval(successes, 10), wilson_interval(10 - successes, 10)
        assert 0 <= interval.low <= successes / 10 <= interval.high <= 1
        assert (interval.low, interval.high) == pytest.approx((1 - mirrored.high, 1 - mirrored.low))


def test_more_confidence_is_a_wider_interval() -> None:
    narrow, wide = wilson_interval(3, 10, 0.8), wilson_interval(3, 10, 0.99)
    assert wide.low < narrow.low < narrow.high < wide.high


@pytest.mark.parametrize(
    ("successes", "trials", "confidence"), [(3, 2, 0.95), (-1, 5, 0.95), (0, 0, 0.95), (1, 2, 1.0)]
)
def test_a_proportion_that_cannot_be_is_refused(successes: int, trials: int, confidence: float) -> None:
    with pytest.raises(InvalidValueError):
        wilson_interval(successes, trials, confidence)


def test_the_paired_interval_has_the_published_value() -> None:
    interval = paired_difference_interval(36, 12, 2, 0)  # Newcombe, p. 2635 of the paper on paired data, method 10
    assert (interval.low, interval.high) == pytest.approx((0.0569, 0.3404), abs=6e-5)


def test_the_paired_interval_turns_round_with_the_sides() -> None:
    one, other = paired_difference_interval(20, 7, 2, 11), paired_difference_interval(20, 2, 7, 11)
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low))


def test_the_paired_interval_has_a_width_where_no_pair_differs() -> None:
    interval = paired_difference_interval(30, 0, 0, 10)
    assert interval.low < 0 < interval.high
    assert interval.high - interval.low < 0.2


def test_paired_interval_covers_the_truth_as_often_as_it_says() -> None:
    """The paired interval covers the truth about as often as it says."""
    # Exact, over every outcome of 20 pairs that differ with chances 0.2 and 0.1, the rest shared evenly.
    trials, chances = 20, (0.4, 0.2, 0.1, 0.3)
    covered = 0.0
    for both, first, second in product(range(trials + 1), repeat=3):
        neither = trials - both - first - second
        if neither < 0:
            continue
        counts = (both, first, second, neither)
        weight = float(comb(trials, both) * comb(trials - both, first) * comb(trials - both - first, second))
        for chance, count in zip(chances, counts, strict=True):
            weight *= chance**count
        interval = paired_difference_interval(*counts)
        covered += weight * (interval.low <= 0.1 <= interval.high)
    assert 0.93 < covered < 0.99


def test_mcnemars_exact_test_has_known_values() -> None:
    assert mcnemar_p(0, 0) == 1.0
    assert mcnemar_p(5, 5) == 1.0
    assert mcnemar_p(0, 6) == pytest.approx(2 / 64)
    assert mcnemar_p(2, 12) == mcnemar_p(12, 2) == pytest.approx(2 * (1 + 14 + 91) / 2**14)


def test_a_comparison_counts_problem_by_problem() -> None:
    comparison = compare(score("110100"), score("011101"))
    assert (comparison.only_first, comparison.only_second) == (1, 2)
    assert comparison.difference == pytest.approx(1 / 6)
    assert comparison.interval.low < 1 / 6 < comparison.interval.high


def test_scores_of_different_problems_are_not_compared() -> None:
    with pytest.raises(InvalidValueError, match="scores"):
        compare(score("11"), score("111"))


def test_a_measurement_says_what_the_engine_did() -> None:
    problems = take_problems("test", seed=0, limit=3)
    with Engine("demo", max_num_seqs=4, kv_cache_memory_bytes=2**24) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
        full = measure(engine, problems, FullDepth(), params)
        decayed = measure(engine, problems, D3(alpha=0.9, start=0.6), params)
        cached = engine.stats().cached_prompt_tokens
    assert (full.tokens, full.unfinished, len(full.right)) == (15, 3, 3)
    assert full.realised_mean_layers == full.nominal_mean_layers == 16
    assert decayed.realised_mean_layers == decayed.nominal_mean_layers == pytest.approx((16 + 14 + 12 + 11 + 10) / 5)
    assert full.correct == 0  # five tokens are never a whole answer
    assert cached == 0  # the second policy did not find the prompts computed by the first


def test_several_answers_to_a_problem_are_refused() -> None:
    with pytest.raises(InvalidValueError, match=r"n must be .*; got 2"):
        measure(None, take_problems("test", 0, 1), FullDepth(), SamplingParams(n=2))  # type: ignore[arg-type]
