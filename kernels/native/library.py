"""The shared library, and the decoder that runs a model's tensors in place."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_int32, c_int64, c_void_p
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt
import torch

from d3engine.kernels.blocks import BlockLanesWeight, BlockWeight, in_channels
from d3engine.kernels.interleaved import LANES
from d3engine.kernels.native import build
from d3engine.kernels.native.model import (
    ACTIVATIONS,
    LayerStructure,
    Linear,
    MatrixStructure,
    ModelStructure,
    NativeError,
    NativeModel,
    address_of,
    pool_addresses,
)
from d3engine.kernels.native.runs import (
    STATE_FIELDS,
    Draws,
    GrammarCallback,
    HiddenStates,
    Hooks,
    Rows,
    RunStructure,
    sampling_structures,
)
from d3engine.kernels.native.speculative_loop import (
    Drafts,
    Int64Array,
    LoopOptions,
    SpeculativeLoopStructure,
    structure_of,
)
from d3engine.kernels.weight_format import WeightFormat


class LibraryMissing(Exception):
    """No native library; the message says why, and what to do."""


_REFUSALS = {
    1: "this machine does not run the instruction set that was asked for",
    2: "the sizes of the model do not fit each other, or a weight is of a kind that is not known",
    3: "there is not enough memory for the decoder",
    4: "a run has more rows than the decoder was made for, or no rows or no steps",
    5: "a token id is outside the vocabulary",
    6: "a position is outside the rotations or the block tables",
    7: "a slot is outside the block tables",
    8: "a layer runs for a row whose table has no block of the pool there",
    9: "the decoder is at work in another thread",
    10: "a place is outside the hidden states that the run brings, or a hook outside its rows or the model's layers",
    11: "a row leaves out layers for which it has no bridge, or one of other sizes than the model's",
    12: "a draft is longer than the longest, or than the room of its answer",
    13: "the texts that drafts follow, or what the draft model needs, is missing or too short",
    14: "a map has other sizes than its matrix, or too high a rank",
}


class Decoder:
    """Runs steps of a model. `max_blocks` and `num_slots` are the sizes of the block tables of its runs.

    It reads the model's weights in place, and writes keys and values into the model's pool.
    """

    def __init__(
        self, model: NativeModel, *, max_blocks: int, num_slots: int, max_rows: int, num_threads: int, isa: str = "auto"
    ) -> None:
        self._library = library()
        self._keeps = model  # every step reads its memory
        self.vocab_size, self._hidden = model.embedding.shape
        self.table_shape = (num_slots, len(model.layers), max_blocks)
        self.max_rows = max_rows
        self.num_threads = num_threads
        self.isa = _best_isa(model) if isa == "auto" else isa
        num_blocks, _, block_size, kv_heads, head_dim = model.pool.shape
        layers = (LayerStructure * len(model.layers))(*(layer.structure() for layer in model.layers))
        widest = max(layer.down.weight.shape[1] for layer in model.layers)
        sizes = (
            *(len(model.layers), model.embedding.shape[1], widest, model.num_heads),
            *(kv_heads, head_dim, self.vocab_size, block_size, max_blocks, num_blocks, num_slots),
            *(model.max_positions, max_rows, num_threads, _all_isas().index(self.isa)),
        )
        structure = ModelStructure(
            *sizes,
            model.eps,
            model.scale,
            Linear(model.embedding).structure(),
            Linear(model.lm_head).structure(),
            None if model.head_tokens is None else address_of(model.head_tokens, torch.int64),
            0 if model.head_tokens is None else model.head_tokens.numel(),
            layers,
            address_of(model.final_norm, torch.float32),
            *pool_addresses(model.pool),
            ACTIVATIONS.index(model.activation),
            model.embedding_scale,
            model.attention_cap or 0.0,
            model.logit_cap or 0.0,
        )
        made = c_void_p()
        _check(self._library.d3_create(byref(structure), byref(made)))
        self._handle = made
        self._finalizer = weakref.finalize(self, self._library.d3_destroy, made)
        self._background: tuple[Any, ...] | None = None

    def run(
        self,
        rows: Rows,
        steps: int,
        *,
        draws: Draws | None = None,
        logits: npt.NDArray[np.float32] | None = None,
        logit_places: npt.NDArray[np.int64] | None = None,
        yields: npt.NDArray[np.bool_] | None = None,
        states: HiddenStates | None = None,
        ends: npt.NDArray[np.int64] | None = None,
        hooks: Hooks | None = None,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Run `steps` steps; returns the chosen tokens and their scores, both [steps, rows].

        `ends` [rows, n] are tokens that end an answer, padded with -1. The run stops early once every row has met one
        of its ends, that of its grammar, or a score that is not finite. Without `draws` every row takes its likeliest
        token. `logits` float32 [steps, rows, V] is written, or, with `logit_places` int64 [rows], [steps, places, V]
        for the rows that have a place; -1 means none. In a single step `yields` [rows] selects the rows that need
        these three; those of the others are undefined. What `hooks` capture is written. Raises `NativeError` for
        whatever would read or write out of bounds, before it does, and what `draws.form` raises.
        """
        self._check_tables(rows)
        asks = None if yields is None else np.ascontiguousarray(yields, np.uint8)
        stops = None if ends is None else np.ascontiguousarray(ends, np.int64)
        wanted = self._wanted(steps, len(rows.tokens), logits, logit_places)
        run, given = self._run_of(rows, steps, draws, yields=asks, ends=stops, **wanted, **self._arrays_of(states))
        if states is not None:
            run.num_states = len(states.states)
        if ends is not None:
            run.most_ends = ends.shape[1]
        self._hook(run, given, hooks, steps)
        taken = c_int32()
        run.taken = ctypes.pointer(taken)
        _check(self._library.d3_run(self._handle, byref(run)))
        _raise_error_of_grammar(given)
        return given["chosen"][: taken.value], given["scores"][: taken.value]

    def begin(
        self,
        rows: Rows,
        steps: int,
        control: npt.NDArray[np.int32],
        *,
        draws: Draws | None = None,
        logits: npt.NDArray[np.float32] | None = None,
        logit_places: npt.NDArray[np.int64] | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        """Begin `steps` steps in a background thread, and return; `take` returns their results.

        `control` int32 [2] may be read and written during the run: steps begin as long as the first is 0; the second
        counts those that have begun. The tables are copied; no other run may begin until `finish`. `logits`, and what
        `hooks` capture, are written as by `run`, each step's before `take` returns its tokens. Raises `NativeError` as
        `run` does.
        """
        wanted = self._wanted(steps, len(rows.tokens), logits, logit_places)
        rows = replace(rows, slots=np.arange(len(rows.tokens)), tables=self._own_tables(rows))
        run, given = self._run_of(rows, steps, draws, control=control, **wanted)
        self._hook(run, given, hooks, steps)
        _check(self._library.d3_begin(self._handle, byref(run)))
        self._background = (given, given["chosen"], given["scores"])
        self._taken = 0

    def run_speculative_loop(
        self,
        rows: Rows,
        iterations: int,
        drafts: Drafts,
        states: npt.NDArray[np.float32],
        **asked: Unpack[LoopOptions],
    ) -> tuple[Int64Array, Int64Array]:
        """Draft and verify `iterations` times, or until every row has ended; returns drafted tokens and counts.

        `rows` are the last tokens of the answers; a draft by their own layers runs layer l if it begins at a step below
        the row's cutoff there. Others draft as `by_text` says, perhaps by `draft_model`, which no other thread may use
        meanwhile. Tokens are chosen as `draws` says, `draft_form` among it. The tokens are [iterations, rows, most].
        The counts [iterations, rows, 5] are: tokens of the draft, accepted ones, and the next token at full depth, -1
        if its logits are not finite; the `Drafter`, and how many positions the draft model has computed. Counts of a
        row that had ended before, by a token of `ends` as in `run`, its grammar, its room or such logits, are all -1.
        `states` float32 [places, H] and `logits` are written. Raises `NativeError` as `run` does.
        """
        self._check_tables(rows)
        made, given = self._loop_of(rows, iterations, drafts, states, None, asked)
        taken = c_int32()
        made.taken = ctypes.pointer(taken)
        _check(self._library.d3_run_speculative_loop(self._handle, byref(made)))
        _raise_error_of_grammar(given)
        return given["drafted"][: taken.value], given["counts"][: taken.value]

    def begin_speculative_loop(
        self,
        rows: Rows,
        iterations: int,
        control: npt.NDArray[np.int32],
        drafts: Drafts,
        states: npt.NDArray[np.float32],
        **asked: Unpack[LoopOptions],
    ) -> None:
        """The same in a background thread, as `begin`; `take` returns drafted tokens and counts of each iteration."""
        by_text = asked.get("by_text")
        if by_text is not None and by_text.tables is not None:
            asked["by_text"] = replace(by_text, tables=by_text.tables[rows.slots])
        rows = replace(rows, slots=np.arange(len(rows.tokens)), tables=self._own_tables(rows))
        made, given = self._loop_of(rows, iterations, drafts, states, control, asked)
        _check(self._library.d3_begin_speculative_loop(self._handle, byref(made)))
        self._background = (given, given["drafted"], given["counts"])
        self._taken = 0

    def _loop_of(
        self,
        rows: Rows,
        iterations: int,
        drafts: Drafts,
        states: npt.NDArray[np.float32],
        control: npt.NDArray[np.int32] | None,
        asked: LoopOptions,
    ) -> tuple[SpeculativeLoopStructure, dict[str, Any]]:
        shape = (iterations, len(rows.tokens), drafts.most + 1, self.vocab_size)
        logits, draft_model = asked.get("logits"), asked.get("draft_model")
        if logits is not None and (logits.logits.shape != shape or not logits.logits.flags.c_contiguous):
            raise NativeError(f"logits must be a contiguous array {list(shape)}")
        self._check_states(states)
        made, given = structure_of(rows.arrays(), iterations, drafts, states, control, asked, self.vocab_size)
        if draft_model is not None:
            made.draft_model = draft_model._handle
        given["held"] = (rows, draft_model)  # the rows hold bridges and adapters
        return made, given

    def take(self, *, all_done: bool = False) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
        """Wait for the next step in the background: its tokens and scores, both [1, rows].

        With `all_done` also those of later steps that are done by then: [steps, rows]. Raises what the run's
        `draws.form` has raised.
        """
        assert self._background is not None, "no run was begun"
        given, chosen, scores = self._background
        first, last = self._taken, self._taken + 1
        if all_done:
            done = c_int32()
            _check(self._library.d3_gather(self._handle, last, byref(done)))
            last = done.value
        else:
            _check(self._library.d3_await(self._handle, last))
        _raise_error_of_grammar(given)
        self._taken = last
        return chosen[first:last], scores[first:last]

    def finish(self) -> None:
        """Let no further step begin, and wait for the current one; does nothing without a run in the background."""
        if self._background is not None:
            self._library.d3_finish(self._handle)
            self._background = None

    def _own_tables(self, rows: Rows) -> npt.NDArray[np.integer]:
        """A copy of the tables of the rows, in their order."""
        self._check_tables(rows)
        tables: npt.NDArray[np.integer] = rows.tables[rows.slots]
        return tables

    def _check_states(self, states: npt.NDArray[np.float32]) -> None:
        if states.shape[1] != self._hidden or not states.flags.c_contiguous:
            raise NativeError(f"hidden states must be a contiguous array [places, {self._hidden}]")

    def _arrays_of(self, states: HiddenStates | None) -> dict[str, npt.NDArray[Any]]:
        if states is None:
            return {}
        self._check_states(states.states)
        of_rows = {name: np.ascontiguousarray(getattr(states, name), np.int64) for name in STATE_FIELDS}
        return {"states": states.states, **of_rows}

    def _check_tables(self, rows: Rows) -> None:
        count, shape = len(rows.tokens), rows.tables.shape
        for name, given in (("bridges", rows.bridges), ("adapters", rows.adapters)):
            if given is not None and len(given) != count:
                raise NativeError(f"there must be {name}, or None, for each of {count} rows; got {len(given)}")
        if shape != self.table_shape or rows.cutoffs.shape != (count, self.table_shape[1]):
            raise NativeError(f"tables must have the shape {self.table_shape}; got {shape}")

    def _wanted(
        self,
        steps: int,
        count: int,
        logits: npt.NDArray[np.float32] | None,
        places: npt.NDArray[np.int64] | None,
    ) -> dict[str, npt.NDArray[Any]]:
        if logits is None:
            return {}
        num_places = count if places is None else logits.shape[1]
        if logits.shape != (steps, num_places, self.vocab_size) or not logits.flags.c_contiguous:
            raise NativeError(f"logits must be a contiguous array [{steps}, {num_places}, {self.vocab_size}]")
        return {"logits": logits} | ({} if places is None else {"logit_places": np.ascontiguousarray(places, np.int64)})

    def _hook(self, run: RunStructure, given: dict[str, Any], hooks: Hooks | None, steps: int) -> None:
        """Put hooks into the structure of a run, and among what must live as long as the run."""
        if hooks is None:
            return
        shape = (steps, len(hooks.captures), self._hidden)
        if hooks.captured.shape != shape or not hooks.captured.flags.c_contiguous:
            raise NativeError(f"captured states must be a contiguous array {list(shape)}")
        for name in ("steerings", "captures", "captured"):
            setattr(run, name, getattr(hooks, name).ctypes.data)
        run.num_steerings, run.num_captures = len(hooks.steerings), len(hooks.captures)
        given["hooks"] = hooks

    def _run_of(
        self, rows: Rows, steps: int, draws: Draws | None, **further: npt.NDArray[Any] | None
    ) -> tuple[RunStructure, dict[str, Any]]:
        """The structure of a run, and what must live as long as the run."""
        count = len(rows.tokens)
        given: dict[str, npt.NDArray[Any] | None] = {
            **rows.arrays(),
            "chosen": np.empty((steps, count), np.int64),
            "scores": np.empty((steps, count), np.float32),
            **further,
        }
        if draws is not None:
            given["temperatures"] = np.ascontiguousarray(draws.temperatures, np.float32)
            given["seeds"] = np.ascontiguousarray(draws.seeds, np.int64)
            given["indices"] = np.ascontiguousarray(draws.indices, np.int64)
        held: dict[str, Any] = {name: array for name, array in given.items() if array is not None}
        run = RunStructure(count, steps, **{name: array.ctypes.data for name, array in held.items()})
        held["rows"] = rows  # they hold bridges and adapters
        if "logit_places" in held:
            run.num_logits = held["logits"].shape[1]
        if draws is not None and draws.asked is not None:
            sampling, keeps = sampling_structures(draws.asked, steps)
            run.sampling = ctypes.addressof(sampling)
            held["sampling"] = (sampling, keeps)
        if draws is not None and draws.form is not None:
            held["grammar"] = GrammarCallback.of_run(draws.form, self.vocab_size)
            run.grammar = held["grammar"].function
        return run, held


def _raise_error_of_grammar(given: dict[str, Any]) -> None:
    callback: GrammarCallback | None = given.get("grammar")
    if callback is not None and callback.error is not None:
        raise callback.error


_BLOCKS = [POINTER(MatrixStructure), c_int32, c_int32, c_int32, c_void_p]
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "d3_isa_name": (c_char_p, [c_int32]),
    "d3_isa_runs_here": (c_int, [c_int32]),
    "d3_isa_reads_interleaved": (c_int, [c_int32]),
    "d3_isa_reads_interleaved_blocks": (c_int, [c_int32]),
    "d3_isa_adds_bfloat16_pairs": (c_int, [c_int32]),
    "d3_read_block_rows": (None, _BLOCKS),
    "d3_interleaved_bytes": (c_int64, [c_int32, c_int32]),
    "d3_interleave_blocks": (None, _BLOCKS),
    "d3_bf12_pack": (c_int64, [c_void_p, c_int32, c_int32, c_int64, c_void_p, c_void_p]),
    "d3_bf12_unpack": (None, [POINTER(MatrixStructure), c_int32, c_int32, c_void_p]),
    "d3_create": (c_int, [POINTER(ModelStructure), POINTER(c_void_p)]),
    "d3_run": (c_int, [c_void_p, POINTER(RunStructure)]),
    "d3_begin": (c_int, [c_void_p, POINTER(RunStructure)]),
    "d3_run_speculative_loop": (c_int, [c_void_p, POINTER(SpeculativeLoopStructure)]),
    "d3_begin_speculative_loop": (c_int, [c_void_p, POINTER(SpeculativeLoopStructure)]),
    "d3_await": (c_int, [c_void_p, c_int32]),
    "d3_gather": (c_int, [c_void_p, c_int32, POINTER(c_int32)]),
    "d3_finish": (None, [c_void_p]),
    "d3_destroy": (None, [c_void_p]),
}
"""The result and the parameters of each function that has any."""


