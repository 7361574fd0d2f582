"""How many steps a batch can take before the host must look: none of them needs anything that is not known now.

A step's layers follow from positions alone, so a device that holds tokens, positions and block tables can decode on by
itself. The host must look again when a sequence reaches its end, or when the rows that run a layer would no longer come
first in the batch. Where someone reads along, it takes each step's tokens while the device is at the next one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from d3engine.cache.kv_cache import IntArray
from d3engine.plan import ExecutorCapabilities, MultiStep, RunControl
from d3engine.request.choice import SamplingMode
from d3engine.scheduling.chunks import Chunks
from d3engine.scheduling.cycles import cycles_ahead, reaching_by_cycles
from d3engine.scheduling.running import RunningTable, Trait

FOLLOWED = 4
"""Times as long as others a run may be that the host follows, and can end at any step."""


FORM_SECONDS = 0.02
"""Processor time of forms in one run at most, where it has several steps: the others of its batch wait for them."""


def steps_of_forms(chunks: Chunks, table: RunningTable) -> int:
    """Steps of a run at most for the forms of its rows to take no more than `FORM_SECONDS`; at least 1."""
    if not chunks.traits & Trait.GUIDED:
        return sys.maxsize
    constraints = (table.sequence(slot).constraint for slot in chunks.slots.tolist())
    seconds = sum(one.token_seconds for one in constraints if one is not None)
    return max(1, int(FORM_SECONDS / seconds)) if seconds else sys.maxsize


def longest_run(chunks: Chunks, table: RunningTable, num_steps: int, num_tokens: int) -> int:
    """Steps of a run at most: `num_steps`, or more of few rows, up to `num_tokens` tokens of all of them.

    Where these are not 0, and so steps are short, a run is several times as long if someone reads along: from its end
    to the next one's begin the device waits for the host. Where a text may end an answer, which the host alone sees,
    little is to be computed beyond it.
    """
    if num_steps <= 1:
        return num_steps
    slots = chunks.slots
    is_followed = bool(chunks.traits & Trait.STREAMS)
    if not is_followed and any(table.sequence(slot).params.stop_strings for slot in slots.tolist()):
        return num_steps
    return max(num_steps, num_tokens // slots.size) * (FOLLOWED if is_followed and num_tokens else 1)


def shorter_and_shorter(longest: int, shortest: int) -> Iterator[int]:
    """Steps of a run to be tried one after the other, until there is memory for them."""
    while longest > shortest:
        yield longest
        longest //= FOLLOWED
    yield shortest


def run_ahead(chunks: Chunks, table: RunningTable, limit: int, capabilities: ExecutorCapabilities) -> MultiStep | None:
    """The steps, `limit` at most, that `chunks` (deepest first) can take on their own; None if not even one.

    Chunks that all yield a token, but are not all one decoded token, are the opening of the steps behind them.
    """
    slots = chunks.slots
    bridged = chunks.traits & Trait.BRIDGED
    if bridged and not capabilities.bridges:
        return None  # only the host's own executor has the maps
    if chunks.traits & Trait.DRAFTS and table.having(Trait.DRAFTS, slots).all():
        return cycles_ahead(chunks, table, limit) if capabilities.drafts else None
    yields = chunks.stops == table.num_tokens[slots]
    choice = SamplingMode(int(table.choice[slots].max()))
    # A schedule that is not nested fills the layers that it skips, so it is never simple.
    is_simple = choice <= capabilities.choice and not chunks.traits & (Trait.FILLS | Trait.DRAFTS)
    if limit == 0 or not is_simple or not yields.all():
        return None
    opens = not ((chunks.steps >= 1) & (chunks.stops - chunks.starts == 1)).all()
    if opens and not (capabilities.openings and _may_open(chunks, table, choice)):
        return None
    limit = min(limit, int((table.max_length[slots] - table.num_tokens[slots]).min()))
    if choice is SamplingMode.REPORT:
        limit = min(
            limit, max(1, capabilities.logits // int(np.count_nonzero(table.choice[slots] == SamplingMode.REPORT)))
        )
    cutoffs = table.cutoffs[slots]
    steps = table.steps(slots, chunks.stops) if opens else chunks.steps
    num_steps = _steps_in_order(steps, cutoffs, limit - opens)
    if not num_steps:
        return None
    num_steps += opens
    control = RunControl() if num_steps > 1 and chunks.traits & Trait.STREAMS else None
    bridges = tuple(map(table.bridges, slots.tolist())) if bridged else ()
    return MultiStep(num_steps, steps, cutoffs, choice, control, bridges, opens=opens)


def _may_open(chunks: Chunks, table: RunningTable, choice: SamplingMode) -> bool:
    """Whether nothing but the last tokens is wanted of these chunks, nor needed for the choices behind them.

    Penalties and forms count the tokens before, and the one that the opening yields is not among them yet. Who reads
    along shall have it before the run takes the processor: a stream's first token came 1 to 1.6 ms later beside it.
    """
    sequences = map(table.sequence, chunks.slots.tolist())
    is_alone = choice <= SamplingMode.CUT and not chunks.traits & Trait.STREAMS
    return is_alone and all(sequence.params.prompt_logprobs is None for sequence in sequences)


def _steps_in_order(steps: IntArray, cutoffs: IntArray, limit: int) -> int:
    """For how many steps, `limit` at most, the rows that run a layer come before those that do not."""
    if (cutoffs == cutoffs[0]).all() and (steps[1:] >= steps[:-1]).all():
        return limit  # one schedule, youngest first: the order never changes
    for taken in range(limit):
        active = (steps[:, None] + taken) < cutoffs
        if (active[1:] & ~active[:-1]).any():
            return taken
    return limit


def reaching(chunks: Chunks, multi_step: MultiStep, table: RunningTable) -> Chunks:
    """The chunks as they will be at the last of these steps: what the cache must have room for."""
    if multi_step.cycles:
        return reaching_by_cycles(chunks, multi_step, table)
    stops = chunks.stops + (multi_step.num_steps - 1)
    if not multi_step.opens:
        return replace(chunks, stops=stops)
    active = multi_step.steps[:, None] < multi_step.cutoffs
    return replace(chunks, starts=chunks.stops, stops=stops, steps=multi_step.steps, active=active)
