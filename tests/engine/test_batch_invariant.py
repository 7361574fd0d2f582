"""`batch_invariant=True` on a CPU: the same bits by the native library, and what would take others along is refused."""

from typing import Any

import pytest
from bad_values import assert_refused
from fixture_types import MakeEngine

from d3engine import D3, DraftAndVerify, EarlyExit, Engine, InvalidValueError, SamplingParams
from d3engine.depth import DepthPolicy


@pytest.mark.parametrize(
    ("policy", "allowed"),
    [
        (EarlyExit(0.9, on_skip="copy"), "without early exits"),
        (D3(0.9, 0.5, on_skip="project"), 'with on_skip="none" or "copy"'),
        (DraftAndVerify(skip_mlp=(3,)), "one whose own layers draft nothing"),
    ],
)
def test_policy_run_by_pytorch_is_refused(make_engine: MakeEngine, policy: DepthPolicy, allowed: str) -> None:
    """A policy that PyTorch would run is refused in a request and in an engine."""
    engine = make_engine(batch_invariant=True)
    with assert_refused("depth", "batch_invariant=True") as caught:
        engine.generate([1, 2], SamplingParams(depth=policy), use_tqdm=False)
    assert allowed in caught.value.allowed
    with pytest.raises(InvalidValueError, match=r"batch_invariant=True"):
        make_engine(batch_invariant=True, depth=policy)


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        ({"enforce_eager": True}, "False on a CPU without the native library"),
        ({"dtype": "bfloat16"}, "False on a CPU without the native library"),
        ({"backend": "torch"}, "False on a CPU without the native library"),
    ],
)
def test_engine_without_a_fixed_order_of_sums_is_refused(
    make_engine: MakeEngine, arguments: dict[str, Any], allowed: str
) -> None:
    """An engine whose sums have no fixed order is refused by name."""
    with pytest.raises(InvalidValueError) as caught:
        make_engine(batch_invariant=True, **arguments)
    assert (caught.value.field, caught.value.value) == ("batch_invariant", True)
    assert caught.value.allowed.startswith(allowed)


def test_ranks_without_a_fixed_order_of_sums_are_refused() -> None:
    """Ranks whose sums have no fixed order are refused by name."""
    with pytest.raises(InvalidValueError, match=r"batch_invariant must be False beside tensor_parallel_size=2, .*True"):
        Engine("demo", batch_invariant=True, tensor_parallel_size=2, device="cpu")


def test_the_switch_is_true_or_false(make_engine: MakeEngine) -> None:
    with pytest.raises(InvalidValueError, match=r"batch_invariant must be True or False; got 'yes'"):
        make_engine(batch_invariant="yes")
