"""From the chunks of a step to its plan: rows in order of depth, and the arrays that executor and sampler read."""

from __future__ import annotations

import numpy as np

from d3engine.depth import ExitRule
from d3engine.depth.schedule import windows_of
from d3engine.request.hidden_states import Positions, Steer
from d3engine.scheduling.kv_cache import FlatCopies, IntArray
from d3engine.scheduling.multi_step import at_last_tokens
from d3engine.scheduling.plan import (
    BoolArray,
    BridgedRows,
    CapturedRows,
    ExitingChunks,
    MultiStep,
    Plan,
    PromptRows,
    SteeredRows,
    rows_of,
    spans_of,
    spans_of_parts,
)
from d3engine.scheduling.running import Chunks, RunningTable, Trait
from d3engine.scheduling.sampling_mode import SamplingMode
from d3engine.scheduling.sequence import Sequence
from d3engine.scheduling.speculative import draft_work, resumed


def build_plan(
    chunks: Chunks,
    table: RunningTable,
    block_tables: IntArray,
    multi_step: MultiStep | None = None,
    copies: tuple[FlatCopies, FlatCopies] = (None, None),
) -> Plan:
    """The plan of `chunks`, deepest first, whose blocks stand in `block_tables` [slots, L, max_blocks].

    `copies` are those before and after its step.
    """
    drafts = bool(chunks.traits & Trait.DRAFTS)
    if multi_step is not None and multi_step.cycles:
        chunks, drafts = at_last_tokens(chunks, table), False  # the device knows what is drafted
    elif drafts:
        chunks = resumed(chunks, table).deepest_first()
    slots = chunks.slots
    query_starts, row_chunks, positions = _rows(chunks)
    sampled = (chunks.stops == table.num_tokens[slots]).nonzero()[0]
    sequences = [table.sequence(slot) for slot in slots.tolist()]
    mlps = table.mlps(slots, chunks.active) if chunks.traits & Trait.SPLITS_LAYERS else None
    depths, projected = chunks.active.sum(axis=1), _projected(chunks, table)
    if mlps is None:
        spans = spans_of(chunks.active, projected, query_starts)
    else:
        depths = (depths + mlps.sum(axis=1) + 1) // 2  # half a layer counts as one
        spans = spans_of_parts(chunks.active, mlps, projected, query_starts)
    prompt_rows = _prompt_rows(sequences, chunks, query_starts) if (chunks.steps < 0).any() else ()
    greedy = not prompt_rows and bool((table.choice[slots] == SamplingMode.GREEDY).all())
    num_steps = 1 if multi_step is None else multi_step.num_steps
    return Plan(
        sequences=sequences,
        slots=slots,
        starts=chunks.starts,
        stops=chunks.stops,
        steps=chunks.steps,
        query_starts=query_starts,
        token_ids=table.tokens[slots[row_chunks], positions],
        positions=positions,
        row_chunks=row_chunks,
        prompt_lengths=table.prompt_length[slots],
        depths=depths,
        tables=block_tables,
        spans=spans,
        sampled=sampled,
        sample_rows=query_starts[sampled + 1] - 1,
        greedy=greedy,
        prompt_rows=prompt_rows,
        captured=_captured_rows(sequences, chunks, query_starts, num_steps),
        steered=_steered_rows(sequences, chunks, query_starts, num_steps),
        copies_before=copies[0],
        copies_after=copies[1],
        multi_step=multi_step,
        exits=_exits(chunks, table),
        bridged=_bridged(chunks, table, query_starts),
        drafts=draft_work(chunks, table, query_starts, sampled) if drafts else None,
    )


def _rows(chunks: Chunks) -> tuple[IntArray, IntArray, IntArray]:
    """Where each chunk's rows begin [C + 1], and the chunk and the position of each row [R]."""
    count = chunks.slots.size
    lengths = chunks.stops - chunks.starts
    query_starts = np.arange(count + 1)
    if lengths.max(initial=1) == 1:
        return query_starts, query_starts[:-1], chunks.starts
    np.cumsum(lengths, out=query_starts[1:])
    row_chunks = np.arange(count).repeat(lengths)
    positions = np.arange(row_chunks.size) + (chunks.starts - query_starts[:-1])[row_chunks]
    return query_starts, row_chunks, positions


def _projected(chunks: Chunks, table: RunningTable) -> BoolArray | None:
    """Bool [C, L]: the layers that a chunk skips but leaves a projected entry in; None when there are none."""
    if not chunks.traits & Trait.FILLS:
        return None
    projects = [table.sequence(slot).schedule.on_skip == "project" for slot in chunks.slots.tolist()]
    projected: BoolArray = ~chunks.active & np.array(projects)[:, None]
    return projected if projected.any() else None


