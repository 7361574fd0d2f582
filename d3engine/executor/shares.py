"""Some sequences of a step as a plan for another executor. No sequence reads what another
writes, so shares run one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from d3engine.executor.interface import Computed
from d3engine.scheduling.kv_cache import IntArray
from d3engine.scheduling.plan import DraftWork, HiddenRows, Plan, Span, rows_of


@dataclass(frozen=True, slots=True)
class Share:
    """The chunks of a step that one executor takes: their plan, and which of the step's chunks and rows they are.

    What the step copies is not in it: that is done before and after all shares.
    """

    plan: Plan
    chunks: IntArray
    rows: IntArray


def share_of(plan: Plan, chunks: IntArray) -> Share:
    """The share of `chunks`, at least one, in order, of a single step."""
    assert plan.multi_step is None, "a run of steps is one executor's"
    rows = rows_of(chunks, plan.query_starts)
    new_chunk, new_row = _places(chunks, len(plan.sequences)), _places(rows, plan.num_rows)
    query_starts = np.concatenate(([0], np.cumsum(np.diff(plan.query_starts)[chunks])))
    sampled = np.isin(plan.sampled, chunks).nonzero()[0]
    new_sampled = new_chunk[plan.sampled[sampled]]
    own = replace(
        plan,
        sequences=[plan.sequences[chunk] for chunk in chunks.tolist()],
        slots=plan.slots[chunks],
        starts=plan.starts[chunks],
        stops=plan.stops[chunks],
        steps=plan.steps[chunks],
        query_starts=query_starts,
        token_ids=plan.token_ids[rows],
        positions=plan.positions[rows],
        row_chunks=new_chunk[plan.row_chunks[rows]],
        prompt_lengths=plan.prompt_lengths[chunks],
        depths=plan.depths[chunks],
        spans=tuple(_spans(plan, new_chunk, new_row, query_starts)),
        sampled=new_sampled,
        sample_rows=query_starts[new_sampled + 1] - 1,
        prompt_rows=tuple(
            replace(asked, rows=range(first, first + len(asked.rows)))
            for asked in plan.prompt_rows
            if (first := int(new_row[asked.rows.start])) >= 0
        ),
        captured=tuple(replace(group, rows=_inside(group.rows, new_row)) for group in plan.captured),
        steered=tuple(
            replace(group, rows=inside) for group in plan.steered if (inside := _inside(group.rows, new_row)).size
        ),
        copies_before=None,
        copies_after=None,
        exits=tuple(
            replace(group, chunks=new_chunk[group.chunks[here]], thresholds=group.thresholds[here])
            for group in plan.exits
            if (here := new_chunk[group.chunks] >= 0).any()
        ),
        drafts=None if plan.drafts is None else _drafts(plan.drafts, sampled, new_row),
        bridged=tuple(
            replace(crossing, rows=inside)
            for crossing in plan.bridged
            if (inside := _inside(crossing.rows, new_row)).size
        ),
    )
    return Share(own, chunks, rows)


def joined(plan: Plan, computed: Iterable[tuple[Share, Computed]]) -> Computed:
    """What the shares of a plan have computed as the whole step's: logits [logit_rows, V], and what else came of it."""
    places = _places(plan.logit_rows, plan.num_rows)
    captured_at = [_places(group.rows, plan.num_rows) for group in plan.captured]
    logits, depths, captured = None, None, []
    for share, own in computed:
        assert isinstance(own.logits, Tensor), "without ranks tokens are the host's to choose"
        if logits is None:
            logits = own.logits.new_empty((plan.logit_rows.size, own.logits.shape[1]))
            captured = [
                states.new_empty((1, group.rows.size, states.shape[2]))
                for group, states in zip(plan.captured, own.captured, strict=True)
            ]
        logits[places[share.rows[share.plan.logit_rows]]] = own.logits
        if own.depths is not None:
            depths = plan.depths.copy() if depths is None else depths
            depths[share.chunks] = own.depths
        for whole, at, group, states in zip(captured, captured_at, share.plan.captured, own.captured, strict=True):
            whole[:, at[share.rows[group.rows]]] = states.to(whole.dtype)
    assert logits is not None, "a step has at least one share"
    return Computed(logits, depths, tuple(captured))


def _places(members: IntArray, count: int) -> IntArray:
    """Where each of `count` stands among `members`; -1 for those that do not."""
    places = np.full(count, -1)
    places[members] = np.arange(members.size)
    return places


def _inside(members: IntArray, new: IntArray) -> IntArray:
    """The new places of those members that have one."""
    places: IntArray = new[members]
    return places[places >= 0]


def _spans(plan: Plan, new_chunk: IntArray, new_row: IntArray, query_starts: IntArray) -> Iterable[Span]:
    for span in plan.spans:
        chunks = _inside(np.arange(span.num_chunks) if span.chunks is None else span.chunks, new_chunk)
        beside = None if span.projected_rows is None else _inside(span.projected_rows, new_row)
        beside = None if beside is None or not beside.size else beside
        if not chunks.size and beside is None:
            continue
        is_prefix = bool((chunks == np.arange(chunks.size)).all())
        rows = None if is_prefix else rows_of(chunks, query_starts)
        num_rows = int(query_starts[chunks.size]) if rows is None else rows.size
        kept = None if is_prefix else chunks
        yield Span(span.layers, chunks.size, num_rows, kept, rows, beside, span.part)


def _drafts(drafts: DraftWork, sampled: IntArray, new_row: IntArray) -> DraftWork | None:
    """What a share does for sequences that draft, `sampled` being its places among the step's; None where none does."""
    new_place = {place: nth for nth, place in enumerate(sampled.tolist())}
    own = DraftWork(
        proposing=frozenset(new_place[place] for place in drafts.proposing if place in new_place),
        judging={new_place[place]: new_row[rows] for place, rows in drafts.judging.items() if place in new_place},
        kept=_states(drafts.kept, new_row),
        resumed=_states(drafts.resumed, new_row),
    )
    return own if own.proposing or own.judging or own.kept or own.resumed else None


def _states(states: Iterable[HiddenRows], new_row: IntArray) -> tuple[HiddenRows, ...]:
    found = []
    for group in states:
        here = new_row[group.rows] >= 0
        if here.any():
            found.append(HiddenRows(group.layer, new_row[group.rows[here]], group.places[here]))
    return tuple(found)
