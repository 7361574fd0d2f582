"""How many steps a batch can take before the host must look: none of them needs anything that is not known now.

A step's layers follow from positions alone, so a device that holds tokens, positions and block tables can decode on by
itself. The host must look again when a sequence reaches its end, or when the rows that run a layer would no longer come
first in the batch. Where someone reads along, it takes each step's tokens while the device is at the next one.
"""

from __future__ import annotations

import numpy as np

from d3engine.cache.kv_cache import IntArray
from d3engine.depth import NEVER
from d3engine.plan import Course, Reach, RunAhead
from d3engine.request.choice import Choice
from d3engine.scheduling.chunks import Chunks
from d3engine.scheduling.running import RunningTable


def longest_run(chunks: Chunks, table: RunningTable, num_steps: int, num_tokens: int) -> int:
    """Steps of a run at most: `num_steps`, or more of few rows, up to `num_tokens` tokens of all of them.

    Where a text may end an answer, which the host alone sees, little is to be computed beyond it.
    """
    if num_steps <= 1 or any(table.sequence(slot).params.stop_strings for slot in chunks.slots.tolist()):
        return num_steps
    return max(num_steps, num_tokens // chunks.slots.size)


def run_ahead(chunks: Chunks, table: RunningTable, limit: int, reach: Reach) -> RunAhead | None:
    """The steps, `limit` at most, that `chunks` (deepest first) can take on their own; None if not even one."""
    slots = chunks.slots
    if table.bridged[slots].any() and not reach.bridges:
        return None  # only the host's own executor has the maps
    if table.drafting[slots].all():
        return _draft_ahead(chunks, table, limit) if reach.drafts else None
    decode = (chunks.steps >= 1) & (chunks.stops == table.num_tokens[slots]) & (chunks.stops - chunks.starts == 1)
    # A schedule that is not nested fills the layers that it skips, so it is never simple.
    simple = (table.choice[slots] <= reach.choice) & ~table.fills[slots] & ~table.drafts[slots]
    if limit == 0 or not (decode & simple).all():
        return None
    limit = min(limit, int((table.max_length[slots] - table.num_tokens[slots]).min()))
    reports = int(np.count_nonzero(table.choice[slots] == Choice.REPORT))
    if reports:
        limit = min(limit, max(1, reach.logits // reports))
    cutoffs = table.cutoffs[slots]
    num_steps = _steps_in_order(chunks.steps, cutoffs, limit)
    choice = Choice(int(table.choice[slots].max()))
    if not num_steps:
        return None
    course = Course() if num_steps > 1 and table.streams[slots].any() else None
    return RunAhead(num_steps, chunks.steps, cutoffs, choice, course, bridges=_bridges(table, slots))


def _draft_ahead(chunks: Chunks, table: RunningTable, limit: int) -> RunAhead | None:
    """The steps of a batch in which everybody drafts, up to where the first draft is as long as it may be.

    All tokens of a draft go through the same layers. Who draws, or stops where the draft is unsure, needs the host, and
    a device knows no parts of layers.
    """
    slots = chunks.slots
    if limit == 0 or (table.choice[slots] != Choice.GREEDY).any():
        return None
    drafts = [draft for slot in slots.tolist() if (draft := table.sequence(slot).draft) is not None]
    if any(draft.stop_probability > 0 or draft.mlps is not None for draft in drafts):
        return None
    left = [draft.most - len(draft.token_ids) for draft in drafts]
    num_steps = min(limit, *left)
    # What is verified is what these steps draft, so it must be all of it.
    verifies = max(left) == num_steps and not any(draft.token_ids for draft in drafts)
    cutoffs, bridges = np.where(chunks.active, NEVER, 0), _bridges(table, slots)
    return RunAhead(num_steps, chunks.steps, cutoffs, Choice.GREEDY, verifies=verifies, bridges=bridges)


def _bridges(table: RunningTable, slots: IntArray) -> tuple[str | None, ...]:
    return tuple(map(table.bridges, slots.tolist())) if table.bridged[slots].any() else ()


def _steps_in_order(steps: IntArray, cutoffs: IntArray, limit: int) -> int:
    """For how many steps, `limit` at most, the rows that run a layer come before those that do not."""
    if (cutoffs == cutoffs[0]).all() and (steps[1:] >= steps[:-1]).all():
        return limit  # one schedule, youngest first: the order never changes
    for taken in range(limit):
        active = (steps[:, None] + taken) < cutoffs
        if (active[1:] & ~active[:-1]).any():
            return taken
    return limit


def reaching(chunks: Chunks, ahead: RunAhead) -> Chunks:
    """The chunks as they will be at the last of these steps: what the cache must have room for."""
    stops = chunks.stops + (ahead.num_steps - 1 + ahead.verifies)
    active = np.ones_like(chunks.active) if ahead.verifies else chunks.active
    return Chunks(chunks.slots, chunks.starts, stops, chunks.steps, active)
