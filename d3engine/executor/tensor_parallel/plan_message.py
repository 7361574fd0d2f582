"""A plan for other ranks: each side keeps what was sent, so a message holds what is new of
block tables and sequences."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np

from d3engine.depth import NEVER, ExitRule, Schedule
from d3engine.request.params import CHECKS, SamplingParams
from d3engine.scheduling.kv_cache import IntArray
from d3engine.scheduling.plan import (
    BridgedRows,
    CapturedRows,
    DraftWork,
    ExitingChunks,
    HiddenRows,
    MultiStep,
    Plan,
    PromptRows,
    RunControl,
    Span,
)
from d3engine.scheduling.sampling_mode import SamplingMode, choice_of
from d3engine.scheduling.sequence import Sequence
from d3engine.utils.arguments import Numbers


def pack(value: Any) -> bytes:
    """`value` as bytes: None, bools, numbers, strings, lists, tuples, ranges, dicts by strings, arrays and records.

    Tuples come back as tuples; an enum comes back as its number.
    """
    arrays: list[np.ndarray[Any, Any]] = []
    text = json.dumps(_plain(value, arrays), separators=(",", ":")).encode()
    head = json.dumps([[array.dtype.str, array.shape] for array in arrays], separators=(",", ":")).encode()
    lengths = np.array([len(text), len(head)], np.int64)
    return b"".join([lengths.tobytes(), text, head, *(np.ascontiguousarray(array).data for array in arrays)])


def unpack(message: bytes, kinds: Mapping[str, type]) -> Any:
    """The value again; records are of these `kinds`, by name. Arrays may be written to."""
    text_length, head_length = np.frombuffer(message, np.int64, 2).tolist()
    end = 16 + text_length
    arrays, start = [], end + head_length
    for dtype, shape in json.loads(message[end:start]):
        kind = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        arrays.append(np.frombuffer(message, kind, count, start).reshape(shape).copy())
        start += count * kind.itemsize
    return _value(json.loads(message[16:end]), arrays, kinds)


def _plain(value: Any, arrays: list[np.ndarray[Any, Any]]) -> Any:
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {"array": len(arrays) - 1}
    if isinstance(value, np.generic):
        return value.item()
    if is_dataclass(value) and not isinstance(value, type):
        return {
            "record": type(value).__name__,
            "of": {field.name: _plain(getattr(value, field.name), arrays) for field in fields(value)},
        }
    if isinstance(value, range):
        return {"range": [value.start, value.stop]}
    if isinstance(value, dict):
        return {"dict": [[_plain(key, arrays), _plain(item, arrays)] for key, item in value.items()]}
    if isinstance(value, tuple | frozenset):
        return {"tuple": [_plain(item, arrays) for item in value]}
    return [_plain(item, arrays) for item in value] if isinstance(value, list) else value


def _value(plain: Any, arrays: list[np.ndarray[Any, Any]], kinds: Mapping[str, type]) -> Any:
    if isinstance(plain, list):
        return [_value(item, arrays, kinds) for item in plain]
    match plain:
        case {"array": index}:
            return arrays[index]
        case {"record": name, "of": found}:
            return kinds[name](**{field: _value(item, arrays, kinds) for field, item in found.items()})
        case {"range": [start, stop]}:
            return range(start, stop)
        case {"tuple": items}:
            return tuple(_value(item, arrays, kinds) for item in items)
        case {"dict": items}:
            return {_value(key, arrays, kinds): _value(item, arrays, kinds) for key, item in items}
    return plain


_CHOOSING = ("top_k", *(name for name, check in CHECKS.items() if isinstance(check, Numbers)))
"""What of a sequence's parameters choosing a token on a device takes."""


@dataclass(frozen=True, slots=True)
class _Changes:
    """Entries of the block tables: where they lie in the flat tables of this shape, and what stands there now."""

    shape: tuple[int, ...]
    places: IntArray
    blocks: IntArray


@dataclass(frozen=True, slots=True)
class _Message:
    """One plan. `plan` is None where it is the last one again, for its next step, of whose run there may now be more;
    `is_ended` as of its control."""

    plan: dict[str, Any] | None
    num_steps: int
    num_preemptions: IntArray | None  # of each chunk's sequence
    facts: dict[int, dict[str, Any]]  # of sequences that are new, by chunk
    answers: dict[int, list[int]]  # by chunk, where penalties count their tokens
    changes: _Changes | None
    drafts: DraftWork | None
    prompt_rows: list[tuple[int, range]]
    is_followed: bool
    is_ended: bool


_RECORDS = (
    *(_Message, _Changes, Span, BridgedRows, CapturedRows, ExitingChunks, ExitRule, HiddenRows, DraftWork, MultiStep),
)
_KINDS: dict[str, type] = {kind.__name__: kind for kind in _RECORDS}
_AS_THEY_ARE = [
    field.name
    for field in fields(Plan)
    if field.name not in ("sequences", "tables", "prompt_rows", "drafts", "steered")  # steering has no ranks
]


