"""Every other policy gives the schedule its formula says, and any policy survives JSON."""

import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from bad_values import assert_refused, bad_values
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import layers_run

from d3engine.depth import (
    D3,
    NEVER,
    DepthPolicy,
    Distilled,
    EarlyExit,
    EvenSkip,
    FixedSkip,
    FullDepth,
    LayerTable,
    Nested,
    Schedule,
    SkipDecode,
    TailSkip,
    UnifiedSkip,
    Width,
    policy_from_dict,
    policy_from_name,
)
from d3engine.depth.statistics import mean_depth
from d3engine.errors import InvalidValueError


def linear_depth(highest: int, lowest: int, steps: int, step: int) -> int:
    line = Fraction(highest) - Fraction((highest - lowest) * step, steps - 1)
    return max(lowest, math.floor(line + Fraction(1, 2)))


@settings(max_examples=60)
@given(st.data())
def test_skip_decode_is_linear_with_a_window_above_the_warmup(data: st.DataObject) -> None:
    """Skip decode is the linear rule with a window above the warmup."""
    layers = data.draw(st.integers(1, 40))
    steps = data.draw(st.integers(2, 60))
    lowest = data.draw(st.integers(1, layers))
    highest = data.draw(st.integers(lowest, layers))
    warmup = data.draw(st.integers(0, lowest))
    schedule = SkipDecode(steps, lowest, highest, warmup).schedule(layers)
    assert schedule.is_nested
    assert schedule.depth_at(0) == layers
    for step in [*range(1, steps + 5), 10_000]:
        depth = linear_depth(highest, lowest, steps, step)
        skipped = range(warmup, warmup + layers - depth)
        assert layers_run(schedule, step) == [layer for layer in range(layers) if layer not in skipped]


def test_skip_decode_rounds_halves_up() -> None:
    # The line falls 4, 3.5, 3, 2.5, 2: halves go to the deeper side, for odd and even neighbours alike.
    assert SkipDecode(max_tokens=5, min_layers=2).schedule(4).depths(6).tolist() == [4, 4, 3, 3, 2, 2]


@given(st.integers(2, 20), st.integers(2, 40), st.floats(0, 1))
def test_skip_decode_for_mean_finds_the_closest_of_all(layers: int, steps: int, where: float) -> None:
    means = {lowest: mean_depth(SkipDecode(steps, lowest).schedule(layers), steps) for lowest in range(1, layers + 1)}
    wanted = min(means.values()) + where * (layers - min(means.values()))
    found = SkipDecode.for_mean(wanted, num_layers=layers, max_tokens=steps)
    assert abs(means[found.min_layers] - wanted) == min(abs(mean - wanted) for mean in means.values())


def test_skip_decode_for_mean_out_of_reach_is_refused() -> None:
    """Skip decode for mean refuses a mean out of reach by name."""
    for mean in (10.0, 33.0, math.nan):
        with pytest.raises(InvalidValueError, match="mean_layers"):
            SkipDecode.for_mean(mean, num_layers=32, max_tokens=200)


def test_skip_decode_refuses_depths_beyond_the_model_by_name() -> None:
    with pytest.raises(InvalidValueError, match=r"min_layers must be .*; got 9"):
        SkipDecode(10, 9).schedule(8)
    with pytest.raises(InvalidValueError, match=r"max_layers must be .*; got 9"):
        SkipDecode(10, 4, 9).schedule(8)


@pytest.mark.parametrize(("layers", "printed"), [(32, 24.68), (40, 30.99), (80, 62.48)])
def test_skip_decode_of_a_mean_depth_runs_the_papers_layers(layers: int, printed: float) -> None:
    """Skip decode of a mean depth runs what the paper prints for it."""
    policy = SkipDecode(200, mean_layers=printed)
    assert policy == SkipDecode.preset("bbh", layers)
    assert mean_depth(policy.schedule(layers), 200) == pytest.approx(printed, abs=0.26)
    assert policy.schedule(layers) == SkipDecode.for_mean(printed, num_layers=layers, max_tokens=200).schedule(layers)
    on_skip = SkipDecode(200, mean_layers=printed, on_skip="copy").schedule(layers).on_skip
    assert on_skip == "copy"


def test_presets_of_rivals_are_the_papers() -> None:
    """Presets of the rivals are the paper's and of its models alone."""
    assert [EarlyExit.preset(layers).threshold for layers in (32, 40, 80)] == [0.8, 0.7, 0.8]
    for make in (EarlyExit.preset, lambda layers: SkipDecode.preset("gsm8k", layers)):
        with pytest.raises(InvalidValueError, match="num_layers must be one of 32, 40, 80"):
            make(16)


