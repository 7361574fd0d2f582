"""Which rows come next: for every running sequence a run of the tokens that it knows and has not computed."""

from __future__ import annotations

from d3engine.cache.kv_cache import IntArray
from d3engine.request.sequence import Sequence
from d3engine.scheduling.chunks import Chunks
from d3engine.scheduling.draft_and_verify import Drafting
from d3engine.scheduling.running import RunningTable, Trait


def next_chunks(table: RunningTable, slots: IntArray, drafting: Drafting, max_rows: int) -> Chunks:
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
        # In order of rank, so that whoever is never preempted has rows: a step without rows would be the end.
        for place in sorted(longer.tolist(), key=lambda place: table.sequence(int(slots[place])).order):
            lengths[place] = _length_within(budget, table, table.sequence(int(slots[place])), drafting)
            budget -= int(lengths[place])
        chosen = lengths > 0
        slots, starts, lengths = slots[chosen], starts[chosen], lengths[chosen]
    steps = table.steps(slots, starts)
    return Chunks(slots, starts, starts + lengths, steps, table.active(slots, steps, traits), traits)


def _length_within(budget: int, table: RunningTable, sequence: Sequence, drafting: Drafting) -> int:
    """How many tokens of a sequence that has to catch up come next; a draft is verified whole or later."""
    length = _run_length(table, sequence, drafting)
    verifies = sequence.draft is not None and sequence.draft.ended
    return min(length, budget) if not verifies or length <= budget else 0


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
