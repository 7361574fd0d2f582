"""The scheduling of a second model that drafts: its own cache and its own progress beside the first one's.

It follows the same sequences in the same slots. While the first model computes a prompt, this one catches up with it in
pieces; when a sequence drafts, it runs what it has not seen of the accepted tokens and of the draft, and the last row
yields the draft's next token. What it has computed of rejected tokens is forgotten, and overwritten.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from d3engine.errors import require
from d3engine.scheduling.kv_cache import IntArray, KVCache
from d3engine.scheduling.plan import BoolArray, DraftModelRows, DraftWork, Plan
from d3engine.scheduling.planner import build_plan
from d3engine.scheduling.running import Chunks, RunningTable, Trait
from d3engine.scheduling.sampling_mode import SamplingMode, choice_of_token
from d3engine.scheduling.sequence import Sequence
from d3engine.scheduling.waiting import in_turn


class DraftModelBatch:
    """Which rows the second model runs for the sequences of the `first` one's table, and their blocks in `cache`.

    One that `reads_states` of the first model runs no row before a sequence drafts, and those of drafted tokens again
    when the first model has verified them. Behind `draft_rows` rows of a step at most it drafts without the host.
    """

    def __init__(self, cache: KVCache, first: RunningTable, *, reads_states: bool = False, draft_rows: int = 0) -> None:
        self.cache = cache
        self._draft_rows = draft_rows
        self._reads_states = reads_states
        self._first = first
        self._table = first.of_second_model(cache.num_layers)

    def check_fits(self, sequence: Sequence) -> None:
        """Refuse a sequence that could never fit this model's cache, by name of the limit."""
        needed = self.cache.num_layers * self.cache.blocks_for(sequence.max_length - 1)  # the last token is never fed
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
        drafts = (first.sequence(slot).draft for slot in slots.tolist())
        waits: BoolArray = np.array([draft is not None and draft.ended for draft in drafts], dtype=bool)
        if self._draft_rows and waits.any():  # then all draft together from the next step on
            waits |= first.drafting[slots]
        lengths = np.where(waits, 0, np.maximum(stops - starts, 0))
        before = np.cumsum(lengths) - lengths
        lengths = np.clip(budget - before, 0, lengths)
        chosen = lengths > 0
        slots, starts, lengths = slots[chosen], starts[chosen], lengths[chosen]
        everything = np.ones((slots.size, self.cache.num_layers), dtype=bool)
        return Chunks(slots, starts, starts + lengths, table.steps(slots, starts), everything, traits=0)

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

    def add_to(self, plan: Plan, chunks: Chunks) -> Plan:
        """A step of the first model with the plan of these chunks, their blocks allocated."""
        if not chunks.slots.size:
            return plan
        lengths = self._lengths(chunks)
        reach = chunks if lengths is None else _reaching(chunks, lengths)
        self.cache.grow(chunks.slots, self._missing(reach))
        own = build_plan(chunks, self._table, self.cache.tables)
        own = replace(own, prompt_rows=(), captured=())  # the first model's are asked for
        drafts = plan.drafts or DraftWork(frozenset(), {})
        return replace(
            plan, drafts=replace(drafts, model=own, lengths=None if lengths is None else lengths[own.sampled])
        )

    def _lengths(self, chunks: Chunks) -> IntArray | None:
        """Int [C]: the tokens that are left to draft behind each chunk, 0 where none is.

        None where the host is to choose the first of them: it alone chooses so, may end a draft there, or has no room
        for more.
        """
        drafts = chunks.stops == self._table.num_tokens[chunks.slots]
        if not drafts.any() or int((chunks.stops - chunks.starts).sum()) > self._draft_rows:
            return None
        lengths = np.zeros(chunks.slots.size, dtype=np.int64)
        for chunk in drafts.nonzero()[0].tolist():
            sequence = self._first.sequence(int(chunks.slots[chunk]))
            draft = sequence.draft
            assert draft is not None
            if draft.stop_probability > 0 or choice_of_token(sequence) > SamplingMode.PENALISE:
                return None
            lengths[chunk] = draft.most - len(draft.token_ids)
        return lengths if self.has_room(_reaching(chunks, lengths)) else None

    def verified_at_once(self, chunks: Chunks) -> Chunks | None:
        """The first model's chunks that verify what all of these draft in the same step; None where the host must see
        the drafts first: for rows that it chooses tokens for, or that are no drafts, or too many."""
        lengths, slots, first = self._lengths(chunks), chunks.slots, self._first
        if lengths is None or not lengths.all() or first.choice[slots].max() > SamplingMode.CUT:
            return None
        starts = np.array([first.sequence(slot).num_tokens - 1 for slot in slots.tolist()])
        stops = first.num_tokens[slots] + lengths
        if int((stops - starts).sum()) > self._draft_rows:
            return None
        everything = np.ones((slots.size, first.cutoffs.shape[1]), dtype=bool)
        return Chunks(slots, starts, stops, first.steps(slots, starts), everything, traits=0)

    def _missing(self, chunks: Chunks) -> IntArray:
        return self.cache.missing(chunks.slots, chunks.stops, chunks.active)

    def computed(self, drafts: DraftWork) -> None:
        """Take in that the plan of this model has run, and what it has drafted without the host."""
        plan = drafts.model
        assert plan is not None
        self._table.num_computed[plan.slots] = plan.stops
        if drafts.lengths is not None:
            self._table.num_computed[plan.slots[plan.sampled]] += drafts.lengths - 1

    def computed_to(self, slot: int, position: int) -> None:
        """Take in how far an executor that drafts by itself has come with a slot."""
        self._table.num_computed[slot] = position

    def verified(self, slot: int, num_before: int, num_tokens: int) -> None:
        """Take in that a slot has grown from `num_before` to `num_tokens` tokens: forget what it computed of others."""
        length = num_before if self._reads_states else num_tokens - 1
        self._table.num_computed[slot] = min(int(self._table.num_computed[slot]), length)


def _reaching(chunks: Chunks, lengths: IntArray) -> Chunks:
    """The chunks with the drafted tokens that are fed behind them: all but the last."""
    return replace(chunks, stops=chunks.stops + np.maximum(lengths - 1, 0))