# ------------------------------------------------------------------------------------------ unified skipping


@pytest.mark.parametrize(("policy", "kept"), [(UnifiedSkip(2), [0, 3, 6, 8]), (EvenSkip(2), [0, 3, 5, 8])])
def test_unified_and_even_skip_keep_equal_layers_at_each_step(policy: UnifiedSkip, kept: list[int]) -> None:
    """Unified and even skip keep the same layers at every step after the prompt pass."""
    schedule = policy.schedule(9)
    assert layers_run(schedule, 0) == list(range(9))
    assert layers_run(schedule, 1) == layers_run(schedule, 500) == kept
    assert type(policy)(speedup=1).schedule(9) == FullDepth().schedule(9)


def published_layers(layers: int, wanted: int) -> list[int]:
    """The rule of the authors' code, step by step: layer numbers are tried from below until there are enough."""
    found = {0, layers - 1}
    for layer in range(1, layers - 1):
        is_multiple = layer % int(layers / (wanted - 1)) == 0
        if is_multiple and len(found) < wanted:
            found.add(layer)
    return sorted(found)


@given(st.integers(2, 90), st.integers(100, 4500))
def test_unified_and_even_skip_keep_the_wanted_number(layers: int, hundredths: int) -> None:
    """Unified skip keeps the layers that its authors' code keeps, even skip both ends and no uneven gap."""
    unified, even = UnifiedSkip(speedup=hundredths / 100), EvenSkip(speedup=hundredths / 100)
    wanted = layers * 100 // hundredths
    if wanted < 2:
        for policy in (unified, even):
            with pytest.raises(InvalidValueError, match="speedup"):
                policy.schedule(layers)
        return
    kept = even.kept_layers(layers)
    assert unified.kept_layers(layers) == published_layers(layers, wanted)
    assert len(unified.kept_layers(layers)) == len(kept) == wanted
    assert (kept[0], kept[-1]) == (0, layers - 1)
    gaps = np.diff(kept)
    assert gaps.min() >= 1
    assert gaps.max() - gaps.min() <= 1
    assert layers_run(even.schedule(layers), 1) == kept


def test_unified_skip_below_two_leaves_out_one_piece() -> None:
    """Unified skip leaves out one piece below a speed-up of two, and even skip does not."""
    assert UnifiedSkip("16/11").kept_layers(16) == [*range(10), 15]  # type: ignore[arg-type]
    assert EvenSkip("16/11").kept_layers(16) == [0, 2, 3, 5, 6, 8, 9, 11, 12, 14, 15]  # type: ignore[arg-type]


def test_unified_skip_divides_by_the_number_as_written() -> None:
    assert int(33 / 1.1) == 29  # what floats say
    assert len(UnifiedSkip(speedup=1.1).kept_layers(33)) == 30


@pytest.mark.parametrize("policy", [UnifiedSkip, EvenSkip])
def test_a_speedup_that_is_a_quotient_of_layers_keeps_that_many(policy: type[UnifiedSkip]) -> None:
    for layers in range(2, 101):
        for wanted in range(2, layers + 1):
            assert len(policy(layers / wanted).kept_layers(layers)) == wanted
    assert policy(16 / 11) == policy("16/11")  # type: ignore[arg-type]


def test_a_start_that_is_a_quotient_of_layers_is_that_layer() -> None:
    for layers in range(1, 101):
        starts = [D3(0.9, first / layers).first_layer(layers) for first in range(1, layers)]
        assert starts == list(range(1, layers))


# --------------------------------------------------------------------------------------------- user's tables


def test_a_layer_table_takes_ids_or_bools() -> None:
    ids = LayerTable([[0, 1, 2], [2, 0], [0, 1, 2]])
    bools = LayerTable([[True] * 3, [True, False, True], np.array([True] * 3)])
    assert ids.schedule(3) == bools.schedule(3)
    assert layers_run(ids.schedule(3), 1) == [0, 2]
    assert not ids.schedule(3).is_nested
    assert hash(ids) == hash(LayerTable([np.array([2, 1, 0]), (0, 2), [0, 1, 2]]))


def test_a_nested_layer_table_becomes_cutoffs() -> None:
    schedule = LayerTable([[0, 1, 2], [0, 2], [0]], on_skip="none").schedule(3)
    assert schedule == Schedule.nested([NEVER, 1, 2])


