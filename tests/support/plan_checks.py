"""What every plan must hold, read off its rows alone, and the contents of a cache by what each rule says."""

import random
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from d3engine.depth import Schedule
from d3engine.scheduling.kv_cache import IntArray, KVCache
from d3engine.scheduling.plan import Plan, spans_of
from d3engine.scheduling.scheduler import Scheduler
from d3engine.scheduling.sequence import Sequence

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


def mlps_of(plan: Plan, chunk: int) -> npt.NDArray[np.bool_]:
    """The layers whose MLP a chunk must run: those of `layers_of`, but for a draft by parts of layers."""
    sequence = plan.sequences[chunk]
    draft = sequence.draft
    if draft is None or draft.ended or draft.rule.mlp_schedule is None or plan.starts[chunk] < sequence.num_tokens - 1:
        return layers_of(plan, chunk)
    return draft.rule.mlp_schedule.active(sequence.step)


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
        """Name the entries of the sequence's first `length` tokens, by brute force."""
        # `new_depth` is how deep the last of them goes, if it leaves early or might have; the others have gone already.
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
        """Name the entries of a drafting sequence's chunk, which may replace what a draft has left."""
        # Above the first layer that a draft skips, its entries are its own; below, and after verification, full
        # depth's.
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

    def check(self, sequence: Sequence, layer: int, start: int, length: int) -> None:
        """Assert that `layer` finds before `length` what its rule says, as far as rows from `start` on look back."""
        first = max(0, start + 1 - int(self.cache.windows[layer]))
        wanted = np.array([row[layer] for row in self.expected[sequence.arrival][first:length]])
        assert (wanted != UNWRITTEN).all(), f"layer {layer} would read a hole"
        keys = self.keys(sequence.slot, layer, np.arange(first, length))
        for half in (0, self.cache.block_size):
            found = self.flat[keys + half]
            assert np.array_equal(found, wanted), (
                f"sequence {sequence.arrival}, layer {layer}: wrong entries at {np.flatnonzero(found != wanted)}"
            )

    def run(self, plan: Plan, exits: dict[int, int]) -> None:
        """What the executor does with a plan, in its order, with a check of everything a layer reads."""
        # `exits` are the depths after which some chunks leave.
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
            if span.part == "mlp":
                continue  # which neither writes an entry nor reads one
            for layer in span.layers:
                for row in beside:
                    self._write_row(plan, row, layer, "projected")
            for layer in span.layers:
                going = {chunk for chunk in chunks if layer < exits.get(chunk, layer + 1)}
                for row in rows:
                    if plan.row_chunks[row] in going:
                        self._write_row(plan, row, layer, "ran")
                for chunk in going:
                    self.check(plan.sequences[chunk], layer, int(plan.starts[chunk]), int(plan.stops[chunk]))
        self.copy(plan.copies_after)
        for chunk, depth in exits.items():
            self._fill_above(plan, chunk, depth)
        for chunk, (sequence, stop) in enumerate(zip(plan.sequences, plan.stops.tolist(), strict=True)):
            filled = sequence.schedule.on_skip != "none"
            drafts = sequence.draft is not None and not sequence.draft.ended
            verified = sequence.draft is not None and not drafts  # true at every layer, rows that resumed included
            for layer in np.flatnonzero(filled | verified | layers_of(plan, chunk)).tolist():
                self.check(sequence, layer, int(plan.starts[chunk]), stop)

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
    projected, active, mlps = set(), set(), set()
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
        planned_mlps = mlps_of(plan, chunk)
        assert plan.depths[chunk] == -(-(planned.sum() + planned_mlps.sum()) // 2)
        assert (chunk in plan.sampled) == (stop == len(known_tokens(sequence)))
        for row, position in zip(range(rows.start, rows.stop), range(start, stop), strict=True):
            runs = planned if sequence.draft is not None else active_at(sequence, step_of(sequence, position))
            active |= {(row, layer) for layer in np.flatnonzero(runs).tolist()}
            mlps |= {
                (row, layer) for layer in np.flatnonzero(runs if sequence.draft is None else planned_mlps).tolist()
            }
            if sequence.schedule.on_skip == "project":
                projected |= {(row, layer) for layer in np.flatnonzero(~runs).tolist()}
    assert plan.sample_rows.tolist() == (plan.query_starts[plan.sampled + 1] - 1).tolist()
    assert _span_rows(plan, "attention") == active, "the spans differ from the schedules"
    assert _span_rows(plan, "mlp") == mlps, "the spans differ from the schedules"
    assert _span_rows(plan, "attention", projected=True) == projected
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


def _span_rows(plan: Plan, part: str, *, projected: bool = False) -> set[tuple[int, int]]:
    found, last = [], -1
    for span in plan.spans:
        if span.part not in ("layer", part):
            continue
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


def staying(plan: Plan) -> Plan:
    """A plan of decoded tokens, without the chunks of sequences that have left since it was made."""
    assert plan.multi_step is not None
    chunks = np.array([sequence.slot == slot for sequence, slot in zip(plan.sequences, plan.slots, strict=True)])
    each = np.arange(chunks.sum())
    parts = ("slots", "starts", "stops", "steps", "token_ids", "positions", "prompt_lengths", "depths")
    return replace(
        plan,
        sequences=[sequence for sequence, stays in zip(plan.sequences, chunks, strict=True) if stays],
        query_starts=np.arange(each.size + 1),
        row_chunks=each,
        sampled=each,
        sample_rows=each,
        multi_step=replace(
            plan.multi_step, steps=plan.multi_step.steps[chunks], cutoffs=plan.multi_step.cutoffs[chunks]
        ),
        **{part: getattr(plan, part)[chunks] for part in parts},
    )


def later_step(plan: Plan, taken: int) -> Plan:
    """The plan of the step that a device takes by itself after `taken` others."""
    assert plan.multi_step is not None
    steps = plan.steps + taken
    active = steps[:, None] < plan.multi_step.cutoffs
    spans = spans_of(active, None, plan.query_starts)
    assert all(span.rows is None for span in spans), "the rows of a layer do not come first"
    tokens = np.array([sequence.token_ids[-1] for sequence in plan.sequences])
    moved = {"starts": plan.starts + taken, "stops": plan.stops + taken, "positions": plan.positions + taken}
    return replace(
        plan, steps=steps, token_ids=tokens, depths=active.sum(axis=1), spans=spans, multi_step=None, **moved
    )