@cache
def library() -> ctypes.CDLL:
    """The library of this package; raises `LibraryMissing`."""
    return load(Path(__file__).parent / build.LIBRARY)


def load(path: Path) -> ctypes.CDLL:
    """The library at `path`, its functions typed; raises `LibraryMissing` if there is none, or one of other sources."""
    if not path.exists():
        raise LibraryMissing("the native library was not built, for want of a C++ compiler when d3engine was installed")
    try:
        found = ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryMissing(f"the native library cannot be loaded: {error}") from error
    found.d3_source_digest.restype = c_char_p
    is_checkout = (path.parent / "abi.h").exists()
    if is_checkout and found.d3_source_digest().decode() != build.digest(path.parent):
        raise LibraryMissing("the native library is older than its sources; `pip install -e .` builds it anew")
    for name, (result, arguments) in _FUNCTIONS.items():
        getattr(found, name).restype = result
        getattr(found, name).argtypes = arguments
    return found


def isas_here() -> list[str]:
    """The instruction sets of the library that this machine runs, best first."""
    return [name for nth, name in enumerate(_all_isas()) if library().d3_isa_runs_here(nth)]


def reads_interleaved(isa: str = "auto") -> bool:
    """Whether an instruction set reads interleaved int8 and int4 matrices; "auto": the best one of this machine."""
    name = isas_here()[0] if isa == "auto" else isa
    return name in _all_isas() and bool(library().d3_isa_reads_interleaved(_all_isas().index(name)))


