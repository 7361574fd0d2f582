"""Drafts and their verifications that a device takes by itself, cycle after cycle, as others take steps.

A greedy draft asks nothing of the host: which layers it runs and how long it is follow from where it begins and from
how many tokens were accepted before, and whether full depth takes its tokens is seen on the device. So a run of cycles
ends where the host must look anyway. It may begin in the middle of drafts, which every sequence is at a place of its
own in.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from d3engine.depth import NEVER, Schedule
from d3engine.scheduling.kv_cache import IntArray
from d3engine.scheduling.plan import ExecutorCapabilities, MultiStep, Plan, RunControl
from d3engine.scheduling.running import Chunks, RunningTable, Trait
from d3engine.scheduling.sampling_mode import SamplingMode, choice_of_token
from d3engine.scheduling.sequence import NO_SLOT, USUAL_LENGTH, Draft, Sequence


def cycles_ahead(
    chunks: Chunks, table: RunningTable, limit: int, capabilities: ExecutorCapabilities
) -> MultiStep | None:
    """The cycles that the sequences of `chunks`, which all draft, can take on their own; None if not even one.

    They are no more than yield `limit` tokens as a rule, but at least one: where nothing was drafted lately, as many as
    plain steps, since each run costs the host a turn. Samplers that no device has need the host, and so does a draft by
    the model's own layers that stops where it is unsure, or runs parts of layers, and one by a student.
    """
    slots = chunks.slots
    sequences = [table.sequence(slot) for slot in slots.tolist()]
    beyond = Trait.SPLITS_LAYERS | (0 if capabilities.text_drafts else Trait.SECOND_MODEL | Trait.LOOKUP)
    is_beyond = not capabilities.drafts or table.having(beyond, slots).any()
    needs_host = is_beyond or any(choice_of_token(sequence) > capabilities.choice for sequence in sequences)
    if limit <= 1 or needs_host or not all(_draws_a_line(sequence, table) for sequence in sequences):
        return None
    drafts = [sequence.draft for sequence in sequences if sequence.draft is not None]
    rules = [draft.rule for draft in drafts]
    longest = max(rule.length for rule in rules)
    usual = max(_usual_length(draft) for draft in drafts)
    num_cycles = min(max(1, limit // (usual + 1)), max(sequence.room for sequence in sequences))
    if (table.choice[slots] == SamplingMode.REPORT).any():
        num_cycles = min(num_cycles, capabilities.logits // (slots.size * (longest + 1)))
        if num_cycles == 0:
            return None
    # Drafts by the text run none of this model's layers.
    schedules = [
        sequence.schedule if rule.schedule is None else rule.schedule
        for sequence, rule in zip(sequences, rules, strict=True)
    ]
    cutoffs = np.array([schedule.cutoffs for schedule in schedules])
    for row, schedule in enumerate(schedules):
        if not schedule.is_nested:  # which layers the next draft runs is not a matter of cutoffs
            cutoffs[row], num_cycles = np.where(table.draft_layers[slots[row]], NEVER, 0), 1
    control = RunControl() if num_cycles > 1 and chunks.traits & Trait.STREAMS else None
    steps = np.array([sequence.step for sequence in sequences])
    bridges = tuple(schedule.bridges for schedule in schedules) if chunks.traits & Trait.BRIDGED else ()
    choice = SamplingMode(int(table.choice[slots].max()))
    return MultiStep(num_cycles, steps, cutoffs, choice, control, bridges, cycles=True)


def _usual_length(draft: Draft) -> int:
    """Tokens that its next drafts have as a rule."""
    rule = draft.rule
    return min(rule.length, USUAL_LENGTH, round(draft.recent_length)) if rule.by_cost else rule.length


def _draws_a_line(sequence: Sequence, table: RunningTable) -> bool:
    """Whether all that the answer has is computed but its last token and what is drafted behind it."""
    draft = sequence.draft
    assert draft is not None
    known = sequence.step >= 1 and table.num_computed[sequence.slot] >= sequence.num_tokens - 1
    is_sure = draft.rule.is_by_text or draft.stop_probability == 0
    has_student = draft.rule.schedule is not None and bool(draft.rule.schedule.students)
    return bool(known and is_sure and draft.rule.target_acceptance is None and not has_student)


def at_last_tokens(chunks: Chunks, table: RunningTable) -> Chunks:
    """The chunks of the answers' last tokens, where cycles begin."""
    sequences = [table.sequence(slot) for slot in chunks.slots.tolist()]
    starts = np.array([sequence.num_tokens - 1 for sequence in sequences])
    steps = np.array([sequence.step for sequence in sequences])
    return replace(chunks, starts=starts, stops=starts + 1, steps=steps)


