"""Windows of a list go whole and in order, never more layers than D3 of the same alpha leaves out."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d3engine.depth import D3, NEVER, Nested
from d3engine.errors import InvalidValueError


def test_nested_windows_by_hand() -> None:
    # 8 * 0.95**i is 7.6, 7.22, 6.86, 6.52, 6.19, 5.88 at steps 1 to 6, and first below 5 at step 10.
    schedule = Nested(0.95, [[2, 4], [6, 7], [4, 5]]).schedule(8)
    assert schedule.cutoffs.tolist() == [NEVER, NEVER, 3, 3, 10, NEVER, 6, NEVER]
    assert schedule.windows() == [(2, 4), (2, 5), (6, 7)]
    assert schedule.depths(12).tolist() == [8, 8, 8, 6, 6, 6, 5, 5, 5, 5, 4, 4]
    assert Nested(1, [[2, 4]]).schedule(8).cutoffs.tolist() == [NEVER] * 8


@settings(max_examples=60)
@given(st.integers(2, 40), st.floats(0.5, 0.999), st.data())
def test_nested_windows_leave_out_no_more_than_d3(layers: int, alpha: float, data: st.DataObject) -> None:
    """Nested windows never leave out more than D3 of the same alpha."""
    ends = sorted(data.draw(st.sets(st.integers(0, layers), min_size=2, max_size=7)))
    windows = data.draw(st.permutations([[a, b] for a, b in zip(ends[::2], ends[1::2], strict=False)]))
    schedule = Nested(alpha, windows).schedule(layers)
    depths = schedule.depths(200)
    for step in (1, 2, 5, 20, 199):
        wanted = math.floor(layers * alpha**step)
        assert depths[step] >= wanted
        gone = [window for window in windows if not schedule.active(step)[window[0]]]
        assert gone == windows[: len(gone)]
        if len(gone) < len(windows):
            assert depths[step] - (windows[len(gone)][1] - windows[len(gone)][0]) < wanted
    single = Nested(alpha, [[layer, layer + 1] for layer in range(1, layers)]).schedule(layers)
    assert single.depths(200).tolist() == D3(alpha, f"1/{layers}").schedule(layers).depths(200).tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "windows",
    [[], [[3, 2]], [[2, 2]], [[1, 3], [2, 4]], [[1, 2, 3]], [[1.5, 2]], [[-1, 2]], "1:2", None, [3, 4]],
    ids=str,
)
def test_windows_that_are_none_are_refused_by_name(windows: object) -> None:
    with pytest.raises(InvalidValueError, match=r"^windows must be \(first, stop\) of windows that have no layer in"):
        Nested(0.9, windows)  # type: ignore[arg-type]


def test_windows_beyond_the_model_are_refused_by_name() -> None:
    with pytest.raises(InvalidValueError, match=r"^windows must be within the 8 layers of the model"):
        Nested(0.9, [[7, 9]]).schedule(8)
    with pytest.raises(InvalidValueError, match=r"^alpha must be "):
        Nested(1.5, [[7, 8]])