def reads_interleaved_blocks(isa: str = "auto") -> bool:
    """Whether an instruction set multiplies interleaved blocks by vectors of 8 bits; "auto": any of this machine's."""
    if isa == "auto":
        return byte_isa() is not None
    return isa in _all_isas() and bool(library().d3_isa_reads_interleaved_blocks(_all_isas().index(isa)))


def adds_bfloat16_pairs(isa: str = "auto") -> bool:
    """Whether an instruction set multiplies bfloat16 numbers by each other; "auto": the best one of this machine."""
    name = isas_here()[0] if isa == "auto" else isa
    return name in _all_isas() and bool(library().d3_isa_adds_bfloat16_pairs(_all_isas().index(name)))


def read_block_rows(
    weight: BlockWeight | BlockLanesWeight, start: int = 0, stop: int | None = None, *, isa: str = "auto"
) -> torch.Tensor:
    """Rows [start, stop) of the float32 matrix [N, K] that a matrix in blocks stands for; stop None: N.

    Raises `LibraryMissing` without the native library, `NativeError` for memory that is not contiguous on the CPU.
    """
    stop = weight.shape[0] if stop is None else stop
    assert 0 <= start <= stop <= weight.shape[0], "rows outside the matrix"
    matrix = torch.empty(stop - start, weight.num_columns)
    best = byte_isa() if weight.meets_bytes else isas_here()[0]
    nth = _all_isas().index(best or "none" if isa == "auto" else isa)
    library().d3_read_block_rows(byref(Linear(weight).structure()), nth, start, stop, matrix.data_ptr())
    return in_channels(matrix, weight.order)


