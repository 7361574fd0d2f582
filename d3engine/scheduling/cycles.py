"""Drafts and their verifications that a device takes by itself, cycle after cycle, as others take steps.

A greedy draft asks nothing of the host: which layers it runs and how long it is follow from where it begins and from
how many tokens were accepted before, and whether full depth takes its tokens is seen on the device. So a run of cycles
ends where the host must look anyway. It may begin in the middle of drafts, which every sequence is at a place of its
own in.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from d3engine.depth import NEVER
from d3engine.plan import MultiStep, RunControl
from d3engine.request.choice import SamplingMode
from d3engine.request.sequence import Sequence
from d3engine.scheduling.chunks import Chunks
from d3engine.scheduling.running import RunningTable, Trait


def cycles_ahead(chunks: Chunks, table: RunningTable, limit: int) -> MultiStep | None:
    """The cycles that the sequences of `chunks`, which all draft, can take on their own; None if not even one.

    They are no more than yield `limit` tokens, but at least one. Who draws, or stops where a draft is unsure, needs the
    host, and a device knows neither parts of layers nor another model.
    """
    slots = chunks.slots
    is_beyond = table.having(Trait.SPLITS_LAYERS | Trait.SECOND_MODEL, slots)
    needs_host = is_beyond | (table.choice[slots] != SamplingMode.GREEDY)
    sequences = [table.sequence(slot) for slot in slots.tolist()]
    if limit <= 1 or needs_host.any() or not all(_draws_a_line(sequence, table) for sequence in sequences):
        return None
    rules = [sequence.draft.rule for sequence in sequences if sequence.draft is not None]
    schedules = [rule.schedule for rule in rules if rule.schedule is not None]
    longest = max(rule.length for rule in rules)
    num_cycles = min(max(1, limit // (longest + 1)), max(sequence.room for sequence in sequences))
    cutoffs = np.array([schedule.cutoffs for schedule in schedules])
    for row, schedule in enumerate(schedules):
        if not schedule.is_nested:  # which layers the next draft runs is not a matter of cutoffs
            cutoffs[row], num_cycles = np.where(table.draft_layers[slots[row]], NEVER, 0), 1
    control = RunControl() if num_cycles > 1 and chunks.traits & Trait.STREAMS else None
    steps = np.array([sequence.step for sequence in sequences])
    bridges = tuple(schedule.bridges for schedule in schedules) if chunks.traits & Trait.BRIDGED else ()
    return MultiStep(num_cycles, steps, cutoffs, SamplingMode.GREEDY, control, bridges, cycles=True)


def _draws_a_line(sequence: Sequence, table: RunningTable) -> bool:
    """Whether all that the answer has is computed but its last token and what is drafted behind it."""
    draft = sequence.draft
    assert draft is not None
    known = sequence.step >= 1 and table.num_computed[sequence.slot] >= sequence.num_tokens - 1
    return bool(known and draft.stop_probability == 0 and draft.rule.target_acceptance is None)


def at_last_tokens(chunks: Chunks, table: RunningTable) -> Chunks:
    """The chunks of the answers' last tokens, where cycles begin."""
    sequences = [table.sequence(slot) for slot in chunks.slots.tolist()]
    starts = np.array([sequence.num_tokens - 1 for sequence in sequences])
    steps = np.array([sequence.step for sequence in sequences])
    return replace(chunks, starts=starts, stops=starts + 1, steps=steps)


def reaching_by_cycles(chunks: Chunks, multi_step: MultiStep, table: RunningTable) -> Chunks:
    """The chunks as long as they may be when these cycles are over, at every layer."""
    sequences = [table.sequence(slot) for slot in chunks.slots.tolist()]
    most = [
        min(multi_step.num_steps * (sequence.draft.rule.length + 1), sequence.room)
        for sequence in sequences
        if sequence.draft is not None
    ]
    begin = at_last_tokens(chunks, table)
    return replace(begin, stops=begin.starts + np.array(most), active=np.ones_like(chunks.active))