@pytest.mark.parametrize(
    ("active", "field"),
    [(active, "active") for active in ([], "01", None)]
    + [([[0, 1], row], "active[1]") for row in (3, "ab", [0, 0], [True, 0], [0.0])],
)
def test_layer_table_of_wrong_rows_is_refused_by_name(active: object, field: str) -> None:
    """A layer table refuses wrong rows at construction by name."""
    with assert_refused(field):
        LayerTable(active)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("active", "field"),
    [([[0, 1]], "active[0]"), *(([[0, 1, 2], row], "active[1]") for row in ([3], [-1], [True, False]))],
)
def test_layer_table_unfit_for_the_model_is_refused_by_name(active: list, field: str) -> None:
    """A layer table refuses rows that do not fit the model by name."""
    with assert_refused(field):
        LayerTable(active).schedule(3)


# --------------------------------------------------------------------------------------- names and JSON form


def test_fixed_skip_leaves_out_what_it_names() -> None:
    """Fixed skip leaves out what it names after the prompt pass."""
    schedule = FixedSkip([5, 2]).schedule(7)
    assert schedule.is_nested
    assert [layers_run(schedule, step) for step in (0, 1, 9)] == [list(range(7)), [0, 1, 3, 4, 6], [0, 1, 3, 4, 6]]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], "skip_layers must be at least one layer id; got "),
        ([3, 3], "skip_layers must be different layer ids"),
        ([-1], "skip_layers.0. must be"),
        ("3", "skip_layers must be different layer ids"),
        ([7], "skip_layers must be layer ids from 0 to 6; got "),
    ],
)
def test_fixed_skip_refuses_what_names_no_layers(layers: object, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        FixedSkip(layers).schedule(7)  # type: ignore[arg-type]


def test_the_layers_that_shortgpt_removes_are_a_preset() -> None:
    assert FixedSkip.preset("shortgpt", 32).skip_layers == tuple(range(21, 30))
    assert FixedSkip.preset("shortgpt", 40).skip_layers == tuple(range(26, 36))
    with pytest.raises(InvalidValueError, match="num_layers must be one of 32, 40 for the preset 'shortgpt'; got 80"):
        FixedSkip.preset("shortgpt", 80)


EXAMPLES: list[DepthPolicy] = [
    FullDepth(),
    D3(alpha=0.9, start=0.6),
    D3(alpha=0.99, start=Fraction(2, 3), tail=1, on_skip="copy"),
    SkipDecode(max_tokens=200, min_layers=4, warmup=2),
    SkipDecode(max_tokens=200, min_layers=4, max_layers=7),
    SkipDecode(max_tokens=20, mean_layers=5.5),
    UnifiedSkip(speedup=1.5, on_skip="project"),
    UnifiedSkip(speedup="4/3"),  # type: ignore[arg-type]
    EvenSkip(speedup=1.5),
    FixedSkip([5, 2]),
    Distilled([4, 3], "own.safetensors"),
    Width(["a", "b"], alpha=0.9, widths=[0.9, 0.5], least=0.5),
    Width(["a", "b"], steps=[3, 9], skip_layers=[2, 1], on_skip="copy"),
    TailSkip(mean_layers=5.5, max_tokens=20),
    TailSkip(mean_layers="16/3", max_tokens=7, on_skip="copy"),  # type: ignore[arg-type]
    Nested(alpha=0.9, windows=[[5, 7], [2, 3]]),
    EarlyExit(threshold=0.9),
    EarlyExit(0.5, "cosine", decay=0, min_layer=2, every=3, batch="batch_min", on_skip="copy"),
    LayerTable([[0, 1, 2, 3, 4, 5, 6, 7], [0, 7], [0, 3, 7]]),
    LayerTable([[True] * 8, [True] + [False] * 7], on_skip="none"),
]


@pytest.mark.parametrize("policy", EXAMPLES, ids=repr)
def test_a_policy_survives_json(policy: DepthPolicy) -> None:
    restored = policy_from_dict(json.loads(json.dumps(policy.describe())))
    assert restored == policy
    assert restored.schedule(8) == policy.schedule(8)
    assert hash(restored) == hash(policy)


@pytest.mark.parametrize("policy", EXAMPLES, ids=repr)
@pytest.mark.parametrize("layers", [0, -1, 2.0, "8", True])
def test_every_policy_refuses_a_number_of_layers_that_is_none(policy: DepthPolicy, layers: object) -> None:
    with pytest.raises(InvalidValueError, match="num_layers"):
        policy.schedule(layers)  # type: ignore[arg-type]


def test_the_names_are_those_of_the_command_line() -> None:
    names = "full d3 skipdecode unified even fixed distilled tail-skip nested early-exit table width"
    assert {policy.describe()["policy"] for policy in EXAMPLES} == set(names.split())
    assert D3(0.9, 0.6).describe() == {"policy": "d3", "alpha": 0.9, "start": 0.6, "tail": 0, "on_skip": "none"}
    assert policy_from_name("d3", alpha=0.9, start=0.6) == D3(0.9, 0.6)


@pytest.mark.parametrize(
    ("description", "message"),
    [
        (
            {"policy": "d4", "alpha": 0.9},
            "policy must be one of full, d3, skipdecode, unified, even, fixed, distilled, tail-skip, .*; got 'd4'",
        ),
        ({"policy": ["d3"]}, "policy must be "),
        (
            D3(0.9, 0.6).describe() | {"beta": 1},
            "beta must be absent, .* takes alpha, start, tail, on_skip, bridges; got 1",
        ),
        ({"policy": "full", "alpha": 0.9}, "alpha must be absent, .* takes no options; got 0.9"),
        ({"policy": "d3", "alpha": 0.9}, "must be given with start; got 'd3'"),
        ({"policy": "d3"}, "must be given with alpha and start"),
        ({"policy": "d3", "alpha": 2, "start": 0.6}, "alpha must be .*; got 2"),
        ({"policy": "d3", "name": "d3", "alpha": 0.9, "start": 0.6}, 'under "policy"'),
        ({"alpha": 0.9}, 'a mapping with "policy"'),
        ("d3", 'a mapping with "policy"'),
        (None, 'a mapping with "policy"'),
    ],
)
def test_descriptions_that_make_no_policy_are_refused_by_name(description: object, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        policy_from_dict(description)  # type: ignore[arg-type]


REFUSED: list[tuple[type[DepthPolicy], dict[str, Any], dict[str, list[Any]]]] = [
    (
        D3,
        {"alpha": 0.9, "start": 0.5},
        {"alpha": [0, 1.01, math.nan, "0.9", True], "start": [0, 1, math.inf, math.nan, "half", "1/0", None, True]}
        | {"tail": [-1, 1.0], "on_skip": ["zero"]},
    ),
    (
        SkipDecode,
        {"max_tokens": 9, "min_layers": 4},
        {"max_tokens": [1, 9.0], "min_layers": [0], "max_layers": [3], "warmup": [-1], "on_skip": ["x"]},
    ),
    (SkipDecode, {"max_tokens": 9, "warmup": 3}, {"min_layers": [2, None], "mean_layers": [-1]}),
    (SkipDecode, {"max_tokens": 9, "mean_layers": 6}, {"min_layers": [4]}),
    (UnifiedSkip, {}, {"speedup": [0.99, 0, -2, math.inf, math.nan, "fast", None, True]}),
    (
        EarlyExit,
        {"threshold": 0.9},
        {"threshold": [-0.1, 2.1, math.nan, math.inf, "0.9", None, True], "decay": [-1, math.inf, "4"]}
        | {"confidence": ["softmax", "max", None, 1, ["cosine"]], "min_layer": [-1, 1.5, "2"], "every": [0, -2, 0.5]}
        | {"batch": ["all", None, 3], "on_skip": ["none", "leave", None]},
    ),
    (
        TailSkip,
        {"mean_layers": 8, "max_tokens": 20},
        {"mean_layers": [0, -1.5, math.nan, "many"], "max_tokens": [1, 9.5], "on_skip": ["leave"]},
    ),
]


@pytest.mark.parametrize(
    ("kind", "arguments", "field"),
    [(kind, usual | one, field) for kind, usual, bad in REFUSED for one, field in bad_values(**bad)],
)
def test_policy_refuses_wrong_arguments_by_name(kind: type[DepthPolicy], arguments: dict[str, Any], field: str) -> None:
    """Each policy refuses a value that an option cannot have, by the option's name."""
    with assert_refused(field):
        kind(**arguments)


def test_a_policy_is_an_abstract_class_that_users_can_extend() -> None:
    with pytest.raises(TypeError):
        DepthPolicy()  # type: ignore[abstract]
    assert all(isinstance(policy, DepthPolicy) for policy in EXAMPLES)
