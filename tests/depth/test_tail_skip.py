"""TailSkip meets its mean to within half a layer run, with whole layers and the deeper steps first."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d3engine.depth import NEVER, TailSkip
from d3engine.errors import InvalidValueError


def test_tail_skip_by_hand() -> None:
    schedule = TailSkip(5.5, 8).schedule(10)  # 44 layer runs: 10, and 34 over 7 steps
    assert schedule.depths(12).tolist() == [10, 5, 5, 5, 5, 5, 5, 4, 4, 4, 4, 4]
    assert schedule.cutoffs.tolist() == [NEVER] * 4 + [7] + [1] * 5
    assert schedule.on_skip == "none"
    assert TailSkip(10, 8).schedule(10).cutoffs.tolist() == [NEVER] * 10
    assert TailSkip("32/3", 3).schedule(16).depths(3).tolist() == [16, 8, 8]  # type: ignore[arg-type]
    assert TailSkip(12.5, 3).schedule(16).depths(3).tolist() == [16, 11, 11]  # 37.5 runs: halves up


@settings(max_examples=80)
@given(st.integers(1, 80), st.integers(2, 600), st.floats(0, 1))
def test_tail_skip_meets_its_mean_with_the_lowest_layers_alone(layers: int, steps: int, where: float) -> None:
    lowest = (layers + steps - 1) / steps
    mean = lowest + where * (layers - lowest)
    schedule = TailSkip(mean, steps).schedule(layers)
    depths = schedule.depths(steps)
    assert abs(depths.sum() - mean * steps) <= 0.5 + 1e-6
    assert depths[0] == layers
    assert depths[1:].max() - depths[1:].min() <= 1
    for step in (1, steps - 1):
        assert schedule.active(step).tolist() == [layer < depths[step] for layer in range(layers)]


@pytest.mark.parametrize("mean", [16.1, 17, 1.6, 0.5])
def test_tail_skip_refuses_a_mean_that_the_model_does_not_reach(mean: float) -> None:
    with pytest.raises(InvalidValueError, match=r"^mean_layers must be .*from 1\.75 .* to 16"):
        TailSkip(mean, 20).schedule(16)
