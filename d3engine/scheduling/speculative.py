"""Draft and verify as scheduling: where each drafting sequence stands, and what that makes of its next chunk.

There is no loop of its own. A step takes a drafting sequence one pass forward like any other: one row through the
layers of its draft, whose token goes to the draft; or, once the draft has ended, one chunk of the last accepted token
and the whole draft at full depth. The verified rows count as not computed, so verifying them is catching up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from d3engine.depth.policy import MAX_DRAFT_LENGTH
from d3engine.scheduling.kv_cache import IntArray
from d3engine.scheduling.lookup import AnswerHistory, continuation
from d3engine.scheduling.plan import DraftWork, HiddenRows
from d3engine.scheduling.running import Chunks, Counters, RunningTable, Trait
from d3engine.scheduling.sequence import Cycle, Draft, Proposal, Sequence


class Drafting:
    """The drafts of the running sequences of one table, and what comes of them in `counters`.

    With `in_loops` sequences that draft by their text do so in multi-step plans alone, where the executor drafts.
    """

    def __init__(self, table: RunningTable, counters: Counters, answers: AnswerHistory, *, in_loops: bool) -> None:
        self._table = table
        self._counters = counters
        self._answers = answers
        self._in_loops = in_loops

    def begin(self, slots: IntArray) -> None:
        """Begin the drafts of those sequences among `slots` that have come to decoding."""
        table = self._table
        slots = slots[table.having(Trait.DRAFTS, slots) & ~table.drafting[slots]]
        if self._in_loops:
            slots = slots[~table.having(Trait.SECOND_MODEL | Trait.LOOKUP, slots)]
        decodes = table.num_tokens[slots] == table.num_computed[slots] + 1
        answers = table.num_computed[slots] >= table.prompt_length[slots]
        for slot in slots[decodes & answers].tolist():
            draft = table.sequence(slot).draft
            assert draft is not None
            if draft.ended:
                continue  # without a single token of use: full depth takes this one
            draft.begin(table.sequence(slot).step, table.sequence(slot).room)
            table.drafting[slot] = not draft.ended
            if draft.layers is not None:
                table.draft_layers[slot] = draft.layers
            if draft.mlps is not None:
                table.draft_mlps[slot] = draft.mlps
            if draft.rule.lookup and draft.rule.model is None and not draft.ended:
                self._look_up(table.sequence(slot), draft)

    def _look_up(self, sequence: Sequence, draft: Draft) -> None:
        """Draft what followed the last tokens earlier in the text, as far as that is of use."""
        text, history = self._table.tokens[sequence.slot, : sequence.num_tokens], draft.rule.history
        for token in continuation(text, draft.most, self._answers.newest(history)):
            self._propose(sequence, draft, Proposal(token))
            if draft.ended:
                return
        draft.ended = True
        self._table.drafting[sequence.slot] = False

    def run_length(self, sequence: Sequence) -> int:
        """How many of the answer's tokens come next: all rows of a draft to verify, or what is to be replayed.

        A replay leaves out the last token, which a draft will feed.
        """
        assert sequence.draft is not None
        if sequence.draft.ended:
            return len(sequence.draft.token_ids) + 1
        return sequence.num_tokens - 1 - int(self._table.num_computed[sequence.slot])

    def propose(self, sequence: Sequence, proposals: Iterable[Proposal]) -> None:
        """Take in drafted tokens, up to the one that ends the draft."""
        assert sequence.draft is not None
        for proposal in proposals:
            self._propose(sequence, sequence.draft, proposal)
            if sequence.draft.ended:
                return

    def _propose(self, sequence: Sequence, draft: Draft, proposal: Proposal) -> None:
        table, slot = self._table, sequence.slot
        draft.work += draft.depth
        draft.grow(proposal, ends_answer=_ends_answer(sequence, draft.token_ids, proposal.token_id))
        known = sequence.num_tokens + len(draft.token_ids)
        if proposal.token_id is not None:
            table.tokens[slot, known - 1] = proposal.token_id
        table.num_tokens[slot] = known
        if draft.ended:
            table.drafting[slot] = False
            table.num_computed[slot] = sequence.num_tokens - 1
        elif not draft.rule.is_by_text:
            table.num_computed[slot] = known - 1

    def take(self, sequence: Sequence, cycle: Cycle) -> list[int]:
        """Take in a whole draft, which the device has ended and verified, and settle it."""
        draft = sequence.draft
        assert draft is not None
        if draft.layers is None and not draft.token_ids:
            draft.begin(sequence.step, sequence.room)
        del draft.token_ids[len(cycle.drafted) :]  # of which a form did not allow more
        new = cycle.drafted[len(draft.token_ids) :]
        draft.token_ids += new
        passes = len(new)
        ended = draft.ended or len(draft.token_ids) >= draft.most
        if not ended and not sequence.would_end(draft.token_ids[-1] if new else None, after=len(draft.token_ids)):
            passes += 1  # of a row whose logits were of no use
        draft.work += draft.depth * passes
        self._table.drafting[sequence.slot] = False
        return self.settle(sequence, len(cycle.tokens))

    def settle(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """End the draft, of which verification made `num_tokens` tokens, and count what came of it; returns each one's
        share of the layers run, and nothing where nothing was drafted.

        The shares are whole numbers whose sum is the layers run for the draft and for its verification, over all rows;
        where they cannot be equal, the first ones are larger. Half a layer that is left of the sum counts as one.
        """
        table, draft = self._table, sequence.draft
        assert draft is not None
        drafted, num_layers = len(draft.token_ids), table.cutoffs.shape[1]
        work = math.ceil(draft.work) + num_layers * (drafted + 1) - draft.resume_layer * drafted
        accepted = max(num_tokens - 1, 0)
        nothing = not drafted and not draft.work
        draft.verified(accepted)
        if nothing:
            return []
        if drafted:
            self._counters.drafted_tokens += drafted
            self._counters.accepted_tokens += accepted
            self._counters.verifications += 1
            for place in range(accepted):
                self._counters.accepted_at[place] += 1
        table.num_tokens[sequence.slot] = sequence.num_tokens
        return [work // num_tokens + (place < work % num_tokens) for place in range(num_tokens)]


def _ends_answer(sequence: Sequence, drafted: list[int], token: int | None) -> bool:
    """Whether a token behind these drafted ones ends the answer, or the form that the answer must have."""
    if token is None:
        return False
    if sequence.would_end(token, after=len(drafted) + 1):
        return True
    return sequence.constraint is not None and sequence.constraint.is_over([*drafted, token])


def resumed(chunks: Chunks, table: RunningTable) -> Chunks:
    """The chunks with those in two whose drafted rows need not run the lowest layers again.

    The last row of such a verification was never fed, so it runs everything.
    """
    layers = np.array([_resume_layer(table, slot) for slot in chunks.slots.tolist()])
    split = layers.nonzero()[0]
    if not split.size:
        return chunks
    upper = chunks.take(split)
    stops = chunks.stops.copy()
    starts, steps = chunks.starts.copy(), chunks.steps.copy()
    lengths = stops[split] - starts[split]
    starts[split] += lengths - 1
    steps[split] += lengths - 1
    above = np.arange(upper.active.shape[1]) >= layers[split][:, None]
    return Chunks(
        np.concatenate((chunks.slots, upper.slots)),
        np.concatenate((starts, upper.starts)),
        np.concatenate((stops, upper.stops - 1)),
        np.concatenate((steps, upper.steps)),
        np.concatenate((chunks.active, above)),
        chunks.traits,
    )


def _resume_layer(table: RunningTable, slot: int) -> int:
    draft = table.sequence(slot).draft
    return draft.resume_layer if draft is not None and draft.ended else 0


def draft_work(chunks: Chunks, table: RunningTable, query_starts: IntArray, sampled: IntArray) -> DraftWork | None:
    """What the step of these chunks does for sequences that draft; None if there are none."""
    if not table.having(Trait.DRAFTS, chunks.slots).any():
        return None
    work = DraftWork(frozenset(table.drafting[chunks.slots[sampled]].nonzero()[0].tolist()), {})
    kept: dict[int, list[tuple[int, int]]] = {}
    resumed: list[tuple[int, int]] = []
    places = {int(chunks.slots[chunk]): place for place, chunk in enumerate(sampled.tolist())}
    for chunk, slot in enumerate(chunks.slots.tolist()):
        sequence = table.sequence(slot)
        draft = sequence.draft
        if draft is None or slot not in places:
            continue
        first = int(query_starts[chunk])
        if places[slot] in work.proposing:
            if draft.rule.resumes and draft.layers is not None and (layer := int(draft.layers.argmin())):
                kept.setdefault(layer, []).append((first, _place(slot, len(draft.token_ids))))
        elif draft.token_ids and int(chunks.starts[chunk]) == sequence.num_tokens - 1:
            rows = np.arange(first, first + len(draft.token_ids))
            work.judging[places[slot]] = rows
            if draft.resume_layer:
                resumed += [(row, _place(slot, nth)) for nth, row in enumerate(rows.tolist())]
    if not work.proposing and not work.judging:
        return None
    return replace(
        work,
        kept=tuple(_hidden_rows(layer, rows) for layer, rows in sorted(kept.items())),
        resumed=(_hidden_rows(0, resumed),) if resumed else (),
    )


def _place(slot: int, nth: int) -> int:
    """Where the executor keeps the hidden state of a draft's nth fed row."""
    return slot * MAX_DRAFT_LENGTH + nth


def _hidden_rows(layer: int, rows: list[tuple[int, int]]) -> HiddenRows:
    pairs = np.array(rows, dtype=np.int64)
    return HiddenRows(layer, pairs[:, 0], pairs[:, 1])
