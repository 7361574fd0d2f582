"""What a run of the native library takes: its rows, how they sample, and the structures of `types.h` for both."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from d3engine.kernels.native.model import NativeBridges, NativeError, NativeMaps

GRAMMAR = CFUNCTYPE(c_void_p, c_int32, c_int32, c_int64)
DRAFT_GRAMMAR = CFUNCTYPE(c_void_p, c_int32, POINTER(c_int64), c_int64, c_int64)
Mask: TypeAlias = npt.NDArray[np.uint8]
Tokens: TypeAlias = npt.NDArray[np.int64]
NO_WORDS: tuple[Tokens, Tokens, Tokens, Tokens] = (
    *(np.empty(0, np.int64), np.zeros(2, np.int64)),
    *(np.empty(0, np.int64), np.zeros(2, np.int64)),
)
GrammarMask: TypeAlias = Callable[[int, int, int], Mask | None]
"""The mask of a row's grammar at a step, called with (row, steps before, its last token or -1 at the first).

None where the grammar ends. Calls for one row come in order, maybe from another thread; a repeated step calls again.
"""
DraftGrammarMask: TypeAlias = Callable[[int, list[int], list[int]], Mask | None]
"""The mask behind drafted tokens, called with (row, tokens that the loop has added to the answer, drafted tokens).