def _exits(chunks: Chunks, table: RunningTable) -> tuple[ExitingChunks, ...]:
    """The chunks that may leave early, by their rules; thresholds follow from each sequence's own max_tokens."""
    if not chunks.traits & Trait.EXITS:
        return ()
    slots, steps = chunks.slots, chunks.steps
    is_new = (steps > 0) & (steps == table.num_tokens[slots] - table.prompt_length[slots])
    found: dict[ExitRule, tuple[list[int], list[float]]] = {}
    for chunk in (table.having(Trait.EXITS, slots) & is_new).nonzero()[0].tolist():
        sequence = table.sequence(int(slots[chunk]))
        assert sequence.exit_rule is not None
        members, thresholds = found.setdefault(sequence.exit_rule, ([], []))
        members.append(chunk)
        thresholds.append(sequence.exit_rule.threshold_at(int(steps[chunk]), sequence.max_tokens))
    return tuple(ExitingChunks(rule, np.array(members), np.array(at)) for rule, (members, at) in found.items())


def _bridged(chunks: Chunks, table: RunningTable, query_starts: IntArray) -> tuple[BridgedRows, ...]:
    """The windows that are crossed by bridges, and the rows that cross them: those of equal windows together."""
    if not chunks.traits & Trait.BRIDGED:
        return ()
    found: dict[tuple[int, int, str], list[int]] = {}
    for chunk in table.having(Trait.BRIDGED, chunks.slots).nonzero()[0].tolist():
        bridges = table.bridges(int(chunks.slots[chunk]))
        if bridges is not None:
            for first, stop in windows_of(chunks.active[chunk]):
                found.setdefault((first, stop, bridges), []).append(chunk)
    return tuple(
        BridgedRows(bridges, first, stop, rows_of(np.array(members), query_starts))
        for (first, stop, bridges), members in sorted(found.items())
    )


def _prompt_rows(sequences: list[Sequence], chunks: Chunks, query_starts: IntArray) -> tuple[PromptRows, ...]:
    """The rows that predict a token of the prompt, of the sequences that asked for prompt_logprobs."""
    found = []
    for chunk, sequence in enumerate(sequences):
        start, first = int(chunks.starts[chunk]), int(query_starts[chunk])
        stop = min(int(chunks.stops[chunk]), len(sequence.prompt_token_ids) - 1)
        if sequence.params.prompt_logprobs is not None and start < stop and not sequence.token_ids:
            found.append(PromptRows(sequence, start, range(first, first + stop - start)))
    return tuple(found)


def _captured_rows(
    sequences: list[Sequence], chunks: Chunks, query_starts: IntArray, num_steps: int
) -> tuple[CapturedRows, ...]:
    """The rows whose hidden states are wanted at any of the next steps, or pooled: those of equal layers together."""
    if not (chunks.traits & Trait.HOOKED or (chunks.steps < 0).any()):
        return ()
    found: dict[int, list[IntArray]] = {}
    for chunk, sequence in enumerate(sequences):
        capture, pooling = sequence.params.captured, sequence.params.pooling
        if capture is not None:
            rows = _rows_at(capture.at(len(sequence.prompt_token_ids)), chunk, chunks, query_starts, num_steps)
            for layer in capture.numbers if rows.size else ():
                found.setdefault(layer, []).append(rows)
        elif pooling is not None and not sequence.token_ids:
            found.setdefault(chunks.active.shape[1], []).append(
                _pooled_rows(pooling, sequence, chunk, chunks, query_starts)
            )
    return tuple(CapturedRows(layer, rows) for layer in sorted(found) if (rows := np.concatenate(found[layer])).size)


def _pooled_rows(pooling: str, sequence: Sequence, chunk: int, chunks: Chunks, query_starts: IntArray) -> IntArray:
    """The rows of a chunk of a prompt whose last hidden states are pooled."""
    rows = np.arange(query_starts[chunk], query_starts[chunk + 1])
    if pooling == "mean":
        return rows
    is_there = chunks.starts[chunk] == 0 if pooling == "cls" else chunks.stops[chunk] == len(sequence.prompt_token_ids)
    place = 0 if pooling == "cls" else -1
    return rows[[place]] if is_there else rows[:0]


def _steered_rows(
    sequences: list[Sequence], chunks: Chunks, query_starts: IntArray, num_steps: int
) -> tuple[SteeredRows, ...]:
    """The rows whose hidden states are changed at any of the next steps: those of equal changes together."""
    if not chunks.traits & Trait.HOOKED:
        return ()
    found: dict[tuple[Steer, Positions], list[IntArray]] = {}
    for chunk, sequence in enumerate(sequences):
        steer = sequence.params.steered
        if steer is not None:
            positions = steer.at(len(sequence.prompt_token_ids))
            rows = _rows_at(positions, chunk, chunks, query_starts, num_steps)
            if rows.size:
                found.setdefault((steer, positions), []).append(rows)
    groups = [
        SteeredRows(layer, steer, positions, np.concatenate(rows))
        for (steer, positions), rows in found.items()
        for layer in steer.changes
    ]
    return tuple(sorted(groups, key=lambda group: group.layer))


def _rows_at(positions: Positions, chunk: int, chunks: Chunks, query_starts: IntArray, num_steps: int) -> IntArray:
    """The rows of a chunk that are at these positions, or will be at one of the next steps."""
    start, stop, first = int(chunks.starts[chunk]), int(chunks.stops[chunk]), int(query_starts[chunk])
    if num_steps > 1:
        return np.arange(first, first + 1 if positions.count_in(start, start + num_steps) else first)
    return first + positions.among(np.arange(start, stop)).nonzero()[0]