def reaching_by_cycles(chunks: Chunks, multi_step: MultiStep, table: RunningTable) -> Chunks:
    """The chunks as long as they may be when these cycles are over, at every layer."""
    sequences = [table.sequence(slot) for slot in chunks.slots.tolist()]
    most = [
        min(multi_step.num_steps * (sequence.draft.rule.length + 1), sequence.room)
        for sequence in sequences
        if sequence.draft is not None
    ]
    begin = at_last_tokens(chunks, table)
    return replace(begin, stops=begin.starts + np.array(most), active=np.ones_like(chunks.active))


FOLLOWED = 4
"""Times as long as others a run may be that the host follows, and can end at any step."""


FORM_SECONDS = 0.02
"""Processor time of forms in one run at most, where it has several steps: the others of its batch wait for them."""


def steps_of_forms(chunks: Chunks, table: RunningTable) -> int:
    """Steps of a run at most for the forms of its rows to take no more than `FORM_SECONDS`; at least 1."""
    if not chunks.traits & Trait.GUIDED:
        return sys.maxsize
    constraints = (table.sequence(slot).constraint for slot in chunks.slots.tolist())
    seconds = sum(one.token_seconds for one in constraints if one is not None)
    return max(1, int(FORM_SECONDS / seconds)) if seconds else sys.maxsize


