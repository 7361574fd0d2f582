"""Continuous batching: who runs at this step, which rows, and which blocks they need.

Every sequence has computed some of its tokens and knows more of them; a step lets the computed ones catch up. That is
all there is: a prompt in pieces, one decoded token, and the replay of a preempted sequence are chunks alike. A chunk
never straddles a cutoff, so a replayed token runs at the depth it had at first and gives the same entries again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from d3engine.errors import require
from d3engine.request.admission import Admission, Immediate
from d3engine.request.outputs import FinishReason
from d3engine.scheduling.allocator import Allocator, longest_that_fits, peak_blocks
from d3engine.scheduling.draft_model import DraftModelBatch
from d3engine.scheduling.kv_cache import IntArray, KVCache
from d3engine.scheduling.lookup import AnswerHistory
from d3engine.scheduling.multi_step import (
    SHORT,
    ActiveRun,
    beyond,
    longest_run,
    reaching,
    run_ahead,
    shorter_and_shorter,
    steps_of_forms,
)
from d3engine.scheduling.output_updater import OutputUpdater
from d3engine.scheduling.plan import ExecutorCapabilities, MultiStep, Plan, Sampled
from d3engine.scheduling.planner import build_plan
from d3engine.scheduling.prefix_cache import PrefixCache
from d3engine.scheduling.running import Chunks, Counters, NewTokens, RunningTable
from d3engine.scheduling.sampling_mode import SamplingMode
from d3engine.scheduling.select_chunks import SharedPrompts, select_chunks
from d3engine.scheduling.sequence import NO_SLOT, Draft, Sequence, Status
from d3engine.scheduling.speculative import Drafting
from d3engine.scheduling.waiting import WaitingQueue, giving_way, in_turn


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Bounds of a step: rows in all, sequences at once, and tokens a sequence may grow to.

    `num_scheduler_steps`: how many steps a batch may take that gives a token at each of them before the host looks; 0
    where the host launches every step. `num_tokens_ahead`: until how many tokens these may be more, for few
    sequences. `capabilities`: what these steps may hold.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    admission: Admission = field(default_factory=Immediate)
    enable_prefix_caching: bool = True
    num_scheduler_steps: int = 0
    num_tokens_ahead: int = 0
    capabilities: ExecutorCapabilities = field(default_factory=ExecutorCapabilities)

    def __post_init__(self) -> None:
        require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            "max_num_batched_tokens",
            self.max_num_batched_tokens,
            f"at least max_num_seqs={self.max_num_seqs}, so that every sequence can take its step",
        )


class Scheduler:
    """The waiting queue and the running sequences over one cache, and over `second_cache` of a model that drafts.

    `reads_states`: that model drafts from hidden states of the first one. `draft_rows`: rows of its step at most behind
    which its executor drafts several tokens without the host.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCache,
        second_cache: KVCache | None = None,
        *,
        reads_states: bool = False,
        draft_rows: int = 0,
    ) -> None:
        self.config = config
        self.cache = cache
        self.prefix_cache = PrefixCache(cache)
        self._shared_prompts = SharedPrompts(self.prefix_cache, cache.block_size)
        self.counters = Counters(token_layers=[0] * (cache.num_layers + 1))
        self._table = RunningTable(config.max_num_seqs, cache.num_layers, config.max_model_len)
        self._allocator = Allocator(cache, self._table)
        self._answers = AnswerHistory()
        in_loops = config.capabilities.text_drafts
        self._drafting = Drafting(self._table, self.counters, self._answers, in_loops=in_loops)
        self._under_way = ActiveRun()
        self._second = None
        if second_cache is not None:
            self._second = DraftModelBatch(second_cache, self._table, reads_states=reads_states, draft_rows=draft_rows)
        self._growing = OutputUpdater(self._table, self.counters, self._drafting, self._second, self.finish)
        self._waiting = WaitingQueue()
        self._without_room: Sequence | None = None  # the first that waits, if there was no memory for it lately
        self._running: list[Sequence] = []
        self._slots = np.empty(0, dtype=np.int64)

    # -- the queue ---------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def prompts_under_way(self) -> dict[str, tuple[int, int, int]]:
        """Of running requests whose prompts are not yet computed: id -> tokens, cached ones, and those computed."""
        found = {}
        for sequence in self._running:
            total, computed = len(sequence.prompt_token_ids), int(self._table.num_computed[sequence.slot])
            if computed < total and not sequence.token_ids:
                found[sequence.request_id] = (total, sequence.num_cached_tokens, computed)
        return found

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._running)

    @property
    def is_ahead(self) -> bool:
        """Whether the device is at further steps of a run already, which no call has ended or is about to."""
        return self._under_way.goes_on and not self._may_join

    @property
    def _may_join(self) -> bool:
        """Whether a sequence waits for which there may be a place and memory, or those of a running sequence."""
        if not self._waiting or (first := self._waiting.first) is self._without_room:
            return False
        return self.cache.num_free_slots > 0 or bool(self._giving_way(first))

    def has_unfinished(self) -> bool:
        return bool(self._waiting or self._running)

    def fit(self, sequence: Sequence) -> None:
        """Refuse a sequence that could never fit the cache, by name of the limit.

        One that leaves its length open ends where the cache does, if that is before the model's length.
        """
        if sequence.params.max_tokens is None:
            prompt, most = len(sequence.prompt_token_ids), sequence.max_length
            sequence.max_length = longest_that_fits(sequence.schedule, prompt, most, self.cache)
        available = self.cache.pool.num_blocks
        needed = self.cache.num_layers * self.cache.blocks_for(sequence.max_length - 1)
        if needed > available:  # if all layers stayed, which is quickly known
            needed = peak_blocks(sequence.schedule, len(sequence.prompt_token_ids), sequence.max_length, self.cache)
        require(
            needed <= available,
            "max_tokens",
            sequence.max_tokens,
            f"low enough for the KV cache (with its prompt of {len(sequence.prompt_token_ids)} tokens the sequence may"
            f" need {needed} blocks of {self.cache.block_size} entries, kv_cache_memory_bytes allows {available})",
        )
        if sequence.draft is not None:
            spare = self.config.max_num_batched_tokens - self.config.max_num_seqs
            allowed = f"at most max_num_batched_tokens - max_num_seqs = {spare}, since a draft is verified in one piece"
            rule = sequence.draft.rule
            if rule.by_cost and spare >= 1:  # an open length is what there is room for, that of the first draft as well
                sequence.draft = Draft(replace(rule, length=min(rule.length, spare)))
            require(sequence.draft.rule.length <= spare, "draft_length", rule.length, allowed)
            if self._second is not None and sequence.draft.rule.model is not None:
                self._second.check_fits(sequence)

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn; raises `InvalidValueError` if it could never fit the cache."""
        self.fit(sequence)
        if self.config.enable_prefix_caching:
            self._shared_prompts.name(sequence)
        self._waiting.push(sequence)

    def abort(self, request_ids: Iterable[str]) -> list[Sequence]:
        """End all sequences of these requests; returns those that were still going."""
        ids = set(request_ids)
        found = self._waiting.remove(lambda sequence: sequence.request_id in ids)
        found += [s for s in self._running if s.request_id in ids]
        for sequence in found:
            self._end(sequence, FinishReason.ABORT)
        return found

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """End a sequence and give back all it holds; does nothing to one that has ended."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is not Status.RUNNING:
            self._waiting.remove(lambda waiting: waiting is sequence)
        self._end(sequence, reason, stop_reason)

    def _end(self, sequence: Sequence, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """End a sequence that does not wait, or no longer does."""
        if sequence.status is Status.RUNNING:
            # A run ahead may have held blocks of layers that have fallen asleep on its way: they are not in use.
            self._allocator.free_sleeping_layers(np.array([sequence.slot]))
            self.counters.blocks_saved += self._allocator.saved(sequence.slot)
            self._leave(sequence)
        if sequence.draft is not None and sequence.draft.rule.history and reason is not FinishReason.ABORT:
            self._answers.add(sequence.all_token_ids()[len(sequence.prompt_token_ids) :], sequence.draft.rule.history)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason

    def forget_earlier(self) -> None:
        """Drop what earlier requests have left to later ones: shared prompt blocks, and answers to look up."""
        self.prefix_cache.clear()
        self._answers.clear()

    # -- one step ----------------------------------------------------------------------------------------------

    def schedule(self) -> Plan | None:
        """The plan of the next step, its blocks allocated; None when there is nothing to do."""
        if self._may_join:
            self._under_way.end()  # waiting requests do not wait for a run
        elif self._without_room is None and self._under_way.is_within(self.config.capabilities.launched_ahead):
            self._prolong()  # while the device is at its last steps
        if (plan := self._under_way.next_step()) is not None:
            return plan
        self._admit()
        if not self._running:
            return None
        chunks = select_chunks(self._table, self._slots, self._drafting, self.config.max_num_batched_tokens)
        if not chunks.slots.size and (plan := self._cycle()) is not None:
            return plan
        chunks, missing, multi_step = self._make_room(chunks.deepest_first())
        copies = self._allocator.allocate(chunks, missing)
        plan = build_plan(chunks, self._table, self.cache.tables, multi_step, copies)
        self._under_way.begin(plan)
        return plan if self._second is None else self._second.add_to(plan, self._second_chunks())

    def _cycle(self) -> Plan | None:
        """The plan by which all running sequences draft, and verify their drafts, without the host between the two;
        None where it must look, or there is no memory for it."""
        assert self._second is not None, "without a second model every sequence has rows"
        drafting = self._second_chunks()
        chunks = self._second.verified_at_once(drafting)
        if chunks is None or chunks.slots.size < len(self._running):
            return None
        missing, needed = self._allocator.missing(chunks)
        if not self.prefix_cache.reserve(needed):
            return None
        copies = self._allocator.allocate(chunks, missing)
        choice = SamplingMode(int(self._table.choice[chunks.slots].max()))
        multi_step = MultiStep(1, chunks.steps, self._table.cutoffs[chunks.slots], choice, cycles=True)
        plan = build_plan(chunks, self._table, self.cache.tables, multi_step, copies)
        return self._second.add_to(plan, drafting)

    def _prolong(self) -> None:
        """Plan the run under way further, as far as its rows stay in order and there is memory."""
        few = self.config.num_scheduler_steps
        for limit in shorter_and_shorter(few, min(few, SHORT)):
            chunks, num_steps = beyond(self._under_way.plan, self._table, limit)
            missing, needed = self._allocator.missing(chunks)
            if num_steps and self.prefix_cache.reserve(needed):
                self._allocator.allocate(chunks, missing)
                self._under_way.prolong(num_steps)
                return

    def _second_chunks(self) -> Chunks:
        """The second model's rows of a step; none where it runs in multi-step plans alone."""
        assert self._second is not None
        budget = 0 if self.config.capabilities.text_drafts else self.config.max_num_batched_tokens
        return self._second.choose(self._slots, budget)

    def update(self, plan: Plan, sampled: Sampled, depths: IntArray | None = None) -> Iterator[NewTokens]:
        """Take in what a step has computed: new tokens, ended sequences, prompt blocks to share, blocks to free.

        The tokens come when their sequence has grown by them, one by one where it grows so: their reader may end
        the sequence there (a stop string was found), and the tokens beyond are dropped. They must be read to the end.
        `depths` [C] are the layers that the chunks really ran, where some left early; None: those of the plan.
        """
        self.counters.steps += plan.num_steps
        self._under_way.took(plan)
        if (
            plan.multi_step is None or plan.multi_step.opens
        ):  # otherwise no prompt is computed, and every row gets its token
            self._table.num_computed[plan.slots] = plan.stops
            self._shared_prompts.keep(plan)
        return self._take(plan, sampled, plan.depths if depths is None else depths)

    def _take(self, plan: Plan, sampled: Sampled, ran: IntArray) -> Iterator[NewTokens]:
        """Let the sequences grow, then give back the blocks of layers that have fallen asleep, and behind windows."""
        yield from self._growing.take(plan, sampled, ran)
        self._allocator.free_sleeping_layers(plan.slots)
        self._allocator.free_behind_windows(plan.slots)

    # -- who runs ----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Move waiting sequences into the batch while there are slots, and blocks for all that they know.

        A sequence whose flow does not run may take the place of one of a flow that has several.
        """
        if not self._waiting:
            return
        if self._running and not self.config.admission.admits(self.counters.steps):
            return
        promised = sum(self._allocator.num_promised(s.slot) for s in self._running)
        while self._waiting:
            sequence, needed = self._waiting.first, 0
            if self.cache.num_free_slots:
                self._waiting.pop()
                self._enter(sequence)  # first, so that the prefix it shares cannot be dropped to make room for it
                needed = self._allocator.num_promised(sequence.slot)
                if len(self._running) == 1 or self.prefix_cache.reserve(promised + needed):
                    promised += needed
                    self._count_admitted(sequence)
                    sequence.status = Status.RUNNING
                    self._waiting.entered(sequence)
                    continue
                self._leave(sequence)
                self._waiting.push(sequence)
            victims = self._giving_way(sequence)
            if not victims or needed > sum(self.cache.num_held(victim.slot) for victim in victims):
                self._without_room = sequence if self.cache.num_free_slots else None
                return
            self._preempt(victims[0])
            promised = sum(self._allocator.num_promised(s.slot) for s in self._running)

    def _giving_way(self, sequence: Sequence) -> list[Sequence]:
        """The running sequences that may be preempted for one that waits."""
        return [] if self._waiting.is_running(sequence.flow) else giving_way(self._running, sequence)

    def _enter(self, sequence: Sequence) -> None:
        sequence.slot = self.cache.open()
        if self._second is not None:
            self._second.open(sequence.slot)
        blocks = self._shared_prompts.match(sequence)
        self.cache.share(sequence.slot, blocks)
        cached = blocks.shape[0] * self.cache.block_size
        self._table.put(sequence, cached)
        self._allocator.free_behind_windows(np.array([sequence.slot]))
        self._running.append(sequence)
        self._slots = np.append(self._slots, sequence.slot)

    def _count_admitted(self, sequence: Sequence) -> None:
        if sequence.status is Status.WAITING:  # a preempted one was counted when it first came
            sequence.scheduled_time = time.monotonic()
            sequence.num_cached_tokens = int(self._table.num_computed[sequence.slot])
            self.counters.prompt_tokens += len(sequence.prompt_token_ids)
            self.counters.cached_prompt_tokens += sequence.num_cached_tokens

    def _leave(self, sequence: Sequence) -> None:
        slot = sequence.slot
        self._under_way.end()
        self._without_room = None
        if sequence.status is Status.RUNNING:
            self._waiting.left(sequence)
        self.cache.close(slot)
        if self._second is not None:
            self._second.close(slot)
        self._table.sequences[slot] = None
        sequence.slot = NO_SLOT
        if sequence.draft is not None:
            sequence.draft.drop()  # it comes again as it was
        self._running.remove(sequence)
        self._slots = self._slots[self._slots != slot]

    def _preempt(self, sequence: Sequence) -> None:
        """Send a sequence back to wait; it will compute its entries again, each token at its own depth."""
        self._leave(sequence)
        sequence.status = Status.PREEMPTED
        sequence.num_preemptions += 1
        self.counters.preemptions += 1
        self._waiting.push(sequence)

    def _make_room(self, chunks: Chunks) -> tuple[Chunks, IntArray, MultiStep | None]:
        """Preempt the last sequences in turn until the chunks of the others have room.

        Returns these chunks, the blocks [C, L] that their layers lack, and the steps that the device may take by
        itself.
        """
        while True:
            has_room = self._second is None or self._second.has_room(self._second_chunks())
            for multi_step in self._runs(chunks):
                missing, needed = self._missing(chunks, multi_step)
                if self.prefix_cache.reserve(needed) and has_room:
                    return chunks, missing, multi_step
            victim = in_turn(self._running)[-1]
            assert len(self._running) > 1, "a single sequence outgrew the cache that add() had found large enough"
            chunks = chunks.take(chunks.slots != victim.slot)
            self._preempt(victim)

    def _missing(self, chunks: Chunks, multi_step: MultiStep | None) -> tuple[IntArray, int]:
        """Blocks [C, L] that the layers lack for these steps, and how many to have free."""
        if multi_step is None:
            return self._allocator.missing(chunks)
        missing, needed = self._allocator.missing(reaching(chunks, multi_step, self._table))
        if multi_step.opens:  # a prompt runs layers that the run leaves out, and fills none of those that it skips
            missing = np.maximum(missing, self._allocator.missing(chunks)[0])
            needed = int(missing.sum())
        return missing, needed

    def _runs(self, chunks: Chunks) -> Iterator[MultiStep | None]:
        """What the device may do by itself, as far as there is room for it: the longest run of steps first, and at last
        this step alone, for which a sequence may be preempted."""
        if self._second is not None and self._second_chunks().slots.size:
            yield None  # what the second model drafts, the host must see before the next step
            return
        most = steps_of_forms(chunks, self._table)
        few = min(self.config.num_scheduler_steps, most)
        if self._may_join:
            few = longest = min(few, 1)  # a request may join
        else:
            longest = min(longest_run(chunks, self._table, few, self.config.num_tokens_ahead), most)
        multi_step = None
        for limit in shorter_and_shorter(longest, min(few, SHORT)):
            multi_step = run_ahead(chunks, self._table, limit, self.config.capabilities)
            if multi_step is None or (multi_step.num_steps == 1 and not multi_step.cycles):
                break
            if multi_step.cycles:
                multi_step = replace(multi_step, history=self._history(chunks))
            if multi_step.cycles and self._second is not None:
                reach = reaching(chunks, multi_step, self._table)
                rows = self._second.rows_of(chunks.slots, reach.stops)
                if rows is None:
                    continue
                multi_step = replace(multi_step, draft_model=rows)
            yield multi_step
        if multi_step is None or multi_step.cycles or multi_step.opens:
            yield None
        else:
            yield replace(multi_step, num_steps=1, control=None)

    def _history(self, chunks: Chunks) -> IntArray:
        """Earlier answers that all sequences which look up may see."""
        drafts = [self._table.sequence(slot).draft for slot in chunks.slots.tolist()]
        asked = [draft.rule.history for draft in drafts if draft is not None and draft.rule.lookup]
        return self._answers.newest(min(asked, default=0))

    # -- what holds --------------------------------------------------------------------------------------------

    def blocks_saved_now(self) -> int:
        """Blocks that the running sequences do not hold although full depth would."""
        return sum(self._allocator.saved(sequence.slot) for sequence in self._running)

    def check_integrity(self) -> None:
        """Assert all invariants of cache, prefix cache and queue; for tests, after every step."""
        self.cache.check_integrity(self.prefix_cache.mentions())
        if self._second is not None:
            self._second.cache.check_integrity()
        assert self._slots.tolist() == [sequence.slot for sequence in self._running]
        assert len(self._running) + self.cache.num_free_slots == self.config.max_num_seqs
        for sequence in self._running:
            assert sequence.status is Status.RUNNING
            assert self._table.sequences[sequence.slot] is sequence
            drafted = 0 if sequence.draft is None else len(sequence.draft.token_ids)
            assert self._table.num_tokens[sequence.slot] == sequence.num_tokens + drafted
        for sequence in self._waiting:
            assert sequence.status in (Status.WAITING, Status.PREEMPTED)
            assert sequence.slot == NO_SLOT
            assert sequence.draft is None or not sequence.draft.token_ids