None where nothing may follow. Calls may come from another thread; a repeated iteration calls again.
"""

_ARRAYS = (
    *("tokens", "positions", "generation", "slots", "cutoffs", "tables", "temperatures", "seeds", "indices"),
    *("chosen", "scores", "logits", "yields", "control", "sampling"),
)
_INTEGERS = ("tokens", "positions", "generation", "slots")
STATE_FIELDS = ("kept_layers", "kept_places", "resumed_places")


class RunStructure(Structure):
    """`D3Run`."""

    _fields_ = (
        ("rows", c_int32),
        ("steps", c_int32),
        *((name, c_void_p) for name in (*_ARRAYS, "states")),
        ("num_states", c_int64),
        *((name, c_void_p) for name in (*STATE_FIELDS, "ends")),
        ("most_ends", c_int64),
        ("taken", POINTER(c_int32)),
        ("logit_places", c_void_p),
        ("num_logits", c_int64),
        ("grammar", GRAMMAR),
        ("bridges", c_void_p),
        ("confidences", c_void_p),
        ("adapters", c_void_p),
        ("steerings", c_void_p),
        ("num_steerings", c_int64),
        ("captures", c_void_p),
        ("num_captures", c_int64),
        ("captured", c_void_p),
    )


class _TokenCounts(Structure):
    _fields_ = (("tokens", c_void_p), ("counts", c_void_p), ("used", c_int64), ("steps", c_int64))


class _LogitMask(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("biased", "biases")),
        ("num_biased", c_int64),
        *((name, c_void_p) for name in ("allowed", "banned")),
        *((name, c_int64) for name in ("num_banned", "banned_until")),
        *((name, c_void_p) for name in ("edges", "first_edges", "bans", "first_bans")),
        ("num_bans", c_int64),
        ("recent", c_void_p),
        ("num_recent", c_int64),
        ("has_grammar", c_int32),
        ("also_allowed", c_void_p),
    )


class _Sampling(Structure):
    _fields_ = (
        *((name, c_float) for name in ("log_min_p", "top_p")),
        ("top_k", c_int32),
        *((name, c_float) for name in ("repetition", "presence", "frequency")),
        ("token_counts", POINTER(_TokenCounts)),
        ("logit_mask", POINTER(_LogitMask)),
    )


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a run, [rows] integers each; `cutoffs` [rows, L], `tables` int32 [slots, L, blocks].

    `bridges` holds each row's bridges over the layers that it skips, None for a row whose state passes unchanged; it is
    None if all rows' states do. `adapters` holds the maps of each row's adapter in the same way.
    """

    tokens: npt.NDArray[np.integer]
    positions: npt.NDArray[np.integer]
    generation: npt.NDArray[np.integer]
    slots: npt.NDArray[np.integer]
    cutoffs: npt.NDArray[np.integer]
    tables: npt.NDArray[np.integer]
    bridges: Sequence[NativeBridges | None] | None = None
    adapters: Sequence[NativeMaps | None] | None = None

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays as the library reads them."""
        pointers = {"bridges": self.bridges, "adapters": self.adapters}
        own = {name: _addresses(given) for name, given in pointers.items() if given is not None}
        return {
            **{name: np.ascontiguousarray(getattr(self, name), np.int64) for name in _INTEGERS},
            "cutoffs": np.ascontiguousarray(self.cutoffs, np.int32),
            "tables": np.ascontiguousarray(self.tables, np.int32),
            **own,
        }


@dataclass(frozen=True, eq=False)
class HiddenStates:
    """Hidden states that outlive a run: float32 `states` [places, H]; int64 [rows] which row saves or resumes which.

    At the n-th step a row saves its state below layer `kept_layers` at `kept_places` + n, and starts from the state at
    `resumed_places` + n instead of its token's embedding. A place of -1 means none.
    """

    states: npt.NDArray[np.float32]
    kept_layers: npt.NDArray[np.int64]
    kept_places: npt.NDArray[np.int64]
    resumed_places: npt.NDArray[np.int64]

    def of_rows(self, part: slice) -> HiddenStates:
        """The same buffer for some of the rows."""
        return HiddenStates(self.states, self.kept_layers[part], self.kept_places[part], self.resumed_places[part])


STEERINGS = np.dtype(
    [("layer", "<i4"), ("row", "<i4")]
    + [(name, "<i8") for name in ("start", "stop", "step")]
    + [(name, "<u8") for name in ("vector", "map")]
)
"""`D3Steering`."""


@dataclass(frozen=True, eq=False)
class Hooks:
    """What a run adds to hidden states, and which it copies out, in front of layers; both in their ascending order.

    `steerings` [n] of `STEERINGS` name addresses of `held`: of a vector float32 [H], or of a `D3LowRank`, the other one
    being 0. `captures` int32 [n, 2] are layers (the number of layers: the last state) and rows; `captured` float32
    [steps, n, H] is written.
    """

    steerings: npt.NDArray[Any]
    captures: npt.NDArray[np.int32]
    captured: npt.NDArray[np.float32]
    held: object = None

    def of_rows(self, part: slice) -> Hooks:
        """Those of some of the rows; what they capture lies in a new array."""
        steerings = self.steerings[_inside(self.steerings["row"], part)].copy()
        captures = self.captures[_inside(self.captures[:, 1], part)].copy()
        steerings["row"] -= part.start
        captures[:, 1] -= part.start
        shape = (self.captured.shape[0], len(captures), self.captured.shape[2])
        return Hooks(steerings, captures, np.empty(shape, np.float32), self.held)

    def take(self, part: slice, own: Hooks) -> None:
        """Take in what the hooks of some of the rows have captured."""
        self.captured[:, _inside(self.captures[:, 1], part)] = own.captured


def _inside(rows: npt.NDArray[np.int32], part: slice) -> npt.NDArray[np.bool_]:
    inside: npt.NDArray[np.bool_] = (rows >= part.start) & (rows < part.stop)
    return inside


@dataclass(frozen=True, eq=False)
class TokenCounts:
    """The distinct tokens of a prompt and its answer, int64 [n], and the count of each in the answer, int32 [n]."""

    tokens: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int32]

    @classmethod
    def of(cls, prompt: list[int], answer: list[int]) -> TokenCounts:
        """Count the tokens of `answer`."""
        tokens, places = np.unique(np.array(prompt + answer, np.int64), return_inverse=True)
        counts = np.bincount(places.ravel()[len(prompt) :], minlength=tokens.size)
        return cls(tokens, counts.astype(np.int32))


@dataclass(frozen=True, eq=False)
class LogitMask:
    """Which tokens are allowed in one row; the logits of all others become minus infinity.

    `biases` float32 are added to the logits of the distinct tokens `biased`, int64 [n]. `allowed` uint8 [bytes] has one
    bit per token, from the lowest bit of its first byte on, and is None if all are allowed. `banned` int64 are excluded
    before the generation step `banned_until`. `words` must never be completed: the tree of `types.h` (edges,
    first_edges, bans, first_bans). `recent` are the last tokens of the answer, all or as many as the longest word has.
    With `has_grammar` the run calls its grammar at each step.
    """

    biased: npt.NDArray[np.int64]
    biases: npt.NDArray[np.float32]
    allowed: Mask | None
    banned: npt.NDArray[np.int64]
    banned_until: int
    words: tuple[Tokens, Tokens, Tokens, Tokens] | None
    recent: list[int]
    has_grammar: bool = False

    def structure(self) -> tuple[Any, list[Any]]:
        """A `D3LogitMask`, and what must live as long as it."""
        edges, first_edges, bans, first_bans = self.words or NO_WORDS
        recent = np.array(self.recent, np.int64)
        made = _LogitMask(
            *(self.biased.ctypes.data, self.biases.ctypes.data, self.biased.size),
            None if self.allowed is None else self.allowed.ctypes.data,
            *(self.banned.ctypes.data, self.banned.size, self.banned_until),
            *(array.ctypes.data for array in (edges, first_edges, bans, first_bans)),
            *(bans.size, recent.ctypes.data, recent.size, self.has_grammar),
        )
        return made, [self, recent, made]


@dataclass(frozen=True, eq=False)
class RowSampling:
    """How one row samples; `token_counts` is None without penalties, `logit_mask` if all tokens are allowed."""

    log_min_p: float
    top_p: float
    top_k: int
    repetition: float
    presence: float
    frequency: float
    token_counts: TokenCounts | None
    logit_mask: LogitMask | None = None


@dataclass(frozen=True, eq=False)
class Draws:
    """How rows draw: `temperatures` float32, 0 for the likeliest token, int64 `seeds` and `indices`; [rows] each.

    `asked` holds what else each row samples with, None for a row that needs no token; it is None if no row has a
    threshold, penalties or a mask. `form` is called for the rows with a grammar, in a speculative loop `draft_form`.
    """

    temperatures: npt.NDArray[np.float32]
    seeds: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int64]
    asked: list[RowSampling | None] | None = None
    form: GrammarMask | None = None
    draft_form: DraftGrammarMask | None = None


def sampling_structures(rows: list[RowSampling | None], steps: int) -> tuple[Any, list[Any]]:
    """An array of `D3Sampling` for a run of `steps` steps, and what must live as long as it.

    Rows that are None keep zeros: their temperature is 0, or they need no token.
    """
    made = (_Sampling * len(rows))()
    keeps: list[Any] = []
    for structure, row in zip(made, rows, strict=True):
        if row is None:
            continue
        for name in ("log_min_p", "top_p", "top_k", "repetition", "presence", "frequency"):
            setattr(structure, name, getattr(row, name))
        if (given := row.token_counts) is not None:
            tokens, counts = (np.append(a, np.zeros(steps, a.dtype)) for a in (given.tokens, given.counts))
            token_counts = _TokenCounts(tokens.ctypes.data, counts.ctypes.data, given.tokens.size, 0)
            structure.token_counts = ctypes.pointer(token_counts)
            keeps += [tokens, counts, token_counts]
        if row.logit_mask is not None:
            logit_mask, its_keeps = row.logit_mask.structure()
            structure.logit_mask = ctypes.pointer(logit_mask)
            keeps += its_keeps
    return made, keeps


class GrammarCallback:
    """A `GrammarMask`, or a `DraftGrammarMask`, as a function of C, which keeps each mask as long as that needs it."""

    def __init__(self, masks: _GrammarMasks, function: Any) -> None:
        # The function must not refer to this object, which refers to it: the collector would free what a grammar holds
        # too late.
        self._masks = masks
        self.function = function

    @classmethod
    def of_run(cls, mask_of: GrammarMask, vocab_size: int) -> GrammarCallback:
        """For a run: each row's mask until its next call."""
        masks = _GrammarMasks(vocab_size)
        return cls(masks, GRAMMAR(lambda *asked: masks.address(asked[0], mask_of, *asked)))

    @classmethod
    def of_loop(cls, mask_of: DraftGrammarMask, vocab_size: int) -> GrammarCallback:
        """For a speculative loop: each row's mask until its next call with as many drafted tokens."""
        masks = _GrammarMasks(vocab_size)

        def address(row: int, tokens: Any, num_added: int, num_drafted: int) -> int | None:
            known = tokens[: num_added + num_drafted]
            return masks.address((row, num_drafted), mask_of, row, known[:num_added], known[num_added:])

        return cls(masks, DRAFT_GRAMMAR(address))

    @property
    def error(self) -> BaseException | None:
        """What the grammar raised."""
        return self._masks.error


class _GrammarMasks:
    def __init__(self, vocab_size: int) -> None:
        self._num_bytes = -(-vocab_size // 8)
        self._masks: dict[Any, Mask] = {}
        self.error: BaseException | None = None

    def address(self, key: Any, mask_of: Callable[..., Mask | None], *asked: Any) -> int | None:
        """The address of the mask that `mask_of` gives, which lives until the next one of this key."""
        try:
            mask = None if self.error else mask_of(*asked)
            if mask is not None and not self._is_whole(mask):
                raise NativeError(f"a mask must be a contiguous array of at least {self._num_bytes} bytes")
        except BaseException as error:  # cannot pass through C: the thread that waits for the run raises it
            self.error, mask = error, None
        if mask is None:
            return None
        self._masks[key] = mask
        return int(mask.ctypes.data)

    def _is_whole(self, mask: Mask) -> bool:
        return mask.dtype == np.uint8 and mask.size >= self._num_bytes and mask.flags.c_contiguous


def _addresses(given: Sequence[NativeBridges | NativeMaps | None]) -> npt.NDArray[np.uintp]:
    return np.array([0 if own is None else own.address for own in given], np.uintp)
