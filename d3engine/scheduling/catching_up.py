"""Which rows come next: for every running sequence a run of the tokens that it knows and has not computed."""

from __future__ import annotations

from d3engine.cache.kv_cache import IntArray
from d3engine.request.sequence import Flow, Sequence
from d3engine.scheduling.chunks import Chunks
from d3engine.scheduling.draft_and_verify import Drafting
from d3engine.scheduling.running import RunningTable, Trait
from d3engine.scheduling.turns import in_turn

PARTS = 4
"""One flow's prompts take at most this part of a step's rows while another flow runs."""


def select_chunks(table: RunningTable, slots: IntArray, drafting: Drafting, max_rows: int) -> Chunks:
    """One chunk for every sequence in `slots` that `max_rows` reach; single tokens come first."""
    traits = table.traits_among(slots)
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
