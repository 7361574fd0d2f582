"""No order of adds, steps, aborts and preemptions makes a running layer read anything but what its rule says.

A hypothesis state machine drives the real scheduler, cache and prefix cache over pools so small that everything goes
wrong that can. There is no model: tokens are a function of (arrival, step), and the pool is simulated entry by entry.
Every entry's content is named by what a model would compute it from: the layer, the tokens up to there, and the layers
that each of them ran. So a block that is shared, freed, aliased or overwritten when it must not be is seen at once.
"""

from __future__ import annotations

import random
from collections.abc import Hashable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from d3engine.cache.kv_cache import IntArray, KVCache
from d3engine.depth import (
    D3,
    DepthPolicy,
    EarlyExit,
    ExitRule,
    FullDepth,
    LayerTable,
    Schedule,
    SkipDecode,
    TailSkip,
    UnifiedSkip,
)
from d3engine.depth.draft_rule import DraftRule
from d3engine.errors import InvalidValueError
from d3engine.plan import Plan, Sampled, spans_of
from d3engine.request.draft import Draft, Proposal
from d3engine.request.outputs import FinishReason
from d3engine.request.params import SamplingParams
from d3engine.request.sequence import Sequence, Status
from d3engine.scheduling.admission import Immediate, Waves
from d3engine.scheduling.scheduler import Scheduler, SchedulerConfig

MAX_LENGTH = 36
UNWRITTEN = 0


def step_of(sequence: Sequence, position: int) -> int:
    """The generation step of the token at `position`, by the definition."""
    prompt = len(sequence.prompt_token_ids)
    return -1 if position < prompt else position - prompt + 1


def active_at(sequence: Sequence, step: int) -> Any:
    """The layers that a plan lets run at `step`: those of the schedule, or as many as the token once took."""
    if sequence.exit_rule is not None and 0 < step < sequence.step:
        return np.arange(sequence.schedule.num_layers) < sequence.depths[step]
    return sequence.schedule.active(step)


def draw_exits(plan: Plan, numbers: random.Random) -> dict[int, int]:
    """How deep each chunk that may leave early really goes: any depth that its rule allows."""
    drawn = {}
    for group in plan.exits:
        rule, num_layers = group.rule, plan.sequences[0].schedule.num_layers
        allowed = [num_layers, *range(rule.min_layer + 1, num_layers, rule.every)]
        together = numbers.choice(allowed)
        for chunk in group.chunks.tolist():
            drawn[chunk] = together if rule.batch == "batch_min" else numbers.choice(allowed)
    return drawn


def token_at(sequence: Sequence, step: int) -> int:
    """What the absent model generates."""
    return (sequence.arrival * 5 + step * 3 + step * step) % 7