def interleave_blocks(parts: Sequence[BlockWeight]) -> torch.Tensor:
    """The cells of a `BlockLanesWeight` of these matrices on top of each other.

    All are of one format; the rows of each are a multiple of 16.
    """
    isa = byte_isa()
    assert isa is not None, "no instruction set reads such cells"
    nth, structures = _all_isas().index(isa), [Linear(part).structure() for part in parts]
    row_bytes = library().d3_interleaved_bytes(structures[0].kind, parts[0].num_columns)
    rows = [part.shape[0] for part in parts]
    made = torch.empty(sum(rows) // LANES, LANES * row_bytes, dtype=torch.uint8)
    for structure, count, cells in zip(structures, rows, torch.split(made, [n // LANES for n in rows]), strict=True):
        library().d3_interleave_blocks(byref(structure), nth, 0, count, cells.data_ptr())
    return made


def byte_isa() -> str | None:
    """The best instruction set of this machine that multiplies interleaved blocks by vectors of 8 bits."""
    return next((name for name in isas_here() if reads_interleaved_blocks(name)), None)


def _best_isa(model: NativeModel) -> str:
    """The best one for a model: AMX is for bfloat16, int8 and int4, VNNI for int4 and interleaved matrices."""
    of_layers = (linear.weight for layer in model.layers for linear in layer.matrices)
    matrices = (model.lm_head, *of_layers)
    parts = [part for matrix in matrices for part in getattr(matrix, "parts", (matrix,))]
    if any(isinstance(part, WeightFormat) and part.meets_bytes for part in parts):
        return byte_isa() or isas_here()[0]
    wanted = frozenset[str]().union(*map(_isas_for, parts))
    return next(isa for isa in isas_here() if isa not in ("amx", "avx512-vnni") or isa in wanted)


def _isas_for(matrix: torch.Tensor | WeightFormat) -> frozenset[str]:
    if isinstance(matrix, WeightFormat):
        return matrix.native_isas
    return frozenset({"amx"} if matrix.dtype == torch.bfloat16 else ())


def _all_isas() -> list[str]:
    found = library()
    return [found.d3_isa_name(nth).decode() for nth in range(found.d3_num_isas())]


def _check(status: int) -> None:
    if status:
        raise NativeError(_REFUSALS.get(status, f"the native library returned the unknown status {status}"))
