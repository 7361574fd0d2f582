"""Draft-and-verify iterations as the native library takes them: `D3SpeculativeLoop` of `types.h`, made of arrays."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_double, c_int32, c_int64, c_void_p
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import numpy.typing as npt

from d3engine.kernels.native.runs import DRAFT_GRAMMAR, Draws, GrammarCallback, sampling_structures

if TYPE_CHECKING:
    from d3engine.kernels.native.library import Decoder

Int64Array = npt.NDArray[np.int64]

NUM_COUNTS = 5
"""Numbers that an iteration leaves of a row: see `Decoder.run_speculative_loop`."""

COST_ROWS = 64
"""Rows of the longest step whose time the loop knows."""

_BINS = 16


class Drafter(IntEnum):
    """Who drafted; the last two also say who may draft for a row, as bits."""

    OWN_LAYERS = 0
    DRAFT_MODEL = 1
    LOOKUP = 2


class DraftCosts(Structure):
    """`D3DraftCosts`: what drafts cost and how often they are right. Loops read it and bring it up to date.

    `verify` and `draft` [COST_ROWS + 1] are the seconds of a step by its rows, of the model and of its draft model;
    `mask` are those of a grammar's mask.
    """

    _fields_ = (
        ("verify", c_double * (COST_ROWS + 1)),
        ("draft", c_double * (COST_ROWS + 1)),
        ("right", (c_double * _BINS) * 2),
        ("judged", (c_double * _BINS) * 2),
        ("model_right", c_double),
        ("model_judged", c_double),
        ("gain", c_double),
        ("idle", c_int64),
        ("mask", c_double),
    )

    @classmethod
    def of(cls, verify: dict[int, float], draft: dict[int, float] | None = None) -> DraftCosts:
        """The costs of measured steps: seconds by rows, at least of 1; other numbers of rows are interpolated."""
        made = cls(gain=1.0)
        rows = np.arange(COST_ROWS + 1)
        for name, measured in (("verify", verify), ("draft", draft)):
            if measured:
                known = sorted(measured)
                times = np.interp(rows, known, [measured[count] for count in known])
                if len(known) > 1:  # beyond the longest step that was measured, by the last two
                    before, last = known[-2:]
                    slope = max(0.0, (measured[last] - measured[before]) / (last - before))
                    times[last:] = measured[last] + slope * (rows[last:] - last)
                # A step of fewer rows takes no longer: what seemed so was interrupted.
                getattr(made, name)[:] = np.minimum.accumulate(times[::-1])[::-1].tolist()
        return made


@dataclass(frozen=True, eq=False)
class Drafts:
    """How rows draft, int64 [rows] unless said otherwise.

    Attributes:
        begun: [rows, most] the tokens that the first drafts have already; `most` is the longest draft of any row.
        num_begun: the number of these tokens.
        first_lengths: the length of the first drafts, less than `rooms`.
        lengths: the length of later ones, where there is room.
        most_lengths: what `lengths` grow up to.
        adapts: whether they grow by one after a draft that was accepted whole, and shrink by one after any other.
        rooms: tokens that the answers may still get, at least one.
        places: where in the hidden states a row's drafts keep theirs, one behind the other; -1: nowhere, and
            verification computes all layers again.
    """

    begun: Int64Array
    num_begun: Int64Array
    first_lengths: Int64Array
    lengths: Int64Array
    most_lengths: Int64Array
    adapts: Int64Array
    rooms: Int64Array
    places: Int64Array

    @property
    def most(self) -> int:
        """Tokens of the longest draft."""
        most: int = self.begun.shape[1]
        return most


@dataclass(frozen=True, eq=False)
class TextDrafts:
    """How the rows draft that draft by a second model or by lookups; `drafters` of others are 0.

    Attributes:
        drafters: int64 [rows]: a sum of `Drafter.DRAFT_MODEL` and `Drafter.LOOKUP`.
        texts: int64 [rows, room] the tokens of prompt and answer, with room for those to come; the loop writes it.
        history: int64 [n] other texts to look up continuations in, kept apart by -1.
        stops: float32 [rows]: a draft of the draft model ends with a token of less confidence; None: it does not.
        costs: by which the loop chooses who drafts and how long; None: drafts have the lengths of `Drafts`.
        tables: int32 [slots, layers, blocks] of the draft model, or None.
        positions: int64 [rows] how much of each text the draft model has computed, or None.
    """

    drafters: Int64Array
    texts: Int64Array
    history: Int64Array
    stops: npt.NDArray[np.float32] | None = None
    costs: DraftCosts | None = None
    tables: npt.NDArray[np.integer] | None = None
    positions: npt.NDArray[np.integer] | None = None


@dataclass(frozen=True, eq=False)
class LoopLogits:
    """Where a loop leaves the logits of verified tokens: float32 [iterations, rows, most + 1, V], and for which rows,
    uint8 [rows]."""

    logits: npt.NDArray[np.float32]
    reports: npt.NDArray[np.uint8]


class LoopOptions(TypedDict, total=False):
    """What a loop takes besides its rows and drafts; see `Decoder.run_speculative_loop`."""

    ends: Int64Array | None
    draws: Draws | None
    by_text: TextDrafts | None
    draft_model: Decoder | None
    logits: LoopLogits | None


class SpeculativeLoopStructure(Structure):
    """`D3SpeculativeLoop`."""

    _fields_ = (
        ("rows", c_int32),
        ("iterations", c_int32),
        ("most", c_int32),
        *((name, c_void_p) for name in ("tokens", "positions", "generation", "slots", "cutoffs", "tables")),
        *((name, c_void_p) for name in ("begun", "num_begun", "first_lengths", "lengths", "most_lengths", "adapts")),
        *((name, c_void_p) for name in ("rooms", "ends")),
        ("most_ends", c_int64),
        ("states", c_void_p),
        ("num_states", c_int64),
        *((name, c_void_p) for name in ("places", "drafted", "counts", "control")),
        ("taken", POINTER(c_int32)),
        *((name, c_void_p) for name in ("bridges", "temperatures", "seeds", "indices", "sampling", "texts")),
        ("text_room", c_int64),
        *((name, c_void_p) for name in ("drafters", "draft_model", "draft_tables", "draft_positions", "history")),
        ("history_length", c_int64),
        *((name, c_void_p) for name in ("stops", "costs", "logits", "reports", "adapters")),
        ("grammar", DRAFT_GRAMMAR),
    )


def structure_of(
    rows: dict[str, npt.NDArray[Any]],
    iterations: int,
    drafts: Drafts,
    states: npt.NDArray[np.float32],
    control: npt.NDArray[np.int32] | None,
    asked: LoopOptions,
    vocab_size: int,
) -> tuple[SpeculativeLoopStructure, dict[str, Any]]:
    """The structure of some iterations, and what must live as long as it, `drafted` and `counts` among that."""
    count, ends, draws = len(rows["tokens"]), asked.get("ends"), asked.get("draws")
    by_text, logits = asked.get("by_text"), asked.get("logits")
    given: dict[str, Any] = {
        **rows,
        **{field.name: np.ascontiguousarray(getattr(drafts, field.name), np.int64) for field in fields(drafts)},
        "states": states,
        "drafted": np.empty((iterations, count, drafts.most), np.int64),
        "counts": np.empty((iterations, count, NUM_COUNTS), np.int64),
    }
    if ends is not None:
        given["ends"] = np.ascontiguousarray(ends, np.int64)
    if control is not None:
        given["control"] = control
    if draws is not None:
        given["temperatures"] = np.ascontiguousarray(draws.temperatures, np.float32)
        given["seeds"] = np.ascontiguousarray(draws.seeds, np.int64)
        given["indices"] = np.ascontiguousarray(draws.indices, np.int64)
    if logits is not None:
        given |= {"logits": logits.logits, "reports": logits.reports}
    if by_text is not None:
        given |= _arrays_of(by_text)
    addresses = {name: array.ctypes.data for name, array in given.items()}
    made = SpeculativeLoopStructure(count, iterations, drafts.most, **addresses)
    made.num_states = len(states)
    made.most_ends = 0 if ends is None else ends.shape[1]
    if draws is not None and draws.asked is not None:
        sampling, keeps = sampling_structures(draws.asked, 0)
        made.sampling = ctypes.addressof(sampling)
        given["sampling"] = (sampling, keeps)
    if draws is not None and draws.draft_form is not None:
        given["grammar"] = GrammarCallback.of_loop(draws.draft_form, vocab_size)
        made.grammar = given["grammar"].function
    if by_text is not None:
        made.text_room, made.history_length = by_text.texts.shape[1], by_text.history.size
        if by_text.costs is not None:
            made.costs = ctypes.addressof(by_text.costs)
            given["costs"] = by_text.costs
    return made, given


def _arrays_of(by_text: TextDrafts) -> dict[str, npt.NDArray[Any]]:
    texts = by_text.texts
    assert texts.dtype == np.int64, "the loop writes the texts"
    assert texts.flags.c_contiguous, "row by row"
    found: dict[str, npt.NDArray[Any]] = {
        "texts": texts,
        "drafters": np.ascontiguousarray(by_text.drafters, np.int64),
        "history": np.ascontiguousarray(by_text.history, np.int64),
    }
    if by_text.stops is not None:
        found["stops"] = np.ascontiguousarray(by_text.stops, np.float32)
    if by_text.tables is not None and by_text.positions is not None:
        found["draft_tables"] = np.ascontiguousarray(by_text.tables, np.int32)
        found["draft_positions"] = np.ascontiguousarray(by_text.positions, np.int64)
    return found
