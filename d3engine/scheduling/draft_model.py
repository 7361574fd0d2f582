"""The scheduling of a second model that drafts: its own cache and its own progress beside the first one's.

It follows the same sequences in the same slots. While the first model computes a prompt, this one catches up with it in
pieces; when a sequence drafts, it runs what it has not seen of the accepted tokens and of the draft, and the last row
yields the draft's next token. What it has computed of rejected tokens is forgotten, and overwritten.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from d3engine.errors import require
from d3engine.scheduling.kv_cache import EntryCopies, IntArray, KVCache
from d3engine.scheduling.plan import BoolArray, DraftModelRows, Plan
from d3engine.scheduling.planner import build_plan
from d3engine.scheduling.running import Chunks, RunningTable, Trait
from d3engine.scheduling.sequence import Sequence
from d3engine.scheduling.waiting import in_turn


class DraftModelBatch:
    """Which rows the second model runs for the sequences of the `first` one's table, and their blocks in `cache`.

    One that `reads_states` of the first model runs no row before a sequence drafts, and those of drafted tokens again
    when the first model has verified them.
    """

    def __init__(self, cache: KVCache, first: RunningTable, *, reads_states: bool = False) -> None:
        self.cache = cache
        self._reads_states = reads_states
        self._first = first
        self._table = first.of_second_model(cache.num_layers)

    def check_fits(self, sequence: Sequence) -> None:
        """Refuse a sequence that could never fit this model's cache, by name of the limit."""
        needed = self.cache.num_layers * self.cache.blocks_for(sequence.max_length)
        available = self.cache.pool.num_blocks
        allowed = f"low enough for the draft model's KV cache (the sequence may need {needed} blocks of {available})"
        require(needed <= available, "max_tokens", sequence.max_tokens, allowed)

    def open(self, slot: int) -> None:
        """A sequence enters; slots are opened and closed in the same order in both caches, so they are the same."""
        opened = self.cache.open()
        assert opened == slot
        self._table.num_computed[slot] = 0

    def close(self, slot: int) -> None:
        self.cache.close(slot)

    def choose(self, slots: IntArray, budget: int) -> Chunks:
        """Rows of those among `slots` that it drafts for, in turn, `budget` at most."""
        first, table = self._first, self._table
        slots = slots[first.having(Trait.SECOND_MODEL, slots)]
        slots = np.array([sequence.slot for sequence in in_turn(map(first.sequence, slots.tolist()))], dtype=np.int64)
        starts = table.num_computed[slots]
        # A sequence that does not draft yet is followed up to its last token, which is the first to draft from.
        followed = starts if self._reads_states else first.num_tokens[slots] - 1
        stops = np.where(first.drafting[slots], first.num_tokens[slots], followed)
        lengths = np.where(self._verifies(slots), 0, np.maximum(stops - starts, 0))
        before = np.cumsum(lengths) - lengths
        lengths = np.clip(budget - before, 0, lengths)
        chosen = lengths > 0
        slots, starts, lengths = slots[chosen], starts[chosen], lengths[chosen]
        everything = np.ones((slots.size, self.cache.num_layers), dtype=bool)
        return Chunks(slots, starts, starts + lengths, table.steps(slots, starts), everything, traits=0)

    def _verifies(self, slots: IntArray) -> BoolArray:
        drafts = [self._first.sequence(slot).draft for slot in slots.tolist()]
        return np.array([draft is not None and draft.ended for draft in drafts], dtype=bool)

    def has_room(self, chunks: Chunks) -> bool:
        return int(self._missing(chunks).sum()) <= self.cache.pool.num_free

    def rows_of(self, slots: IntArray, stops: IntArray) -> DraftModelRows | None:
        """Where this model stands with the sequences in `slots`, with room for positions up to `stops`; None if there
        is not that much."""
        positions = np.minimum(self._table.num_computed[slots], self._first.num_tokens[slots] - 1)
        missing = self.cache.missing(slots, stops, np.ones((slots.size, self.cache.num_layers), dtype=bool))
        if int(missing.sum()) > self.cache.pool.num_free:
            return None
        self.cache.grow(slots, missing)
        return DraftModelRows(self.cache.tables, positions)

    def plan(self, chunks: Chunks) -> Plan | None:
        """The plan of these chunks, their blocks allocated; None if there are none."""
        if not chunks.slots.size:
            return None
        self.cache.grow(chunks.slots, self._missing(chunks))
        plan = build_plan(chunks, self._table, self.cache.tables, EntryCopies(), EntryCopies())
        return replace(plan, prompt_rows=(), captured=())  # the first model's are asked for

    def _missing(self, chunks: Chunks) -> IntArray:
        return self.cache.missing(chunks.slots, chunks.stops, chunks.active)

    def computed(self, plan: Plan) -> None:
        """Take in that a plan has run."""
        self._table.num_computed[plan.slots] = plan.stops

    def computed_to(self, slot: int, position: int) -> None:
        """Take in how far an executor that drafts by itself has come with a slot."""
        self._table.num_computed[slot] = position

    def verified(self, slot: int, num_before: int, num_tokens: int) -> None:
        """Take in that a slot has grown from `num_before` to `num_tokens` tokens: forget what it computed of others."""
        length = num_before if self._reads_states else num_tokens - 1
        self._table.num_computed[slot] = min(int(self._table.num_computed[slot]), length)
