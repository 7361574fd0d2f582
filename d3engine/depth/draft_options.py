"""The checks that all policies which draft share."""

from __future__ import annotations

from typing import Any

from d3engine.depth.draft_rule import MAX_DRAFT_LENGTH
from d3engine.depth.policy import DepthPolicy
from d3engine.depth.schedule import Schedule
from d3engine.errors import require, require_integer, require_number


def check_options(policy: Any) -> None:
    """Check and normalise `draft_length`, `stop_probability` and `adaptive` of a frozen policy that drafts."""
    check_draft_length(policy)
    check_stop_probability(policy)
    require(isinstance(policy.adaptive, bool), "adaptive", policy.adaptive, "True or False")


def check_draft_length(policy: Any) -> None:
    """Check and normalise `draft_length` of a frozen policy."""
    length = require_integer("draft_length", policy.draft_length, 1, MAX_DRAFT_LENGTH)
    object.__setattr__(policy, "draft_length", length)


def check_stop_probability(policy: Any) -> None:
    """The same of `stop_probability`."""
    stop = require_number("stop_probability", policy.stop_probability, 0.0, 1.0)
    object.__setattr__(policy, "stop_probability", stop)


def check_draft(draft: DepthPolicy, num_layers: int) -> Schedule:
    """The schedule of a policy that is to draft; raises `InvalidValueError` where that makes no sense.

    Verification writes the entries of all layers, so there are none to fill in. A table whose layers wake up again
    cannot be written without `on_skip`; there it stands for nothing, because a draft keeps one set of layers.
    """
    schedule = draft.schedule(num_layers)
    fills = schedule.is_nested and schedule.on_skip != "none"
    require(not fills, "on_skip", schedule.on_skip, "'none' in a draft, since verification writes all layers' entries")
    return schedule
