"""EarlyExit is a full-depth schedule and a rule, and refuses what cannot work by name."""

import math

import pytest

from d3engine.depth import D3, NEVER, EarlyExit, ExitRule, FullDepth
from d3engine.errors import InvalidValueError


def test_early_exit_is_full_depth_beside_a_rule() -> None:
    policy = EarlyExit(0.8, "cosine", decay=2, min_layer=3, every=2, batch="batch_min", on_skip="copy")
    schedule = policy.schedule(8)
    assert schedule.cutoffs.tolist() == [NEVER] * 8
    assert schedule.on_skip == "copy"
    rule = policy.exit_rule(8)
    assert rule == ExitRule("cosine", 0.8, decay=2, min_layer=3, every=2, batch="batch_min")
    assert [layer for layer in range(8) if rule.checks_after(layer)] == [3, 5, 7]


def test_a_policy_has_no_exit_rule_unless_it_says_so() -> None:
    assert FullDepth().exit_rule(8) is None
    assert D3(0.9, 0.5).exit_rule(8) is None


def test_the_threshold_falls_from_t_to_nine_tenths_of_it() -> None:
    rule = ExitRule("softmax_max", 0.8)
    assert rule.threshold_at(0, 64) == 0.8
    assert rule.threshold_at(16, 64) == pytest.approx(0.72 + 0.08 * math.exp(-1))
    assert rule.threshold_at(63, 64) == pytest.approx(0.72 + 0.08 * math.exp(-4 * 63 / 64))
    falling = [rule.threshold_at(step, 64) for step in range(64)]
    assert falling == sorted(falling, reverse=True)
    assert ExitRule("softmax_max", 0.8, decay=0).threshold_at(63, 64) == 0.8


def test_early_exit_refuses_a_min_layer_beyond_the_model() -> None:
    assert EarlyExit(0.9, min_layer=7).schedule(8).num_layers == 8
    for call in (EarlyExit(0.9, min_layer=8).schedule, EarlyExit(0.9, min_layer=8).exit_rule):
        with pytest.raises(InvalidValueError, match=r"^min_layer must be .*from 0 to 7.*; got 8"):
            call(8)
