"""What rows ask of a choice beside a temperature, as `abi.h` has it: cuts, penalties, and rules of what may come."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from d3engine.kernels.native.model import NativeError

FORM = CFUNCTYPE(c_void_p, c_int32, c_int32, c_int64)
Mask: TypeAlias = npt.NDArray[np.uint8]
Tokens: TypeAlias = npt.NDArray[np.int64]
NO_WORDS: tuple[Tokens, Tokens, Tokens, Tokens] = (
    *(np.empty(0, np.int64), np.zeros(2, np.int64)),
    *(np.empty(0, np.int64), np.zeros(2, np.int64)),
)
Form: TypeAlias = Callable[[int, int, int], Mask | None]
"""What a row's form allows at a step of a run, asked as form(row, steps before, its last token or -1 at the first).

None where the form is over. Of each row the questions come in order, a step that is taken again asking once more; they
may come from another thread than the run's own.
"""


class _Counted(Structure):
    _fields_ = (("tokens", c_void_p), ("counts", c_void_p), ("used", c_int64), ("steps", c_int64))


class _Rules(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("biased", "biases")),
        ("num_biased", c_int64),
        *((name, c_void_p) for name in ("allowed", "banned")),
        *((name, c_int64) for name in ("num_banned", "banned_until")),
        *((name, c_void_p) for name in ("edges", "first_edges", "bans", "first_bans")),
        ("num_bans", c_int64),
        ("recent", c_void_p),
        ("num_recent", c_int64),
        ("has_form", c_int32),
    )


class _Choice(Structure):
    _fields_ = (
        *((name, c_float) for name in ("log_min_p", "top_p")),
        ("top_k", c_int32),
        *((name, c_float) for name in ("repetition", "presence", "frequency")),
        ("counted", POINTER(_Counted)),
        ("rules", POINTER(_Rules)),
    )


@dataclass(frozen=True, eq=False)
class Counted:
    """The tokens of a prompt and its answer, each once, int64 [n], and how often each is in the answer, int32 [n]."""

    tokens: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int32]

    @classmethod
    def of(cls, prompt: list[int], answer: list[int]) -> Counted:
        """Counts them."""
        tokens, places = np.unique(np.array(prompt + answer, np.int64), return_inverse=True)
        counts = np.bincount(places.ravel()[len(prompt) :], minlength=tokens.size)
        return cls(tokens, counts.astype(np.int32))


@dataclass(frozen=True, eq=False)
class LogitMask:
    """Which tokens may come in one row, whose logits all others lose.

    `biases` float32 are added to the logits of the tokens `biased`, int64 [n] each once; `allowed` uint8 [bytes] has a
    bit for each token, the lowest of the first byte for token 0, and is None where all may come; `banned` int64 may not
    before the generation step `banned_until`; `words` may never be completed, as the tree of `abi.h` (edges,
    first_edges, bans, first_bans), `recent` being the last tokens of the answer, as many as the longest word has or
    all. Where `has_form`, the run's `form` is asked at each step.
    """

    biased: npt.NDArray[np.int64]
    biases: npt.NDArray[np.float32]
    allowed: Mask | None
    banned: npt.NDArray[np.int64]
    banned_until: int
    words: tuple[Tokens, Tokens, Tokens, Tokens] | None
    recent: list[int]
    has_form: bool = False

    def structure(self) -> tuple[Any, list[Any]]:
        """A `D3Rules`, and what has to live as long as it."""
        edges, first_edges, bans, first_bans = self.words or NO_WORDS
        recent = np.array(self.recent, np.int64)
        made = _Rules(
            *(self.biased.ctypes.data, self.biases.ctypes.data, self.biased.size),
            None if self.allowed is None else self.allowed.ctypes.data,
            *(self.banned.ctypes.data, self.banned.size, self.banned_until),
            *(array.ctypes.data for array in (edges, first_edges, bans, first_bans)),
            *(bans.size, recent.ctypes.data, recent.size, self.has_form),
        )
        return made, [self, recent, made]


@dataclass(frozen=True, eq=False)
class Asked:
    """What one row asks for; `counted` is None for one without penalties, `rules` where any token may come."""

    log_min_p: float
    top_p: float
    top_k: int
    repetition: float
    presence: float
    frequency: float
    counted: Counted | None
    rules: LogitMask | None = None


def structures(rows: list[Asked | None], steps: int) -> tuple[Any, list[Any]]:
    """An array of `D3Choice` for a run of `steps` steps, and what has to live as long as it.

    A row without anything keeps zeros: it has a temperature of 0, or is not asked for a token.
    """
    made = (_Choice * len(rows))()
    keeps: list[Any] = []
    for structure, row in zip(made, rows, strict=True):
        if row is None:
            continue
        for name in ("log_min_p", "top_p", "top_k", "repetition", "presence", "frequency"):
            setattr(structure, name, getattr(row, name))
        if row.counted is not None:
            tokens, counts = (np.append(a, np.zeros(steps, a.dtype)) for a in (row.counted.tokens, row.counted.counts))
            counted = _Counted(tokens.ctypes.data, counts.ctypes.data, row.counted.tokens.size, 0)
            structure.counted = ctypes.pointer(counted)
            keeps += [tokens, counts, counted]
        if row.rules is not None:
            rules, its_keeps = row.rules.structure()
            structure.rules = ctypes.pointer(rules)
            keeps += its_keeps
    return made, keeps


class AskedForms:
    """`ask` as a function of C, which keeps each row's mask until its next."""

    def __init__(self, ask: Form, vocab_size: int) -> None:
        # The function must not refer to this object, which refers to it: the collector would find that cycle too late
        # for all that a form holds.
        self._answers = answers = _FormAnswers(ask, -(-vocab_size // 8))
        self.function = FORM(answers.answer)

    @property
    def raised(self) -> BaseException | None:
        """What went wrong in `ask`."""
        return self._answers.raised


class _FormAnswers:
    def __init__(self, ask: Form, num_bytes: int) -> None:
        self._ask = ask
        self._num_bytes = num_bytes
        self._masks: dict[int, Mask] = {}
        self.raised: BaseException | None = None

    def answer(self, row: int, taken: int, token: int) -> int | None:
        try:
            mask = None if self.raised else self._ask(row, taken, token)
            if mask is not None and not self._is_whole(mask):
                raise NativeError(f"a mask must be a contiguous array of at least {self._num_bytes} bytes")
        except BaseException as raised:  # nothing can be raised through C: whoever waits for the run raises it
            self.raised, mask = raised, None
        if mask is None:
            return None
        self._masks[row] = mask
        return int(mask.ctypes.data)

    def _is_whole(self, mask: Mask) -> bool:
        return mask.dtype == np.uint8 and mask.size >= self._num_bytes and mask.flags.c_contiguous
