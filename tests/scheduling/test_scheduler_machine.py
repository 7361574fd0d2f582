"""No order of adds, steps, aborts and preemptions makes a running layer read anything but what its rule says."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from plan_checks import (
    MAX_LENGTH,
    Contents,
    check_plan,
    draw_exits,
    later_step,
    peak_by_hand,
    staying,
    step_of,
    token_at,
)
from schedule_strategies import draft_rules, guess, judged, ways
from sequences import new_sequence

from d3engine.depth import DepthPolicy, FullDepth, LayerTable
from d3engine.errors import InvalidValueError
from d3engine.request.admission import Immediate, IntervalAdmission
from d3engine.request.outputs import FinishReason
from d3engine.request.params import SamplingParams
from d3engine.scheduling.kv_cache import KVCache
from d3engine.scheduling.plan import ExecutorCapabilities, Plan, RunControl, Sampled
from d3engine.scheduling.scheduler import Scheduler, SchedulerConfig
from d3engine.scheduling.sequence import Draft, Sequence, Status


class SchedulerMachine(RuleBasedStateMachine):
    """add, step, abort, finish, preempt and reset in any order over one tiny pool."""

    @initialize(
        layers=st.sampled_from([2, 3, 4, 8]),
        block_size=st.sampled_from([2, 3, 4]),
        blocks_a_layer=st.integers(2, 16),
        max_num_seqs=st.integers(1, 4),
        spare_rows=st.integers(0, 8),
        caching=st.sampled_from([True, True, False]),
        admission=st.sampled_from([Immediate(), Immediate(), IntervalAdmission(3)]),
        num_scheduler_steps=st.sampled_from([0, 1, 3, 8]),
        launched_ahead=st.sampled_from([0, 0, 1, 4]),
        windows=st.one_of(st.just([None] * 8), st.lists(st.sampled_from([None, 1, 2, 5, 9]), min_size=8, max_size=8)),
        seed=st.integers(0, 2**16),
    )
    def begin(
        self,
        layers: int,
        block_size: int,
        blocks_a_layer: int,
        max_num_seqs: int,
        spare_rows: int,
        caching: bool,
        admission: Immediate | IntervalAdmission,
        num_scheduler_steps: int,
        launched_ahead: int,
        windows: list[int | None],
        seed: int,
    ) -> None:
        self.cache = KVCache(
            num_layers=layers,
            num_blocks=min(max(blocks_a_layer * layers, 8), 64),
            block_size=block_size,
            max_sequences=max_num_seqs,
            max_length=MAX_LENGTH,
            windows=windows[:layers],
        )
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + spare_rows,
            max_model_len=MAX_LENGTH,
            admission=admission,
            enable_prefix_caching=caching,
            num_scheduler_steps=num_scheduler_steps,
            capabilities=ExecutorCapabilities(launched_ahead=launched_ahead),
        )
        self.scheduler = Scheduler(config, self.cache)
        self.contents = Contents(self.cache)
        self.sequences: list[Sequence] = []
        self.numbers = random.Random(seed)  # how deep tokens go that may leave early
        self.finished_by_us: set[int] = set()
        self.control: RunControl | None = None
        self.taken = 0

    # -- rules ---------------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        known = [s.prompt_token_ids + s.token_ids for s in self.sequences[-4:]]
        base = data.draw(st.sampled_from([[0] * 12, [0, 1] * 6, *known]), label="shared prefix")
        length = data.draw(st.sampled_from([0, 0, 1, 2, 4, 5, 8, 12, len(base)]), label="shared length")
        own = data.draw(st.lists(st.integers(0, 6), min_size=not length, max_size=4), label="own tokens")
        twins = [s.prompt_token_ids for s in self.sequences[-2:]]
        prompt = data.draw(st.sampled_from([base[:length] + own, *twins]), label="prompt")[: MAX_LENGTH - 1]
        max_tokens = data.draw(st.sampled_from([12, 16, 8, 3, 1]), label="max_tokens")
        schedule, exit_rule = data.draw(ways(self.cache.num_layers), label="schedule and exit rule")
        sequence = Sequence(
            request_id=f"r{data.draw(st.integers(0, 5), label='request')}",
            index=0,
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=max_tokens, temperature=0.0),
            schedule=schedule,
            exit_rule=exit_rule,
            eos_token_ids=frozenset(data.draw(st.sampled_from([(), (), (), (), (3,)]), label="eos")),
            seed=0,
            priority=data.draw(st.sampled_from([0, 0, 0, -1, 1]), label="priority"),
            arrival=len(self.sequences),
            max_length=min(len(prompt) + max_tokens, MAX_LENGTH),
            shares_prompt=data.draw(st.sampled_from([True, True, True, False]), label="shares_prompt"),
            streams=data.draw(st.sampled_from([False, False, True]), label="streams"),
            flow=data.draw(st.sampled_from([("", ""), ("", "a"), ("key", "a"), ("key", "b")]), label="flow"),
        )
        if data.draw(st.sampled_from([True, False]), label="drafts"):
            rule = data.draw(draft_rules(self.cache.num_layers), label="rule")
            sequence.draft, sequence.exit_rule = Draft(rule), None
            sequence.schedule = FullDepth().schedule(self.cache.num_layers)
        peak = peak_by_hand(sequence.schedule, len(prompt), sequence.max_length, self.cache.block_size)
        if peak > self.cache.pool.num_blocks:
            with pytest.raises(InvalidValueError, match="max_tokens"):
                self.scheduler.add(sequence)
            return
        config = self.scheduler.config
        if sequence.draft and sequence.draft.rule.length > config.max_num_batched_tokens - config.max_num_seqs:
            with pytest.raises(InvalidValueError, match="draft_length"):
                self.scheduler.add(sequence)
            return
        self.scheduler.add(sequence)
        self.sequences.append(sequence)

    @rule(times=st.sampled_from([1, 2, 3, 5]))
    def step(self, times: int) -> None:
        for _ in range(times):
            self._step(faults=False)
            self.everything_holds()

    @rule(times=st.sampled_from([7, 12]))
    def run_on(self, times: int) -> None:
        self.step(times)

    @precondition(lambda self: self.scheduler.running)
    @rule()
    def a_row_fails(self) -> None:
        self._step(faults=True)

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.scheduler._preempt(data.draw(st.sampled_from(self.scheduler.running), label="victim"))

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data())
    def finish_early(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.scheduler.running), label="finished")
        self.scheduler.finish(sequence, FinishReason.STOP, "a stop string")
        self.finished_by_us.add(sequence.arrival)

    @precondition(lambda self: self.scheduler.has_unfinished())
    @rule(request=st.integers(0, 5))
    def abort(self, request: int) -> None:
        going = [s for s in self.sequences if s.request_id == f"r{request}" and s.status is not Status.FINISHED]
        ended = self.scheduler.abort([f"r{request}", "nobody"])
        assert {s.arrival for s in ended} == {s.arrival for s in going}
        assert all(s.finish_reason is FinishReason.ABORT for s in going)
        self.finished_by_us |= {s.arrival for s in ended}

    @rule()
    def reset_prefix_cache(self) -> None:
        self.scheduler.prefix_cache.clear()

    # -- what holds ----------------------------------------------------------------------------------------------

    def _step(self, faults: bool) -> None:
        work = self.scheduler.has_unfinished()
        plan = self.scheduler.schedule()
        assert (plan is not None) == work, "a step without progress"
        if plan is None:
            return
        given, plan = plan, self._of_this_step(plan)
        check_plan(self.scheduler, plan)
        exits = draw_exits(plan, self.numbers)
        self._run(plan, exits)
        chosen = [plan.sequences[chunk] for chunk in plan.sampled.tolist()]
        proposing = plan.drafts.proposing if plan.drafts else frozenset()
        proposals = {place: [guess(chosen[place])] for place in proposing}
        rows = [self._tokens_of(plan, s) if place not in proposing else [] for place, s in enumerate(chosen)]
        failing = [place for place in range(len(chosen)) if place not in proposing][:1] if faults else []
        for place in failing:
            rows[place].pop()  # the tokens before the fault stand
        steps = {sequence.arrival: sequence.step for sequence in chosen}
        failed = dict.fromkeys(failing, "made to fail")
        ran = plan.depths.copy()
        ran[list(exits)] = list(exits.values())
        wanted = dict(zip([s.arrival for s in plan.sequences], ran.tolist(), strict=True))
        sampled = Sampled(rows, faults=failed, proposals=proposals)
        if given is not plan:
            sampled = with_those_who_left(given, plan, sampled)
        outputs = list(self.scheduler.update(given, sampled, ran if exits else None))
        for place, sequence in enumerate(chosen):
            own = [new for new in outputs if new.sequence is sequence]
            tokens = [token for new in own for token in new.token_ids]
            depths = [depth for new in own for depth in new.depths]
            assert tokens == rows[place][: len(tokens)]
            ended = sequence.status is Status.FINISHED
            assert len(tokens) == len(rows[place]) or ended, "a token was lost"
            if place in failed and sequence.finish_reason is FinishReason.ABORT:
                self.finished_by_us.add(sequence.arrival)
            first = steps[sequence.arrival]
            assert depths == sequence.depths[first : first + len(depths)]
            assert len(depths) == len(tokens)
            if sequence.exit_rule is not None:
                assert depths == [wanted[sequence.arrival]] * len(tokens)
            elif sequence.draft is None:
                for nth, depth in enumerate(depths):
                    assert depth == sequence.schedule.active(first + nth).sum()
            else:
                assert all(depth >= self.cache.num_layers for depth in depths[:1])

    def _of_this_step(self, plan: Plan) -> Plan:
        """What a plan stands for now, of those who are still there: a run that is followed has one for all its steps.

        The device, which is absent, is some steps ahead of the host.
        """
        if plan.multi_step is None or plan.multi_step.control is None:
            return plan
        control = plan.multi_step.control
        self.taken = self.taken + 1 if control is self.control else 0
        self.control = control
        control.words[1] = max(
            control.num_begun, min(self.taken + self.numbers.randint(1, 3), plan.multi_step.num_steps)
        )
        return later_step(staying(plan), self.taken)

    def _tokens_of(self, plan: Plan, sequence: Sequence) -> list[int]:
        """What a sequence gets from a step: what the absent model generates at each of its steps, or verifies."""
        if sequence.draft is not None:
            return judged(sequence)
        return [token_at(sequence, sequence.step + taken) for taken in range(plan.num_steps)]

    def _run(self, plan: Plan, exits: dict[int, int]) -> None:
        """All steps that the plan stands for: what it says of its first holds of the others, each a token later."""
        self.contents.run(plan, exits)
        for taken in range(1, plan.num_steps):
            for sequence in plan.sequences:
                sequence.token_ids.append(token_at(sequence, sequence.step))
            later = later_step(plan, taken)
            check_plan(self.scheduler, later)
            self.contents.run(later, {})
        if plan.num_steps > 1:
            for sequence in plan.sequences:
                del sequence.token_ids[sequence.step - (plan.num_steps - 1) :]

    @invariant()
    def everything_holds(self) -> None:
        self.scheduler.check_integrity()
        for sequence in self.sequences:
            assert sequence.token_ids == [token_at(sequence, step) for step in range(sequence.step)]
            assert sequence.num_tokens <= sequence.max_length
            if sequence.status is Status.FINISHED and sequence.arrival not in self.finished_by_us:
                at_end = sequence.step == sequence.params.max_tokens or sequence.num_tokens == sequence.max_length
                assert at_end or sequence.token_ids[-1] in sequence.eos_token_ids
        for sequence in self.scheduler.running:
            self._check_blocks_of(sequence)

    def _check_blocks_of(self, sequence: Sequence) -> None:
        """After a step a sequence holds blocks for what it has computed, and none in layers that sleep for ever."""
        # One that streams may hold those of further steps, which a run was to take or is about to.
        computed = int(self.scheduler._table.num_computed[sequence.slot])
        next_row = computed if sequence.draft is None else min(computed, sequence.num_tokens - 1)
        behind = np.maximum(next_row + 1 - self.cache.windows, 0) // self.cache.block_size
        given_back = self.cache.num_behind[sequence.slot]
        assert (given_back == np.minimum(behind, self.cache.num_blocks[sequence.slot])).all()
        if sequence.draft is not None:  # a draft lets its own layers run ahead, and a rejected one leaves its blocks
            held, size = self.cache.num_blocks[sequence.slot], self.cache.block_size
            assert (held >= -(-min(computed, sequence.num_tokens - 1) // size)).all()
            assert (held <= -(-(sequence.max_length - 1) // size)).all()
            return
        step = step_of(sequence, computed)
        runs = sequence.schedule.active(step) if sequence.schedule.on_skip == "none" else True
        wanted = np.where(runs, -(-computed // self.cache.block_size), 0)
        most = wanted
        if self.control is not None:
            config = self.scheduler.config
            further = config.num_scheduler_steps + config.capabilities.launched_ahead
            last = min(computed + further, sequence.max_length - 1)
            most = np.where(runs, -(-last // self.cache.block_size), 0)
        held = self.cache.num_blocks[sequence.slot]
        assert ((wanted <= held) & (held <= most)).all()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        limit = sum(6 * s.max_length for s in self.sequences) * (1 + len(self.sequences))
        while self.scheduler.has_unfinished():
            self._step(faults=False)
            self.everything_holds()
            limit -= 1
            assert limit, "the queue does not drain"
        assert all(sequence.status is Status.FINISHED for sequence in self.sequences)
        self.scheduler.prefix_cache.clear()
        self.scheduler.check_integrity()
        assert self.cache.pool.num_free == self.cache.pool.num_blocks


TestAnyOrderOfEventsLeavesEveryEntryWhereItsReaderLooks = SchedulerMachine.TestCase
TestAnyOrderOfEventsLeavesEveryEntryWhereItsReaderLooks.settings = settings(
    max_examples=50, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def with_those_who_left(given: Plan, plan: Plan, sampled: Sampled) -> Sampled:
    """The tokens of a step of a run, with those that the device has chosen for sequences of which it does not know."""
    places = {id(sequence): place for place, sequence in enumerate(plan.sequences)}
    rows = [places.get(id(sequence)) for sequence in given.sequences]
    return Sampled(
        [[0] if place is None else sampled.token_ids[place] for place in rows],
        faults={row: sampled.faults[place] for row, place in enumerate(rows) if place in sampled.faults},
    )


def test_first_in_turn_has_rows_during_a_replay() -> None:
    """What is never preempted has rows although a replay would take the whole budget."""
    # A replay that must split its aliases needs more than admission promised it, and is preempted in mid-step.
    # An urgent prompt that came later stood behind it in the batch and had no rows: the step had none at all.
    cache = KVCache(num_layers=4, num_blocks=13, block_size=4, max_sequences=2, max_length=MAX_LENGTH)
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=2, max_model_len=MAX_LENGTH)
    scheduler = Scheduler(config, cache)
    everything = [0, 1, 2, 3]
    table = LayerTable([everything, [0], [0, 1], everything], on_skip="copy")
    replayed = plain_sequence([1] * 4, table, max_tokens=8, arrival=0)
    urgent = plain_sequence([2] * 4, FullDepth(), max_tokens=1, arrival=1, priority=-1)

    def step() -> None:
        plan = scheduler.schedule()
        assert plan is not None
        check_plan(scheduler, plan)
        list(scheduler.update(plan, Sampled([[1]] * len(plan.sampled))))
        scheduler.check_integrity()

    scheduler.add(replayed)
    while replayed.step < 7:
        step()
    scheduler._preempt(replayed)
    for _ in range(3):
        step()
    scheduler.add(urgent)
    while scheduler.has_unfinished():
        step()
    assert (urgent.step, replayed.step) == (1, 8)


def plain_sequence(
    prompt: list[int], policy: DepthPolicy, *, max_tokens: int, arrival: int, priority: int = 0
) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    own: dict[str, Any] = {"schedule": policy.schedule(4), "priority": priority, "shares_prompt": False}
    return new_sequence(prompt, params, arrival=arrival, **own)