def longest_run(chunks: Chunks, table: RunningTable, num_steps: int, num_tokens: int) -> int:
    """Steps of a run at most: `num_steps`, or more of few rows, up to `num_tokens` tokens of all of them.

    Where these are not 0, and so steps are short, a run is several times as long for streaming callers: from its end
    to the next one's begin the device waits for the host. Where a text may end an answer, which the host alone sees,
    little is to be computed beyond it.
    """
    if num_steps <= 1:
        return num_steps
    slots = chunks.slots
    is_followed = bool(chunks.traits & Trait.STREAMS)
    if not is_followed and any(table.sequence(slot).params.stop_strings for slot in slots.tolist()):
        return num_steps
    return max(num_steps, num_tokens // slots.size) * (FOLLOWED if is_followed and num_tokens else 1)


SHORT = 16
"""Steps of the shortest run to be tried where there is no memory for a longer one."""


def shorter_and_shorter(longest: int, shortest: int) -> Iterator[int]:
    """Steps of a run to be tried one after the other, until there is memory for them."""
    while longest > shortest:
        yield longest
        longest //= FOLLOWED
    yield shortest


def run_ahead(chunks: Chunks, table: RunningTable, limit: int, capabilities: ExecutorCapabilities) -> MultiStep | None:
    """The steps, `limit` at most, that `chunks` (deepest first) can take on their own; None if not even one.

    Chunks that all yield a token, but are not all one decoded token, are the opening of the steps behind them.
    """
    slots = chunks.slots
    bridged = chunks.traits & Trait.BRIDGED
    if bridged and not capabilities.bridges:
        return None  # only the host's own executor has the maps
    hooked = bool(chunks.traits & Trait.HOOKED) and bool(table.having(Trait.HOOKED, chunks.slots).any())
    if hooked and not capabilities.hooks:
        return None
    drafts = table.having(Trait.DRAFTS, slots)
    if drafts.all() and (cycles := cycles_ahead(chunks, table, limit, capabilities)) is not None:
        return cycles
    draft_elsewhere = drafts
    if capabilities.text_drafts:  # what drafts by its text decodes plainly where it cannot draft
        draft_elsewhere = drafts & ~table.having(Trait.SECOND_MODEL | Trait.LOOKUP, slots)
    yields = chunks.stops == table.num_tokens[slots]
    choice = SamplingMode(int(table.choice[slots].max()))
    # A schedule that is not nested fills the layers that it skips, so it is never simple.
    is_simple = choice <= capabilities.choice and not chunks.traits & Trait.FILLS and not draft_elsewhere.any()
    if limit == 0 or not is_simple or not yields.all():
        return None
    opens = not ((chunks.steps >= 1) & (chunks.stops - chunks.starts == 1)).all()
    if opens and (drafts.any() or hooked or not (capabilities.openings and _may_open(chunks, table, choice))):
        return None
    limit = min(limit, int((table.max_length[slots] - table.num_tokens[slots]).min()))
    if choice is SamplingMode.REPORT:
        limit = min(
            limit, max(1, capabilities.logits // int(np.count_nonzero(table.choice[slots] == SamplingMode.REPORT)))
        )
    if hooked:
        captures = (table.sequence(slot).params.captured for slot in slots.tolist())
        most = sum(len(capture.numbers) for capture in captures if capture is not None)  # states of a step
        limit = min(limit, max(1, capabilities.states // most)) if most else limit
    cutoffs = table.cutoffs[slots]
    steps = table.steps(slots, chunks.stops) if opens else chunks.steps
    if chunks.traits & Trait.STUDENT:
        schedules = [table.sequence(slot).schedule for slot in slots.tolist()]
        names = {one.student_at(step) for one, step in zip(schedules, chunks.steps.tolist(), strict=True)}
        if len(names) > 1 or not (capabilities.students or names == {None}):
            return None
        limit = min(limit, opens + _steps_of_one_student(schedules, chunks.steps, steps))
    num_steps = _steps_in_order(steps, cutoffs, limit - opens)
    if not num_steps:
        return None
    num_steps += opens
    is_taken_by_steps = capabilities.launched_ahead or chunks.traits & Trait.STREAMS
    control = RunControl() if num_steps > 1 and is_taken_by_steps else None
    bridges = tuple(map(table.bridges, slots.tolist())) if bridged else ()
    return MultiStep(num_steps, steps, cutoffs, choice, control, bridges, opens=opens)


def _steps_of_one_student(schedules: Iterable[Schedule], begun: IntArray, steps: IntArray) -> int:
    """For how many steps, from `steps` on, all rows keep the weights that they run at the steps `begun`."""
    rows = zip(schedules, begun.tolist(), steps.tolist(), strict=True)
    left: list[int] = [schedule.same_student_until(first) - step for schedule, first, step in rows]
    return min(left)


def _may_open(chunks: Chunks, table: RunningTable, choice: SamplingMode) -> bool:
    """Whether nothing but the last tokens is wanted of these chunks, nor needed for the choices behind them.

    Penalties and forms count the tokens before, and the one that the opening yields is not among them yet. Who reads
    along shall have it before the run takes the processor: a stream's first token came 1 to 1.6 ms later beside it.
    """
    sequences = map(table.sequence, chunks.slots.tolist())
    is_alone = choice <= SamplingMode.CUT and not chunks.traits & Trait.STREAMS
    return is_alone and all(
        sequence.params.prompt_logprobs is None and sequence.params.pooling is None for sequence in sequences
    )


def _steps_in_order(steps: IntArray, cutoffs: IntArray, limit: int) -> int:
    """For how many steps, `limit` at most, the rows that run a layer come before those that do not."""
    if (cutoffs == cutoffs[0]).all() and (steps[1:] >= steps[:-1]).all():
        return limit  # one schedule, youngest first: the order never changes
    for taken in range(limit):
        active = (steps[:, None] + taken) < cutoffs
        if (active[1:] & ~active[:-1]).any():
            return taken
    return limit


def reaching(chunks: Chunks, multi_step: MultiStep, table: RunningTable) -> Chunks:
    """The chunks as they will be at the last of these steps: what the cache must have room for."""
    if multi_step.cycles:
        return reaching_by_cycles(chunks, multi_step, table)
    stops = chunks.stops + (multi_step.num_steps - 1)
    if not multi_step.opens:
        return replace(chunks, stops=stops)
    active = multi_step.steps[:, None] < multi_step.cutoffs
    return replace(chunks, starts=chunks.stops, stops=stops, steps=multi_step.steps, active=active)


def beyond(plan: Plan, table: RunningTable, limit: int) -> tuple[Chunks, int]:
    """The steps, `limit` at most, that the rows of a run can take behind its last one in the same order, and the chunks
    as they will be at the last of these."""
    run = plan.multi_step
    assert run is not None
    steps = run.steps + run.num_steps
    room = int((table.max_length[plan.slots] - plan.stops).min()) - run.num_steps
    schedules = (sequence.schedule for sequence in plan.sequences)
    room = min(room, _steps_of_one_student(schedules, run.steps, steps))
    num_steps = _steps_in_order(steps, run.cutoffs, min(limit, room))
    stops = plan.stops + run.num_steps + num_steps - 1
    return Chunks(plan.slots, stops - num_steps, stops, steps, steps[:, None] < run.cutoffs, traits=0), num_steps


class ActiveRun:
    """The run that is under way, if there is one."""

    plan: Plan
    """That of the run, as long as it goes on."""

    def __init__(self) -> None:
        self._control: RunControl | None = None
        self._num_left = 0

    def begin(self, plan: Plan) -> None:
        """Take in a new plan; its run is under way if the steps are to be taken one by one."""
        if plan.multi_step is not None and plan.multi_step.control is not None:
            self._control, self.plan, self._num_left = plan.multi_step.control, plan, plan.multi_step.num_steps - 1

    def took(self, plan: Plan) -> None:
        """Count the steps that were taken at once, beyond the one for which `next_step` has given the plan."""
        if self._control is not None and plan.multi_step is not None and plan.multi_step.control is self._control:
            self._num_left -= plan.multi_step.num_taken - 1

    def prolong(self, num_steps: int) -> None:
        """Give the run that goes on `num_steps` more steps."""
        assert self.plan.multi_step is not None
        longer = replace(self.plan.multi_step, num_steps=self.plan.multi_step.num_steps + num_steps)
        self.plan, self._num_left = replace(self.plan, multi_step=longer), self._num_left + num_steps

    def end(self) -> None:
        """Let no further step begin."""
        if self._control is not None:
            self._control.end()

    def is_within(self, num_steps: int) -> bool:
        """Whether a run goes on that has no more steps left than these."""
        return self._num_left <= num_steps and self.goes_on

    @property
    def goes_on(self) -> bool:
        """Whether a run is under way that has steps left."""
        return self._control is not None and self._num_left > 0 and not self._control.is_ended

    def next_step(self) -> Plan | None:
        """The plan of the run, for its next step; None where no run is under way, or not any more."""
        if self._control is None:
            return None
        if self._num_left and (not self._control.is_ended or self._has_begun(self._control)):
            self._num_left -= 1
            return self.plan
        self._control = None
        return None

    def _has_begun(self, control: RunControl) -> bool:
        """Whether the next step has begun, and for anybody who is still there."""
        multi_step = self.plan.multi_step
        assert multi_step is not None
        given = multi_step.num_steps - self._num_left
        return control.num_begun > given and any(sequence.slot != NO_SLOT for sequence in self.plan.sequences)
