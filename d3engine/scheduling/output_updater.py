"""What steps bring goes into the sequences: new tokens, each with its depth, and the end of an answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from d3engine.request.outputs import FinishReason
from d3engine.scheduling.draft_model import DraftModelBatch
from d3engine.scheduling.kv_cache import IntArray
from d3engine.scheduling.plan import DraftWork, Plan, Sampled
from d3engine.scheduling.running import Counters, NewTokens, RunningTable
from d3engine.scheduling.sequence import NO_SLOT, Cycle, Sequence, Status
from d3engine.scheduling.speculative import Drafting


class OutputUpdater:
    """Grows the running sequences of one table, and counts their tokens; `finish` ends one, by a reason and a cause."""

    def __init__(
        self,
        table: RunningTable,
        counters: Counters,
        drafting: Drafting,
        second: DraftModelBatch | None,
        finish: Callable[[Sequence, FinishReason, str | int | None], None],
    ) -> None:
        self._table = table
        self._counters = counters
        self._drafting = drafting
        self._second = second
        self._finish = finish
        self._num_layers = table.cutoffs.shape[1]

    def take(self, plan: Plan, sampled: Sampled, ran: IntArray) -> Iterator[NewTokens]:
        """Add the sampled tokens to their sequences, whose chunks have run `ran` layers; see `Scheduler.update`."""
        if sampled.cycles is not None:
            yield from self._take_cycles(plan, sampled.cycles)
            return
        by_schedule: list[list[int]] = [[]] * len(plan.sampled)
        depths = by_schedule if plan.multi_step else [[depth] for depth in ran[plan.sampled].tolist()]
        for row, chunk in enumerate(plan.sampled.tolist()):
            sequence = plan.sequences[chunk]
            if sequence.slot == NO_SLOT:
                continue  # it ended with another of its request, whose token had a fault, or while a run went on
            tokens, fault = sampled.token_ids[row], sampled.faults.get(row)
            if row in sampled.proposals:
                self._drafting.propose(sequence, sampled.proposals[row])
                continue  # to be verified by a later step
            given = depths[row] if sequence.draft is None else self._drafting.settle(sequence, len(tokens))
            known = sequence.num_tokens
            yield from self._grow(sequence, tokens, given, fault, sampled.logprobs[row] if sampled.logprobs else None)
            if self._second is not None and sequence.status is Status.RUNNING:
                self._second.verified(sequence.slot, known, sequence.num_tokens)
        if plan.drafts is not None and plan.drafts.model is not None:
            self._take_from_second(plan.drafts, sampled, len(plan.sampled))

    def _take_cycles(self, plan: Plan, of_sequences: list[list[Cycle]]) -> Iterator[NewTokens]:
        """The same for what a device has drafted and verified by itself."""
        for sequence, cycles in zip(plan.sequences, of_sequences, strict=True):
            for cycle in cycles:
                if sequence.slot != NO_SLOT:
                    given = self._drafting.take(sequence, cycle)
                    if self._second is not None:
                        self._second.computed_to(sequence.slot, cycle.num_computed)
                    yield from self._grow(sequence, cycle.tokens, given, cycle.fault, cycle.logprobs)

    def _grow(
        self, sequence: Sequence, tokens: list[int], given: list[int], fault: str | None, logprobs: Any = None
    ) -> Iterator[NewTokens]:
        """Add tokens to a sequence up to its end; a fault ends it behind them. `given` are depths, where known."""
        depths = given or sequence.schedule.depths_between(sequence.step, sequence.step + len(tokens))
        first, size = 0, 1 if sequence.grows_by_single_tokens else len(tokens)
        while first < len(tokens):
            stop = first + self._extend(sequence, tokens[first : first + size], depths[first : first + size])
            yield NewTokens(sequence, tokens[first:stop], depths[first:stop], logprobs and logprobs[first:stop])
            first = stop
            if sequence.status is Status.FINISHED:
                self._counters.generated_layers += sum(given[stop:])
                if sequence.draft is not None:
                    sequence.draft.discard(given[stop:])
                return
        if fault is not None:
            self._finish(sequence, FinishReason.ABORT, sequence.own_fault(fault))
            yield NewTokens(sequence, [], [], None)

    def _take_from_second(self, drafts: DraftWork, sampled: Sampled, first_place: int) -> None:
        """Add what the second model has drafted to the drafts; its layers are not counted."""
        plan = drafts.model
        assert self._second is not None
        assert plan is not None
        self._second.computed(drafts)
        for place, chunk in enumerate(plan.sampled.tolist(), start=first_place):
            sequence = plan.sequences[chunk]
            if sequence.status is Status.RUNNING:
                self._drafting.propose(sequence, sampled.proposals[place])

    def _extend(self, sequence: Sequence, tokens: list[int], depths: list[int]) -> int:
        """Add tokens to their sequence, and end it where one of them or its length says so; returns how many it
        took."""
        table, slot, known = self._table, sequence.slot, sequence.num_tokens
        end = sequence.grow(tokens, depths)
        count = sequence.num_tokens - known
        table.tokens[slot, known : known + count] = tokens[:count]
        table.num_tokens[slot] = known + count
        # All but the last one: a step may have computed more, or less, than it planned.
        table.num_computed[slot] = known + count - 1
        self._counters.generated_tokens += count
        for depth, times in Counter(depths[:count]).items():
            self._counters.generated_layers += depth * times
            self._counters.token_layers[min(depth, self._num_layers)] += times
        if end is not None:
            self._finish(sequence, *end)
        return count
