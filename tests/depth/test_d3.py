"""D3's schedule is what its formula says, in the paper's numbers, and what does not fit is refused."""

import json
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from bad_values import assert_refused
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import layers_run

from d3engine.depth import D3, NEVER, UnifiedSkip, policy_from_dict
from d3engine.depth.statistics import PRESETS, mean_depth, preset
from d3engine.errors import InvalidValueError


def d3_keep(layers: int, alpha: float, first: int, tail: int, step: int) -> int:
    """The formula of the D3 paper, one step at a time."""
    return max(math.floor(layers * alpha**step), first + tail)


def d3_layers(layers: int, alpha: float, first: int, tail: int, step: int) -> list[int]:
    skipped = range(first, first + layers - d3_keep(layers, alpha, first, tail, step))
    return [layer for layer in range(layers) if layer not in skipped]


@pytest.mark.parametrize(("layers", "mean"), [(32, 29.904297), (40, 37.511719), (80, 75.534180)])
def test_d3_means_on_gsm8k_are_those_of_table_6(layers: int, mean: float) -> None:
    for start in (0.6, 0.7, 0.8):
        schedule = D3(alpha=0.9999, start=start).schedule(layers)
        assert mean_depth(schedule, 1024) == pytest.approx(mean, abs=1e-6)


@pytest.mark.parametrize(
    ("layers", "start", "exact", "printed"),
    [(32, 0.6, 19.165, 19.17), (40, 0.5, 20.335, 20.33), (80, 0.6, 48.43, 48.43)],
)
def test_d3_means_on_bbh_are_those_of_table_6(layers: int, start: float, exact: float, printed: float) -> None:
    mean = mean_depth(D3(alpha=0.9, start=start).schedule(layers), 200)
    assert mean == pytest.approx(exact, abs=1e-9)
    # The paper rounded in float32, where 19.165 and 20.335 fall on the other side of the half.
    assert mean == pytest.approx(printed, abs=5e-3 + 1e-9)


def test_d3_depths_on_bbh_for_32_layers() -> None:
    schedule = D3(alpha=0.9, start=0.6).schedule(32)
    assert schedule.depths(10).tolist() == [32, 28, 25, 23, 20, 19, 19, 19, 19, 19]
    assert layers_run(schedule, 1) == [*range(19), *range(23, 32)]
    assert layers_run(schedule, 5) == layers_run(schedule, 10**9) == list(range(19))


@pytest.mark.parametrize(
    ("layers", "drops"),
    [(32, [1, 318, 646, 985]), (40, [1, 254, 513, 780]), (80, [1, 126, 254, 383, 513, 646, 780, 916])],
)
def test_d3_drops_one_layer_at_these_steps_at_alpha_0_9999(layers: int, drops: list[int]) -> None:
    schedule = D3(alpha=0.9999, start=0.6).schedule(layers)
    assert sorted(schedule.cutoffs[schedule.cutoffs < 1024].tolist()) == drops
    first = math.floor(layers * 6 / 10)
    assert schedule.cutoffs[first : first + len(drops)].tolist() == drops


policies = st.tuples(
    st.integers(1, 90),
    st.one_of(st.floats(0.05, 1.0), st.sampled_from([0.8, 0.9, 0.99, 0.999, 1.0, 1e-300])),
    st.integers(1, 99),
    st.integers(0, 5),
)


@settings(max_examples=60)
@given(policies)
def test_d3_cutoffs_are_the_brute_force_table_of_the_formula(case: tuple[int, float, int, int]) -> None:
    layers, alpha, percent, tail = case
    first = layers * percent // 100
    policy = D3(alpha=alpha, start=percent / 100, tail=tail)
    if first + tail > layers:
        with pytest.raises(InvalidValueError, match="tail"):
            policy.schedule(layers)
        return
    schedule = policy.schedule(layers)
    steps = [*range(-1, 60), 200, 999, 5000]
    assert all(layers_run(schedule, step) == d3_layers(layers, alpha, first, tail, max(step, 0)) for step in steps)


@pytest.mark.parametrize("alpha", [0.9999, 0.99997, 0.9999999, 0.999999999, 1 - 2**-40])
def test_d3_cutoffs_near_alpha_1_are_first_steps_below(alpha: float) -> None:
    """D3 cutoffs near alpha 1 are the first step below the line."""
    layers, first = 32, 16
    cutoffs = D3(alpha=alpha, start=0.5).schedule(layers).cutoffs
    for offset, cutoff in enumerate(cutoffs[first:].tolist()):
        last_checked = min(cutoff, NEVER) - 1
        assert math.floor(layers * alpha**last_checked) >= layers - offset
        assert cutoff == NEVER or math.floor(layers * alpha**cutoff) < layers - offset
    assert cutoffs[first] == 1


def test_d3_start_in_hundredths_is_exact_for_every_depth() -> None:
    for percent in range(1, 100):
        policy, layers = D3(alpha=0.9, start=percent / 100), range(1, 201)
        assert [policy.first_layer(count) for count in layers] == [count * percent // 100 for count in layers]


def test_d3_takes_start_as_any_exact_number() -> None:
    written = [0.6, Fraction(3, 5), Decimal("0.6"), "0.6", "3/5", np.float64(0.6)]
    assert {D3(alpha=0.9, start=start) for start in written} == {D3(alpha=0.9, start=0.6)}  # type: ignore[arg-type]
    third = D3(alpha=0.9, start=Fraction(1, 3))
    assert third.first_layer(30) == 10
    assert policy_from_dict(json.loads(json.dumps(third.describe()))) == third


@pytest.mark.parametrize("text", ["1e999999999", "-1e999999999", "1e-999999999", "9" * 5000, f"1{'0' * 400}/3"])
def test_number_too_long_to_be_exact_is_refused(text: str) -> None:
    """A number too long to be exact is refused rather than computed."""
    with pytest.raises(InvalidValueError, match="speedup"):
        UnifiedSkip(text)  # type: ignore[arg-type]


def test_d3_tail_that_does_not_fit_is_refused_with_its_bound() -> None:
    D3(alpha=0.9, start=0.6, tail=13).schedule(32)
    with pytest.raises(InvalidValueError, match=r"tail must be at most 13, since .* layer 19 of 32; got 14"):
        D3(alpha=0.9, start=0.6, tail=14).schedule(32)


def test_d3_presets_are_the_settings_of_the_paper() -> None:
    assert D3.preset("bbh", num_layers=32) == D3(alpha=0.9, start=0.6)
    assert D3.preset("bbh", num_layers=40) == D3(alpha=0.9, start=0.5)
    assert D3.preset("bbh", num_layers=80) == D3(alpha=0.9, start=0.6)
    assert D3.preset("gsm8k", num_layers=32) == D3(alpha=0.9999, start=0.8)
    assert D3.preset("gsm8k", num_layers=40) == D3(alpha=0.9999, start=0.7)
    assert sum(map(len, PRESETS.values())) == 5


@pytest.mark.parametrize(
    ("task", "layers", "field"), [("mmlu", 32, "preset"), ("gsm8k", 80, "num_layers"), ([], 32, "preset")]
)
def test_presets_absent_from_the_paper_are_refused_by_name(task: object, layers: int, field: str) -> None:
    """Presets that the paper does not give are refused by name."""
    with assert_refused(field):
        preset(task, layers)
