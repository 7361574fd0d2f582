"""Hypothesis draws of everything a sequence may run by: schedules, exits, drafts."""

from fractions import Fraction
from typing import Any

import numpy as np
from hypothesis import strategies as st
from plan_checks import token_at

from d3engine.depth import (
    D3,
    NEVER,
    DepthPolicy,
    EarlyExit,
    ExitRule,
    FullDepth,
    LayerTable,
    Schedule,
    SkipDecode,
    TailSkip,
    UnifiedSkip,
)
from d3engine.depth.policy import DraftRule
from d3engine.scheduling.sequence import Proposal, Sequence


def guess(sequence: Sequence) -> Proposal:
    """What drafts: mostly right, now and then wrong, seldom of no use."""
    assert sequence.draft is not None
    step = sequence.step + len(sequence.draft.token_ids)
    chance = (sequence.arrival * 7 + step * 5 + sequence.step) % 13
    return Proposal(None if chance == 0 else (token_at(sequence, step) + (chance < 4)) % 7)


def judged(sequence: Sequence) -> list[int]:
    """What verification makes of a draft: its tokens as long as they are right, and one more."""
    tokens = []
    for drafted in [*(sequence.draft.token_ids if sequence.draft else []), None]:
        tokens.append(token_at(sequence, sequence.step + len(tokens)))
        if drafted != tokens[-1]:
            break
    return tokens


@st.composite
def draft_rules(draw: st.DrawFn, num_layers: int) -> DraftRule:
    """Drafts by every policy, nested or not, and by parts of layers; those that keep hidden states by D3."""
    length, adaptive = draw(st.integers(1, 4)), draw(st.booleans())
    if draw(st.booleans()):
        alpha, start = draw(st.sampled_from([0.3, 0.8])), draw(st.sampled_from([0.2, 0.5, 0.8]))
        return DraftRule(length, adaptive=adaptive, schedule=D3(alpha, start).schedule(num_layers), resumes=True)
    if draw(st.booleans()):
        parts = [draw(st.lists(st.sampled_from([1, NEVER]), min_size=num_layers, max_size=num_layers)) for _ in "am"]
        attention, mlps = map(Schedule.nested, parts)
        return DraftRule(length, schedule=attention, mlp_schedule=mlps, target_acceptance=0.7)
    return DraftRule(length, adaptive=adaptive, schedule=draw(schedules(num_layers)))


@st.composite
def ways(draw: st.DrawFn, num_layers: int) -> tuple[Schedule, ExitRule | None]:
    """A schedule alone, or full depth with a rule by which tokens leave early."""
    if draw(st.sampled_from([True, False, False])):
        batch, on_skip = draw(st.sampled_from(["per_row", "batch_min"])), draw(st.sampled_from(["copy", "project"]))
        lowest, every = draw(st.integers(0, num_layers - 1)), draw(st.integers(1, 3))
        policy = EarlyExit(0.5, min_layer=min(lowest, 2), every=every, batch=batch, on_skip=on_skip)
        return policy.schedule(num_layers), policy.exit_rule(num_layers)
    return draw(schedules(num_layers)), None


@st.composite
def schedules(draw: st.DrawFn, num_layers: int) -> Schedule:
    """Every policy under every rule for skipped entries; "copy" only where layer 0 always runs."""
    on_skip = draw(st.sampled_from(["copy", "none", "project", "copy"]))
    kind = draw(st.sampled_from(["table", "d3", "table", "skipdecode", "table", "unified", "d3", "full", "tail"]))
    policy: DepthPolicy
    if kind == "d3":
        alpha, start = draw(st.sampled_from([0.3, 0.6, 0.8, 0.95])), draw(st.sampled_from([0.2, 0.5, 0.8]))
        tail = draw(st.integers(0, num_layers - int(start * num_layers)))
        on_skip = "none" if on_skip == "copy" and start * num_layers < 1 else on_skip
        policy = D3(alpha, start, tail=tail, on_skip=on_skip)
    elif kind == "skipdecode":
        warmup = draw(st.integers(1 if on_skip == "copy" else 0, num_layers))
        low = draw(st.integers(max(warmup, 1), num_layers))
        policy = SkipDecode(draw(st.integers(2, 12)), low, warmup=warmup, on_skip=on_skip)
    elif kind == "unified":
        policy = UnifiedSkip(draw(st.sampled_from([1.0, 1.4] if num_layers == 3 else [1.0, 1.4, 2.0])), on_skip=on_skip)
        if num_layers == 2 or (num_layers == 3 and policy.speedup > 1.0):
            policy = UnifiedSkip(1.0, on_skip=on_skip)
    elif kind == "tail":
        steps = draw(st.integers(2, 12))
        runs = draw(st.integers(num_layers + steps - 1, num_layers * steps))
        policy = TailSkip(Fraction(runs, steps), steps, on_skip=on_skip)
    elif kind == "table":
        fixed = [True] if on_skip == "copy" else []
        flags = st.lists(st.booleans(), min_size=num_layers - len(fixed), max_size=num_layers - len(fixed))
        rows = draw(st.lists(flags.map(lambda row: fixed + row), min_size=2, max_size=8))
        repeats: list[Any] = [row for row in rows for _ in range(draw(st.integers(1, 3)))]
        policy = LayerTable([[True] * num_layers, *repeats], on_skip="project" if on_skip == "none" else on_skip)
        if on_skip == "none":
            policy = LayerTable(list(np.minimum.accumulate(policy.active).astype(bool)), on_skip="none")
    else:
        policy = FullDepth()
    return policy.schedule(num_layers)