def peak_by_hand(schedule: Schedule, prompt: int, max_length: int, block_size: int) -> int:
    """The most blocks held at any step: no formula, every step looked at."""
    layers = schedule.num_layers
    peak = 0
    for step in range(max(max_length - prompt, 1)):
        held = int(schedule.active(step).sum()) if schedule.on_skip == "none" else layers
        peak = max(peak, held * -(-(prompt + step) // block_size))
    return peak


def layers_of(plan: Plan, chunk: int) -> npt.NDArray[np.bool_]:
    """The layers that a chunk must run, from its sequence alone."""
    sequence, start, stop = plan.sequences[chunk], int(plan.starts[chunk]), int(plan.stops[chunk])
    draft = sequence.draft
    if draft is None or start < sequence.num_tokens - 1:
        return active_at(sequence, step_of(sequence, start))
    assert draft.rule.schedule is not None
    layers = draft.rule.schedule.active(sequence.step)  # of the step at which the draft begins
    if not draft.ended:
        return layers
    drafted_rows_alone = stop < sequence.num_tokens + len(draft.token_ids)
    return np.arange(layers.size) >= layers.argmin() if drafted_rows_alone else np.ones_like(layers)


def known_tokens(sequence: Sequence) -> list[int]:
    drafted = [] if sequence.draft is None else sequence.draft.token_ids
    return sequence.prompt_token_ids + sequence.token_ids + drafted


class Contents:
    """The pool's tensor as numbers: flat entry -> the name of what was written there."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.flat = np.zeros((cache.pool.num_blocks + 1) * 2 * cache.block_size, dtype=np.int64)
        self.names: dict[Hashable, int] = {}
        self.histories: dict[int, list[int]] = {}  # by arrival: what every token so far names
        self.expected: dict[int, list[list[int]]] = {}  # by arrival: [position][layer], UNWRITTEN for a hole
        self.kept: dict[int, tuple[int, int]] = {}  # by place: the history and the layer of a kept hidden state

    def name(self, *key: Hashable) -> int:
        return self.names.setdefault(key, len(self.names) + 1)

    def grow(self, sequence: Sequence, length: int, new_depth: int | None = None) -> None:
        """Name the entries of the sequence's first `length` tokens, by brute force.

        `new_depth` is how deep the last of them goes, if it leaves early or might have; the others have gone already.
        """
        tokens = sequence.prompt_token_ids + sequence.token_ids
        histories = self.histories.setdefault(sequence.arrival, [])
        expected = self.expected.setdefault(sequence.arrival, [])
        for position in range(len(histories), length):
            step = step_of(sequence, position)
            runs = active_at(sequence, step)
            if new_depth is not None and step == sequence.step:
                runs = np.arange(runs.size) < new_depth
            active = tuple(bool(one) for one in runs)
            before = histories[-1] if histories else 0
            how = ("full",) if all(active) else (active, sequence.schedule.on_skip)
            history = self.name("history", before, tokens[position], *how)
            histories.append(history)
            expected.append([self._entry(sequence, layer, active, history) for layer in range(len(active))])

    def rewrite(self, plan: Plan, chunk: int) -> None:
        """Name the entries of a drafting sequence's chunk, which may replace what a draft has left.

        Above the first layer that a draft skips, its entries are its own; below, and after verification, full depth's.
        """
        sequence, active = plan.sequences[chunk], layers_of(plan, chunk)
        self.grow(sequence, min(int(plan.starts[chunk]), sequence.num_tokens))  # what the prefix cache has served
        histories = self.histories.setdefault(sequence.arrival, [])
        expected = self.expected.setdefault(sequence.arrival, [])
        drafts = sequence.draft is not None and not sequence.draft.ended and not active.all()
        for position in range(int(plan.starts[chunk]), int(plan.stops[chunk])):
            before = histories[position - 1] if position else 0
            histories[position:] = [self.name("history", before, known_tokens(sequence)[position], "full")]
            names = []
            for layer, runs in enumerate(active.tolist()):
                true = self.name("ran", layer, histories[position])
                drafted = self.name("drafted", layer, histories[position], tuple(active), sequence.step)
                names.append((drafted if drafts and not active[:layer].all() else true) if runs else UNWRITTEN)
            if not drafts:  # rows that resume have their lower layers' entries already
                names = [self.name("ran", layer, histories[position]) for layer in range(active.size)]
            expected[position:] = [names]

    def keep(self, plan: Plan) -> None:
        """Follow the hidden states that outlive a step; what comes back must be what was kept for that very row."""
        work = plan.drafts
        for rows in () if work is None else work.resumed:
            for row, place in zip(rows.rows.tolist(), rows.places.tolist(), strict=True):
                chunk, position = int(plan.row_chunks[row]), int(plan.positions[row])
                history = self.histories[plan.sequences[chunk].arrival][position]
                assert self.kept.pop(place) == (history, int(layers_of(plan, chunk).argmax()))
        for rows in () if work is None else work.kept:
            for row, place in zip(rows.rows.tolist(), rows.places.tolist(), strict=True):
                chunk, position = int(plan.row_chunks[row]), int(plan.positions[row])
                assert layers_of(plan, chunk)[: rows.layer].all()
                self.kept[place] = self.histories[plan.sequences[chunk].arrival][position], rows.layer

    def _entry(self, sequence: Sequence, layer: int, active: tuple[bool, ...], history: int) -> int:
        on_skip = sequence.schedule.on_skip
        if active[layer]:
            return self.name("ran", layer, history)
        if on_skip == "copy":
            source = layer
            while not active[source]:
                source -= 1
            return self.name("ran", source, history)
        return self.name("projected", layer, history) if on_skip == "project" else UNWRITTEN

    def keys(self, slot: int, layer: int, positions: IntArray) -> IntArray:
        size = self.cache.block_size
        blocks = self.cache.tables[slot, layer, positions // size].astype(np.int64)
        assert (blocks != 0).all(), "an entry has no block"
        return blocks * 2 * size + positions % size

    def write(self, slot: int, layer: int, position: int, name: int) -> None:
        key = int(self.keys(slot, layer, np.array([position]))[0])
        self.flat[[key, key + self.cache.block_size]] = name

    def copy(self, copies: tuple[IntArray, IntArray] | None) -> None:
        if copies is not None:
            source, target = copies
            assert np.unique(target).size == target.size, "two copies go to one place"
            self.flat[target] = self.flat[source]

    def check(self, sequence: Sequence, layer: int, length: int) -> None:
        """Assert that `layer` finds at every position before `length` what its rule says."""
        wanted = np.array([row[layer] for row in self.expected[sequence.arrival][:length]])
        assert (wanted != UNWRITTEN).all(), f"layer {layer} would read a hole"
        keys = self.keys(sequence.slot, layer, np.arange(length))
        for half in (0, self.cache.block_size):
            found = self.flat[keys + half]
            assert np.array_equal(found, wanted), (
                f"sequence {sequence.arrival}, layer {layer}: wrong entries at {np.flatnonzero(found != wanted)}"
            )

    def run(self, plan: Plan, exits: dict[int, int]) -> None:
        """What the executor does with a plan, in its order, with a check of everything a layer reads.

        `exits` are the depths after which some chunks leave.
        """
        for chunk in sorted(range(len(plan.sequences)), key=lambda chunk: int(plan.starts[chunk])):
            if plan.sequences[chunk].draft is None:
                self.grow(plan.sequences[chunk], int(plan.stops[chunk]), exits.get(chunk))
            else:
                self.rewrite(plan, chunk)
        self.keep(plan)
        self.copy(plan.copies_before)
        for span in plan.spans:
            rows = range(span.num_rows) if span.rows is None else span.rows.tolist()
            chunks = range(span.num_chunks) if span.chunks is None else span.chunks.tolist()
            beside = [] if span.projected_rows is None else span.projected_rows.tolist()
            for layer in span.layers:
                for row in beside:
                    self._write_row(plan, row, layer, "projected")
            for layer in span.layers:
                going = {chunk for chunk in chunks if layer < exits.get(chunk, layer + 1)}
                for row in rows:
                    if plan.row_chunks[row] in going:
                        self._write_row(plan, row, layer, "ran")
                for chunk in going:
                    self.check(plan.sequences[chunk], layer, int(plan.stops[chunk]))
        self.copy(plan.copies_after)
        for chunk, depth in exits.items():
            self._fill_above(plan, chunk, depth)
        for chunk, (sequence, stop) in enumerate(zip(plan.sequences, plan.stops.tolist(), strict=True)):
            filled = sequence.schedule.on_skip != "none"
            drafts = sequence.draft is not None and not sequence.draft.ended
            verified = sequence.draft is not None and not drafts  # true at every layer, rows that resumed included
            for layer in np.flatnonzero(filled | verified | layers_of(plan, chunk)).tolist():
                self.check(sequence, layer, stop)

    def _fill_above(self, plan: Plan, chunk: int, depth: int) -> None:
        """The entries of a token that has left after `depth` layers, in the layers above."""
        sequence, row = plan.sequences[chunk], int(plan.query_starts[chunk])
        position = plan.positions[row : row + 1]
        for layer in range(depth, self.cache.num_layers):
            if sequence.schedule.on_skip == "project":
                self._write_row(plan, row, layer, "projected")
            else:
                last = int(self.flat[self.keys(sequence.slot, depth - 1, position)][0])
                self.write(sequence.slot, layer, int(position[0]), last)

    def _write_row(self, plan: Plan, row: int, layer: int, kind: str) -> None:
        chunk, position = int(plan.row_chunks[row]), int(plan.positions[row])
        sequence = plan.sequences[chunk]
        name = self.name(kind, layer, self.histories[sequence.arrival][position])
        if sequence.draft is not None:
            name = self.expected[sequence.arrival][position][layer]
        self.write(int(plan.slots[chunk]), layer, position, name)


def check_plan(scheduler: Scheduler, plan: Plan) -> None:
    """Everything a plan promises, from its sequences alone."""
    assert 0 < plan.num_rows <= scheduler.config.max_num_batched_tokens
    places = [(id(sequence), int(start)) for sequence, start in zip(plan.sequences, plan.starts, strict=True)]
    assert len(set(places)) == len(plan.sequences) == len(plan.slots)
    twice = len(plan.sequences) - len({id(sequence) for sequence in plan.sequences})
    assert twice == sum(len(rows.rows) > 0 for rows in plan.drafts.resumed) * twice if plan.drafts else twice == 0
    projected, active = set(), set()
    for chunk, sequence in enumerate(plan.sequences):
        start, stop = int(plan.starts[chunk]), int(plan.stops[chunk])
        rows = slice(int(plan.query_starts[chunk]), int(plan.query_starts[chunk + 1]))
        assert sequence.slot == plan.slots[chunk]
        assert start < stop <= len(known_tokens(sequence))
        assert plan.steps[chunk] == step_of(sequence, start)
        assert plan.positions[rows].tolist() == list(range(start, stop))
        assert plan.token_ids[rows].tolist() == known_tokens(sequence)[start:stop]
        assert (plan.row_chunks[rows] == chunk).all()
        planned = layers_of(plan, chunk)
        assert plan.depths[chunk] == planned.sum()
        assert (chunk in plan.sampled) == (stop == len(known_tokens(sequence)))
        for row, position in zip(range(rows.start, rows.stop), range(start, stop), strict=True):
            runs = planned if sequence.draft is not None else active_at(sequence, step_of(sequence, position))
            active |= {(row, layer) for layer in np.flatnonzero(runs).tolist()}
            if sequence.schedule.on_skip == "project":
                projected |= {(row, layer) for layer in np.flatnonzero(~runs).tolist()}
    assert plan.sample_rows.tolist() == (plan.query_starts[plan.sampled + 1] - 1).tolist()
    assert _span_rows(plan, projected=False) == active, "the spans differ from the schedules"
    assert _span_rows(plan, projected=True) == projected
    check_exits(plan)
    check_writes(scheduler, plan)


def check_exits(plan: Plan) -> None:
    """New tokens after step 0 may leave, if their sequence has a rule; nobody else, and each under its own rule."""
    may = {
        chunk: sequence.exit_rule
        for chunk, sequence in enumerate(plan.sequences)
        if sequence.exit_rule is not None and plan.steps[chunk] == sequence.step > 0
    }
    assert {int(chunk): group.rule for group in plan.exits for chunk in group.chunks} == may
    assert len({group.rule for group in plan.exits}) == len(plan.exits)
    for group in plan.exits:
        for chunk, threshold in zip(group.chunks.tolist(), group.thresholds.tolist(), strict=True):
            tokens = plan.sequences[chunk].params.max_tokens
            assert threshold == group.rule.threshold_at(int(plan.steps[chunk]), tokens)


def _span_rows(plan: Plan, *, projected: bool) -> set[tuple[int, int]]:
    found, last = [], -1
    for span in plan.spans:
        assert span.layers.start > last
        last = span.layers.stop - 1
        if projected:
            rows = [] if span.projected_rows is None else span.projected_rows.tolist()
        else:
            rows = list(range(span.num_rows)) if span.rows is None else span.rows.tolist()
            chunks = range(span.num_chunks) if span.chunks is None else span.chunks.tolist()
            of_chunks = [row for c in chunks for row in range(plan.query_starts[c], plan.query_starts[c + 1])]
            assert rows == of_chunks, "a span's rows are not those of its chunks"
        found += [(row, layer) for row in rows for layer in span.layers]
    assert len(set(found)) == len(found), "a row runs a layer twice"
    return set(found)


def check_writes(scheduler: Scheduler, plan: Plan) -> None:
    """A block that a plan writes is named by its writer alone, or by layers asleep that hold the writer's entry."""
    cache, size = scheduler.cache, scheduler.cache.block_size
    cached = scheduler.prefix_cache.mentions()
    named: dict[int, list[tuple[int, int]]] = {}
    for slot, layer, index in np.argwhere(cache.tables).tolist():
        named.setdefault(int(cache.tables[slot, layer, index]), []).append((slot, layer))
    writers: dict[int, tuple[int, int]] = {}
    for chunk, sequence in enumerate(plan.sequences):
        slot, active = sequence.slot, layers_of(plan, chunk)
        for layer in range(cache.num_layers):
            if not active[layer] and sequence.schedule.on_skip != "project":
                continue
            for index in range(int(plan.starts[chunk]) // size, -(-int(plan.stops[chunk]) // size)):
                block = int(cache.tables[slot, layer, index])
                assert writers.setdefault(block, (slot, layer)) == (slot, layer), "a block has two writers"
                assert not cached[block], "a block of the prefix cache is written"
                for other_slot, other in named[block]:
                    assert other_slot == slot, "a block of another sequence is written"
                    assert other == layer or not active[layer : other + 1][1:].any(), "an alias holds other entries"
                    assert other >= layer


def later_step(plan: Plan, taken: int) -> Plan:
    """The plan of the step that a device takes by itself after `taken` others."""
    assert plan.ahead is not None
    steps = plan.steps + taken
    active = steps[:, None] < plan.ahead.cutoffs
    spans = spans_of(active, None, plan.query_starts)
    assert all(span.rows is None for span in spans), "the rows of a layer do not come first"
    tokens = np.array([sequence.token_ids[-1] for sequence in plan.sequences])
    moved = {"starts": plan.starts + taken, "stops": plan.stops + taken, "positions": plan.positions + taken}
    return replace(plan, steps=steps, token_ids=tokens, depths=active.sum(axis=1), spans=spans, ahead=None, **moved)


class SchedulerMachine(RuleBasedStateMachine):
    """add, step, abort, finish, preempt and reset in any order over one tiny pool."""

    @initialize(
        layers=st.sampled_from([2, 3, 4, 8]),
        block_size=st.sampled_from([2, 3, 4]),
        blocks_a_layer=st.integers(2, 16),
        max_num_seqs=st.integers(1, 4),
        spare_rows=st.integers(0, 8),
        caching=st.sampled_from([True, True, False]),
        admission=st.sampled_from([Immediate(), Immediate(), Waves(3)]),
        num_scheduler_steps=st.sampled_from([0, 1, 3, 8]),
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
        admission: Immediate | Waves,
        num_scheduler_steps: int,
        seed: int,
    ) -> None:
        self.cache = KVCache(
            num_layers=layers,
            num_blocks=min(max(blocks_a_layer * layers, 8), 64),
            block_size=block_size,
            max_sequences=max_num_seqs,
            max_length=MAX_LENGTH,
        )
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + spare_rows,
            max_model_len=MAX_LENGTH,
            admission=admission,
            enable_prefix_caching=caching,
            num_scheduler_steps=num_scheduler_steps,
        )
        self.scheduler = Scheduler(config, self.cache)
        self.contents = Contents(self.cache)
        self.sequences: list[Sequence] = []
        self.numbers = random.Random(seed)  # how deep tokens go that may leave early
        self.finished_by_us: set[int] = set()

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
            bad_word_ids=(),
            seed=0,
            priority=data.draw(st.sampled_from([0, 0, 0, -1, 1]), label="priority"),
            arrival=len(self.sequences),
            max_length=min(len(prompt) + max_tokens, MAX_LENGTH),
            shares_prompt=data.draw(st.sampled_from([True, True, True, False]), label="shares_prompt"),
            streams=data.draw(st.sampled_from([False, False, True]), label="streams"),
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
        check_plan(self.scheduler, plan)
        exits = draw_exits(plan, self.numbers)
        self._run(plan, exits)
        chosen = [plan.sequences[chunk] for chunk in plan.sampled.tolist()]
        proposing = plan.drafts.proposing if plan.drafts else frozenset()
        proposals = {place: guess(chosen[place]) for place in proposing}
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
        outputs = list(self.scheduler.update(plan, sampled, ran if exits else None))
        for place, sequence in enumerate(chosen):
            own = [output for output in outputs if output.sequence is sequence and output.token_id is not None]
            tokens = [output.token_id for output in own]
            assert tokens == rows[place][: len(tokens)]
            ended = sequence.status is Status.FINISHED
            assert len(tokens) == len(rows[place]) or ended, "a token was lost"
            if place in failed and sequence.finish_reason is FinishReason.ABORT:
                self.finished_by_us.add(sequence.arrival)
            first = steps[sequence.arrival]
            assert [output.depth for output in own] == sequence.depths[first : first + len(own)]
            if sequence.exit_rule is not None:
                assert [output.depth for output in own] == [wanted[sequence.arrival]] * len(own)
            elif sequence.draft is None:
                for nth, output in enumerate(own):
                    assert output.depth == sequence.schedule.active(first + nth).sum()
            else:
                assert all(output.depth >= self.cache.num_layers for output in own[:1])

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
        computed = int(self.scheduler._table.num_computed[sequence.slot])
        if sequence.draft is not None:  # a draft lets its own layers run ahead, and a rejected one leaves its blocks
            held, size = self.cache.num_blocks[sequence.slot], self.cache.block_size
            assert (held >= -(-min(computed, sequence.num_tokens - 1) // size)).all()
            assert (held <= -(-(sequence.max_length - 1) // size)).all()
            return
        step = step_of(sequence, computed)
        runs = sequence.schedule.active(step) if sequence.schedule.on_skip == "none" else True
        wanted = np.where(runs, -(-computed // self.cache.block_size), 0)
        assert (self.cache.num_blocks[sequence.slot] == wanted).all()

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


def guess(sequence: Sequence) -> Proposal:
    """What drafts: mostly right, now and then wrong, seldom of no use."""
    assert sequence.draft is not None
    step = sequence.step + len(sequence.draft.token_ids)
    chance = (sequence.arrival * 7 + step * 5 + sequence.step) % 13
    return Proposal(None if chance == 0 else (token_at(sequence, step) + (chance < 4)) % 7)


def judged(sequence: Sequence) -> list[int]:
    """What verification makes of a draft: its tokens as long as they are right, and one more."""
    tokens = []
    for drafted in [*(sequence.draft.token_ids if sequence.draft else []), None]:
        tokens.append(token_at(sequence, sequence.step + len(tokens)))
        if drafted != tokens[-1]:
            break
    return tokens


@st.composite
def draft_rules(draw: st.DrawFn, num_layers: int) -> DraftRule:
    """Drafts by every policy, nested or not; those that keep hidden states by D3."""
    length, adaptive = draw(st.integers(1, 4)), draw(st.booleans())
    if draw(st.booleans()):
        alpha, start = draw(st.sampled_from([0.3, 0.8])), draw(st.sampled_from([0.2, 0.5, 0.8]))
        return DraftRule(length, adaptive=adaptive, schedule=D3(alpha, start).schedule(num_layers), resumes=True)
    return DraftRule(length, adaptive=adaptive, schedule=draw(schedules(num_layers)))


@st.composite
def ways(draw: st.DrawFn, num_layers: int) -> tuple[Schedule, ExitRule | None]:
    """A schedule alone, or full depth with a rule by which tokens leave early."""
    if draw(st.sampled_from([True, False, False])):
        batch, on_skip = draw(st.sampled_from(["per_row", "batch_min"])), draw(st.sampled_from(["copy", "project"]))
        lowest, every = draw(st.integers(0, num_layers - 1)), draw(st.integers(1, 3))
        policy = EarlyExit(0.5, min_layer=min(lowest, 2), every=every, batch=batch, on_skip=on_skip)
        return policy.schedule(num_layers), policy.exit_rule(num_layers)
    return draw(schedules(num_layers)), None


@st.composite
def schedules(draw: st.DrawFn, num_layers: int) -> Schedule:
    """Every policy under every rule for skipped entries; "copy" only where layer 0 always runs."""
    on_skip = draw(st.sampled_from(["copy", "none", "project", "copy"]))
    kind = draw(st.sampled_from(["table", "d3", "table", "skipdecode", "table", "unified", "d3", "full", "tail"]))
    policy: DepthPolicy
    if kind == "d3":
        alpha, start = draw(st.sampled_from([0.3, 0.6, 0.8, 0.95])), draw(st.sampled_from([0.2, 0.5, 0.8]))
        tail = draw(st.integers(0, num_layers - int(start * num_layers)))
        on_skip = "none" if on_skip == "copy" and start * num_layers < 1 else on_skip
        policy = D3(alpha, start, tail=tail, on_skip=on_skip)
    elif kind == "skipdecode":
        warmup = draw(st.integers(1 if on_skip == "copy" else 0, num_layers))
        low = draw(st.integers(max(warmup, 1), num_layers))
        policy = SkipDecode(draw(st.integers(2, 12)), low, warmup=warmup, on_skip=on_skip)
    elif kind == "unified":
        policy = UnifiedSkip(draw(st.sampled_from([1.0, 1.4] if num_layers == 3 else [1.0, 1.4, 2.0])), on_skip=on_skip)
        if num_layers == 2 or (num_layers == 3 and policy.speedup > 1.0):
            policy = UnifiedSkip(1.0, on_skip=on_skip)
    elif kind == "tail":
        steps = draw(st.integers(2, 12))
        runs = draw(st.integers(num_layers + steps - 1, num_layers * steps))
        policy = TailSkip(Fraction(runs, steps), steps, on_skip=on_skip)
    elif kind == "table":
        fixed = [True] if on_skip == "copy" else []
        flags = st.lists(st.booleans(), min_size=num_layers - len(fixed), max_size=num_layers - len(fixed))
        rows = draw(st.lists(flags.map(lambda row: fixed + row), min_size=2, max_size=8))
        repeats: list[Any] = [row for row in rows for _ in range(draw(st.integers(1, 3)))]
        policy = LayerTable([[True] * num_layers, *repeats], on_skip="project" if on_skip == "none" else on_skip)
        if on_skip == "none":
            policy = LayerTable(list(np.minimum.accumulate(policy.active).astype(bool)), on_skip="none")
    else:
        policy = FullDepth()
    return policy.schedule(num_layers)


TestAnyOrderOfEventsLeavesEveryEntryWhereItsReaderLooks = SchedulerMachine.TestCase
TestAnyOrderOfEventsLeavesEveryEntryWhereItsReaderLooks.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def test_whoever_is_never_preempted_has_rows_although_a_replay_would_take_the_whole_budget() -> None:
    """A replay that must split its aliases needs more than admission promised it, and is preempted in mid-step.

    An urgent prompt that came later stood behind it in the batch and had no rows: the step had none at all.
    """
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
    return Sequence(
        request_id=f"r{arrival}",
        index=0,
        prompt_token_ids=prompt,
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        schedule=policy.schedule(4),
        eos_token_ids=frozenset(),
        bad_word_ids=(),
        seed=0,
        priority=priority,
        arrival=arrival,
        max_length=len(prompt) + max_tokens,
        shares_prompt=False,
    )
