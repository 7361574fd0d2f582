"""Blocks that the chunks of a step need, and that sequences no longer do; by arithmetic
over all sequences where skipped layers leave no entry."""

from __future__ import annotations

from bisect import bisect_right
from functools import partial

import numpy as np

from d3engine.depth import NEVER, Schedule
from d3engine.scheduling.kv_cache import NO_BLOCK, EntryCopies, FlatCopies, IntArray, KVCache, fill, most_blocks_needed
from d3engine.scheduling.running import Chunks, RunningTable, Trait


class Allocator:
    """Blocks for the running sequences of one table in one cache."""

    def __init__(self, cache: KVCache, table: RunningTable) -> None:
        self._cache = cache
        self._table = table

    def missing(self, chunks: Chunks) -> tuple[IntArray, int]:
        """Blocks [C, L] that the chunks' layers lack, and how many blocks to have free: these, and for copy-on-skip
        an upper bound of what it may take."""
        missing = self._cache.missing(chunks.slots, chunks.stops, chunks.active)
        most_to_fill = 0
        for c in self._filled(chunks):  # apart
            missing[c] = 0
            slot, start, stop = int(chunks.slots[c]), int(chunks.starts[c]), int(chunks.stops[c])
            most_to_fill += most_blocks_needed(self._cache, slot, start, stop)
        return missing, int(missing.sum()) + most_to_fill

    def allocate(self, chunks: Chunks, missing: IntArray) -> tuple[FlatCopies, FlatCopies]:
        """Give every chunk its blocks; returns the entries to copy before and after the step."""
        self._cache.grow(chunks.slots, missing)
        before, after = EntryCopies(), EntryCopies()
        for chunk in self._filled(chunks):
            self._fill(chunks, chunk, before, after)
        return before.arrays(), after.arrays()

    def _filled(self, chunks: Chunks) -> list[int]:
        """The chunks whose skipped layers get entries."""
        if not chunks.traits & Trait.FILLS:
            return []
        filled: list[int] = self._table.having(Trait.FILLS, chunks.slots).nonzero()[0].tolist()
        return filled

    def _fill(self, chunks: Chunks, chunk: int, before: EntryCopies, after: EntryCopies) -> None:
        slot, active = int(chunks.slots[chunk]), chunks.active[chunk]
        start, stop = int(chunks.starts[chunk]), int(chunks.stops[chunk])
        if self._table.sequence(slot).schedule.on_skip == "copy":
            fill(self._cache, slot, start, stop, active, before, after)
        else:  # "project": skipped layers hold entries of their own
            slots, everywhere = np.array([slot]), np.ones((1, active.size), dtype=bool)
            self._cache.grow(slots, self._cache.missing(slots, np.array([stop]), everywhere))

    def free_sleeping_layers(self, slots: IntArray) -> None:
        """Give back the blocks of layers that no later step of their sequence will run."""
        table = self._table
        for slot in slots[table.num_computed[slots] >= table.frees_at[slots]].tolist():
            if table.sequences[slot] is None:
                continue  # it ended with this step, and has given back everything
            step = int(table.num_computed[slot] - table.prompt_length[slot]) + 1
            cutoffs = table.cutoffs[slot]
            self._cache.free_layers(slot, (cutoffs <= step).nonzero()[0])
            table.frees_at[slot] = table.computed_before(slot, int(cutoffs[cutoffs > step].min(initial=NEVER)))

    def free_behind_windows(self, slots: IntArray) -> None:
        """Give back the blocks of layers with a window that no later row of their sequence attends to."""
        table, positions = self._table, self._table.num_computed[slots]
        if self._cache.has_windows:
            for place in table.having(Trait.DRAFTS, slots).nonzero()[0].tolist():
                sequence = table.sequences[slots[place]]
                if sequence is not None:  # whose draft is ahead of what is verified, and may be rejected
                    positions[place] = min(positions[place], sequence.num_tokens - 1)
            self._cache.free_behind(slots, positions)

    def num_promised(self, slot: int) -> int:
        """Blocks that a slot still lacks, at most, to compute all tokens it knows; 0 once it only decodes."""
        known, computed = int(self._table.num_tokens[slot]), int(self._table.num_computed[slot])
        if computed + 1 >= known and computed >= self._table.prompt_length[slot]:
            return 0
        return int(np.maximum(self._cache.blocks_for(known) - self._cache.num_blocks[slot], 0).sum())

    def saved(self, slot: int) -> int:
        """Blocks that a slot would hold in addition if every layer had run for every token; a draft saves none."""
        traits = int(self._table.traits[slot])
        if traits & Trait.DRAFTS:
            return 0
        length = self._cache.blocks_for(int(self._table.num_computed[slot]))
        whole = length * self._cache.num_layers
        if not traits & Trait.FILLS:  # no block stands for two layers
            return whole - int(np.minimum(self._cache.num_blocks[slot], length).sum())
        blocks = self._cache.tables[slot, :, :length]  # beyond it lies what a run ahead has not come to
        behind = int(self._cache.num_behind[slot].sum())  # given back, whatever the schedule
        return whole - behind - int(np.unique(blocks[blocks != NO_BLOCK]).size)


def peak_blocks(schedule: Schedule, prompt_length: int, max_length: int, cache: KVCache) -> int:
    """The most blocks that a sequence holds at once on its way from the prompt to `max_length` tokens.

    The last token generated is never fed, so `max_length - 1` entries are the most. Under a schedule that leaves no
    entry in skipped layers, the peak stands just before some layers give theirs back.
    """
    last_step = max_length - prompt_length - 1
    if schedule.on_skip != "none":
        return cache.num_layers * cache.blocks_for(max_length - 1)
    ends = {0, max(last_step, 0)} | {int(c) - 1 for c in schedule.cutoffs if c - 1 <= last_step}
    return max(schedule.depth_at(step) * cache.blocks_for(prompt_length + step) for step in ends)


def longest_that_fits(schedule: Schedule, prompt_length: int, most: int, cache: KVCache) -> int:
    """The greatest max_length up to `most` that the whole cache has room for; at least one token more than the prompt,
    even where there is room for none.
    """
    needed, there = partial(peak_blocks, schedule, prompt_length, cache=cache), cache.pool.num_blocks
    if needed(most) <= there:
        return most
    lengths = range(prompt_length + 1, most)
    return prompt_length + max(1, bisect_right(lengths, there, key=needed))