class PlanSender:
    """Makes messages of plans, for ranks that hear all of them in order."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._tables: IntArray | None = None  # as the others have them
        self._known: dict[int, Sequence] = {}  # who was told of, by slot
        self._run: tuple[RunControl | None, int] = None, 1  # the last plan's, and its steps

    def message(self, plan: Plan) -> bytes:
        """The plan as bytes; in a run whose steps the host takes one by one, it is sent once and then referred to."""
        control, num_steps = None, 1
        if plan.multi_step is not None:
            control, num_steps = plan.multi_step.control, plan.multi_step.num_steps
        is_ended = control is not None and control.is_ended
        (last, last_num_steps), self._run = self._run, (control, num_steps)
        if control is not None and control is last:
            changes = self._changes(plan, num_steps) if num_steps > last_num_steps else None
            return pack(_Message(None, num_steps, None, {}, {}, changes, None, [], True, is_ended))
        bare = replace(plan, multi_step=None if plan.multi_step is None else replace(plan.multi_step, control=None))
        return pack(
            _Message(
                plan={name: getattr(bare, name) for name in _AS_THEY_ARE},
                num_steps=num_steps,
                num_preemptions=np.array([sequence.num_preemptions for sequence in plan.sequences]),
                facts=self._facts_of_new(plan),
                answers=_answers(plan),
                changes=self._changes(plan, num_steps),
                drafts=None if plan.drafts is None else replace(plan.drafts, model=None),
                prompt_rows=[(prompt.position, prompt.rows) for prompt in plan.prompt_rows],
                is_followed=control is not None,
                is_ended=is_ended,
            )
        )

    def _facts_of_new(self, plan: Plan) -> dict[int, dict[str, Any]]:
        found = {}
        for chunk, (slot, sequence) in enumerate(zip(plan.slots.tolist(), plan.sequences, strict=True)):
            if self._known.get(slot) is not sequence:
                self._known[slot] = sequence
                found[chunk] = _facts(sequence)
        return found

    def _changes(self, plan: Plan, num_steps: int) -> _Changes:
        tables, slots = plan.tables, plan.slots
        if self._tables is None or self._tables.shape != tables.shape:  # those of the warm-up have one row
            self._tables = np.zeros_like(tables)
        columns = -(-int(plan.stops.max() + num_steps - 1) // self._block_size)
        now = tables[slots, :, :columns]
        chunks, layers, places = (now != self._tables[slots, :, :columns]).nonzero()
        changed = slots[chunks], layers, places
        blocks = tables[changed]
        self._tables[changed] = blocks
        return _Changes(tables.shape, np.ravel_multi_index(changed, tables.shape), blocks)


class PlanReceiver:
    """Makes plans of messages again. Their sequences stand in for the real ones: no more than executors ask for."""

    def __init__(self) -> None:
        self._tables: IntArray = np.empty(0, np.int32)
        self._known: dict[int, Sequence] = {}
        self._last: Plan | None = None

    def plan(self, message: bytes) -> Plan:
        """The next plan; that of a run again where its next step is to be taken."""
        heard: _Message = unpack(message, _KINDS)
        if heard.changes is not None:
            if self._tables.shape != heard.changes.shape:
                self._tables = np.zeros(heard.changes.shape, np.int32)
            self._tables.reshape(-1)[heard.changes.places] = heard.changes.blocks
        if heard.plan is not None:
            self._last = self._new_plan(heard.plan, heard)
        assert self._last is not None
        run = self._last.multi_step
        if run is not None and run.num_steps < heard.num_steps:
            run = replace(run, num_steps=heard.num_steps)
            self._last = replace(self._last, multi_step=run)
        if run is not None and run.control is not None and heard.is_ended:
            run.control.end()
        return self._last

    def _new_plan(self, given: dict[str, Any], heard: _Message) -> Plan:
        sequences = [self._sequence(chunk, slot, heard) for chunk, slot in enumerate(given["slots"].tolist())]
        multi_step: MultiStep | None = given["multi_step"]
        if multi_step is not None:
            control = RunControl() if heard.is_followed else None
            given = given | {"multi_step": replace(multi_step, choice=SamplingMode(multi_step.choice), control=control)}
        prompt_rows = tuple(PromptRows(sequences[0], position, rows) for position, rows in heard.prompt_rows)
        return Plan(sequences=sequences, tables=self._tables, prompt_rows=prompt_rows, drafts=heard.drafts, **given)

    def _sequence(self, chunk: int, slot: int, heard: _Message) -> Sequence:
        if chunk in heard.facts:
            self._known[slot] = _stand_in(self._tables.shape[1], **heard.facts[chunk])
        sequence = self._known[slot]
        assert heard.num_preemptions is not None
        sequence.num_preemptions = int(heard.num_preemptions[chunk])
        sequence.token_ids = heard.answers.get(chunk, sequence.token_ids)
        return sequence


def _answers(plan: Plan) -> dict[int, list[int]]:
    if plan.multi_step is None or plan.multi_step.choice is not SamplingMode.PENALISE:
        return {}
    return {chunk: sequence.token_ids for chunk, sequence in enumerate(plan.sequences)}


def _facts(sequence: Sequence) -> dict[str, Any]:
    choice = choice_of(sequence)
    return {
        "params": {name: getattr(sequence.params, name) for name in _CHOOSING},
        "is_hosts": choice > SamplingMode.PENALISE,
        "seed": sequence.seed,
        "index": sequence.index,
        "on_skip": sequence.schedule.on_skip,
        "prompt": sequence.prompt_token_ids if choice is SamplingMode.PENALISE else [],
    }


def _stand_in(
    num_layers: int, *, params: dict[str, Any], is_hosts: bool, seed: int, index: int, on_skip: Any, prompt: list[int]
) -> Sequence:
    """A sequence of which executors find what they ask for; that only the host can choose its tokens shows in them."""
    return Sequence(
        request_id="",
        index=index,
        prompt_token_ids=prompt,
        params=SamplingParams(**params, logprobs=0 if is_hosts else None),
        schedule=Schedule.nested([NEVER] * num_layers, on_skip),
        eos_token_ids=frozenset(),
        seed=seed,
        priority=0,
        arrival=0,
        max_length=0,
    )
