"""The figures of the D3 paper's tables follow from its schedules; the KV count agrees with a simulation."""

import numpy as np
import pytest
from bad_values import assert_refused
from hypothesis import given
from hypothesis import strategies as st

from d3engine.depth import D3, NEVER, FullDepth, Schedule, UnifiedSkip
from d3engine.depth.statistics import (
    LLAMA2_7B,
    LLAMA2_13B,
    LLAMA2_70B,
    LLAMA2_BY_LAYERS,
    ModelShape,
    flops_ratio,
    kv_saved,
    layer_bound,
    mean_depth,
)


def ratio(policy: D3, shape: ModelShape, num_steps: int) -> float:
    mean = mean_depth(policy.schedule(shape.num_layers), num_steps)
    return flops_ratio(mean, shape.num_layers, shape.layer_parameters, shape.head_parameters)


@pytest.mark.parametrize(
    ("shape", "start", "expected"), [(LLAMA2_7B, 0.6, 1.648), (LLAMA2_13B, 0.5, 1.943), (LLAMA2_70B, 0.6, 1.648)]
)
def test_flops_ratios_on_bbh(shape: ModelShape, start: float, expected: float) -> None:
    assert ratio(D3(alpha=0.9, start=start), shape, 200) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize(("shape", "expected"), [(LLAMA2_7B, 1.069), (LLAMA2_13B, 1.065), (LLAMA2_70B, 1.059)])
def test_flops_ratios_on_gsm8k(shape: ModelShape, expected: float) -> None:
    assert ratio(D3(alpha=0.9999, start=0.7), shape, 1024) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize(
    ("shape", "norms_and_embeddings", "published"),
    [
        (LLAMA2_7B, 32000 * 4096 + 65 * 4096, 6_738_415_616),
        (LLAMA2_13B, 32000 * 5120 + 81 * 5120, 13_015_864_320),
        (LLAMA2_70B, 32000 * 8192 + 161 * 8192, 68_976_648_192),
    ],
)
def test_llama_2_shapes_have_published_parameters(shape: ModelShape, norms_and_embeddings: int, published: int) -> None:
    """The Llama 2 shapes have the published numbers of parameters."""
    matrices = shape.num_layers * shape.layer_parameters + shape.head_parameters
    assert matrices + norms_and_embeddings == published
    assert LLAMA2_BY_LAYERS[shape.num_layers] is shape


def test_kv_size_counts_the_kv_heads_alone() -> None:
    assert LLAMA2_7B.kv_size == 4096
    assert LLAMA2_70B.kv_size == 8 * 128


def test_full_depth_gains_nothing() -> None:
    schedule = FullDepth().schedule(32)
    assert mean_depth(schedule, 100) == 32
    assert flops_ratio(32, 32, 10, 7) == 1
    assert layer_bound([32, 32], num_layers=32, layer_size=10, head_size=7) == 1
    saved = kv_saved(schedule, 10, 100)
    assert (saved.fraction, saved.mean_fraction, saved.bytes_saved) == (0, 0, 0)
    assert saved.entries_held == saved.entries_full == 32 * (10 + 99)


def test_the_layer_bound_sums_over_the_tokens_really_generated() -> None:
    # Two tokens of 4 and 1 layers, 10 bytes per layer, 5 for the head: 2 * 45 over (45 + 15).
    assert layer_bound([4, 1], num_layers=4, layer_size=10, head_size=5) == pytest.approx(90 / 60)
    assert layer_bound([4], num_layers=4, layer_size=10, head_size=5) == 1


@given(st.lists(st.integers(0, 32), min_size=1, max_size=50))
def test_layer_bound_of_a_run_is_the_flops_ratio_at_its_mean(depths: list[int]) -> None:
    """The layer bound of a run is the flops ratio at its mean depth."""
    bound = layer_bound(depths, num_layers=32, layer_size=13, head_size=8)
    assert bound == pytest.approx(flops_ratio(float(np.mean(depths)), 32, 13, 8))


def test_kv_of_a_layer_past_its_cutoff_goes_with_its_prompt() -> None:
    """KV of a layer goes with its prompt once its cutoff has passed."""
    saved = kv_saved(Schedule.nested([NEVER, 2, 1, NEVER]), prompt_tokens=5, generated_tokens=3, bytes_per_entry=8)
    # Steps 0, 1, 2 hold 5, 6, 7 entries at each of 4, 3, 2 layers.
    assert saved.entries_full == 4 * 7
    assert saved.entries_held == 2 * 7
    assert saved.fraction == 0.5
    assert saved.bytes_saved == 14 * 8
    assert saved.mean_fraction == pytest.approx(1 - (4 * 5 + 3 * 6 + 2 * 7) / (4 * (5 + 6 + 7)))


@given(
    st.lists(st.one_of(st.integers(1, 12), st.just(NEVER)), min_size=1, max_size=6),
    st.integers(1, 9),
    st.integers(1, 12),
)
def test_the_kv_count_agrees_with_a_simulated_cache(cutoffs: list[int], prompt: int, tokens: int) -> None:
    schedule = Schedule.nested(cutoffs)
    held: list[list[int]] = [[] for _ in cutoffs]
    totals = []
    for step in range(tokens):
        fed = list(range(prompt)) if step == 0 else [prompt + step - 1]
        for layer, runs in enumerate(schedule.active(step)):
            held[layer] = held[layer] + fed if runs else []
        totals.append(sum(map(len, held)))
    full = [len(cutoffs) * (prompt + step) for step in range(tokens)]
    saved = kv_saved(schedule, prompt, tokens)
    assert (saved.entries_held, saved.entries_full) == (totals[-1], full[-1])
    assert saved.fraction == pytest.approx(1 - totals[-1] / full[-1])
    assert saved.mean_fraction == pytest.approx(1 - sum(totals) / sum(full))


def test_kept_entries_save_nothing() -> None:
    for on_skip in ("copy", "project"):
        saved = kv_saved(D3(0.9, 0.6, on_skip=on_skip).schedule(32), 10, 50)  # type: ignore[arg-type]
        assert saved.fraction == saved.mean_fraction == 0
    assert kv_saved(UnifiedSkip(2).schedule(32), 10, 50).fraction == 0.5


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: mean_depth(FullDepth().schedule(4), 0), "num_steps"),
        (lambda: flops_ratio(33, 32, 1, 1), "mean_depth"),
        (lambda: layer_bound([], num_layers=4, layer_size=1, head_size=1), "depths"),
        (lambda: layer_bound([5], num_layers=4, layer_size=1, head_size=1), "depths"),
        (lambda: kv_saved(FullDepth().schedule(4), 0, 5), "prompt_tokens"),
        (lambda: kv_saved(FullDepth().schedule(4), 5, 0), "generated_tokens"),
        (lambda: kv_saved(FullDepth().schedule(4), 5, 5, 0), "bytes_per_entry"),
        (lambda: ModelShape(1, 2, 3, 4, 5, 0, 7), "num_kv_heads"),
    ],
)
def test_figures_of_nothing_are_refused_by_name(call: object, field: str) -> None:
    with assert_refused(field):
        call()  # type: ignore[operator]
