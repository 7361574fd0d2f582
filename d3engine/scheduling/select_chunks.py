"""The prefix cache as sequences use it: whose prompt may begin with what others have computed, and what theirs adds."""

from __future__ import annotations

import numpy as np

from d3engine.request.engine_request import Flow
from d3engine.scheduling.kv_cache import IntArray
from d3engine.scheduling.plan import Plan
from d3engine.scheduling.prefix_cache import PrefixCache, Salt
from d3engine.scheduling.running import Chunks, RunningTable, Trait
from d3engine.scheduling.sequence import Sequence
from d3engine.scheduling.speculative import Drafting
from d3engine.scheduling.waiting import in_turn


class SharedPrompts:
    """Finds and keeps the prompts' blocks of one prefix cache, each under its sequence's `cache_salt`."""

    def __init__(self, prefix_cache: PrefixCache, block_size: int) -> None:
        self._cache = prefix_cache
        self._size = block_size
        self._named: tuple[list[int], Salt, list[bytes]] = [], None, []

    def name(self, sequence: Sequence) -> None:
        """Give a sequence that may share its prompt the keys of its blocks."""
        if sequence.shares_prompt:
            prompt, salt = sequence.prompt_token_ids, sequence.cache_salt
            if self._named[0] is not prompt or self._named[1] != salt:  # the sequences of a request come together
                self._named = prompt, salt, self._cache.keys(_prompt(sequence), salt)
            sequence.prefix_keys = self._named[2]

    def match(self, sequence: Sequence) -> IntArray:
        """Blocks [n, L] that its prompt begins with; n is 0 for one without keys."""
        prompt = np.array(sequence.sharable_prompt, dtype=np.int32)
        return self._cache.match(prompt, sequence.prefix_keys, sequence.cache_salt)

    def keep(self, plan: Plan) -> None:
        """Offer the prompt blocks that a step has filled to later prompts."""
        for chunk in (plan.starts < plan.prompt_lengths).nonzero()[0].tolist():
            sequence = plan.sequences[chunk]
            if sequence.prefix_keys:
                first, last = int(plan.starts[chunk]) // self._size, int(plan.stops[chunk]) // self._size
                keys, salt = sequence.prefix_keys, sequence.cache_salt
                self._cache.insert(_prompt(sequence), keys, sequence.slot, first, last, salt)


def _prompt(sequence: Sequence) -> IntArray:
    return np.array(sequence.prompt_token_ids, dtype=np.int32)


PARTS = 4
"""One flow's prompts take at most this part of a step's rows while another flow runs."""


def select_chunks(table: RunningTable, slots: IntArray, drafting: Drafting, max_rows: int) -> Chunks:
    """One chunk for every sequence in `slots` that `max_rows` reach; single tokens come first."""
    traits = int(np.bitwise_or.reduce(table.traits[slots]))
    if traits & Trait.DRAFTS:
        drafting.begin(slots)
        slots = slots[~(table.drafting[slots] & table.having(Trait.SECOND_MODEL, slots))]
    starts = table.num_computed[slots]
    lengths = table.num_tokens[slots] - starts
    longer = (lengths > 1).nonzero()[0]
    if longer.size:
        budget = max_rows - (slots.size - longer.size)
        place_of = {table.sequence(int(slots[place])): place for place in longer.tolist()}
        left: dict[Flow, int] = {}
        share = _share_of_flow(table, slots, max_rows)
        # In turn, so that the sequence that is never preempted has rows: a step without rows would be the end.
        for sequence in in_turn(place_of):
            place, own = place_of[sequence], left.get(sequence.flow, share)
            lengths[place] = _length_within(budget, own, table, sequence, drafting)
            budget -= int(lengths[place])
            left[sequence.flow] = own - int(lengths[place])
        chosen = lengths > 0
        slots, starts, lengths = slots[chosen], starts[chosen], lengths[chosen]
    steps = table.steps(slots, starts)
    return Chunks(slots, starts, starts + lengths, steps, table.active(slots, steps, traits), traits)


def _share_of_flow(table: RunningTable, slots: IntArray, max_rows: int) -> int:
    """Rows of a step that the sequences of one flow may catch up by: few enough to keep steps short for the others."""
    first, *others = (table.sequence(slot).flow for slot in slots.tolist())
    return max_rows if all(flow == first for flow in others) else max(1, max_rows // PARTS)


def _length_within(budget: int, share: int, table: RunningTable, sequence: Sequence, drafting: Drafting) -> int:
    """How many tokens of a sequence that has to catch up come next; a draft is verified whole or later."""
    length = _run_length(table, sequence, drafting)
    if sequence.draft is not None and sequence.draft.ended:
        return length if length <= budget else 0
    return min(length, budget, max(share, 0))


def _run_length(table: RunningTable, sequence: Sequence, drafting: Drafting) -> int:
    """How many of the tokens to catch up with come next in the prompt, or run the same layers."""
    computed = int(table.num_computed[sequence.slot])
    prompt = len(sequence.prompt_token_ids)
    if computed < prompt:
        return prompt - computed
    if sequence.draft is not None:
        return drafting.run_length(sequence)
    step = computed - prompt + 1
    return min(sequence.num_tokens - computed, sequence.same_layers_until(step) - step)
