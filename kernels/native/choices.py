"""What rows ask of a choice beside a temperature, as `abi.h` has it: cuts, penalties and the tokens these are about."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


class _Counted(Structure):
    _fields_ = (("tokens", c_void_p), ("counts", c_void_p), ("used", c_int64), ("steps", c_int64))


class _Choice(Structure):
    _fields_ = (
        *((name, c_float) for name in ("log_min_p", "top_p")),
        ("top_k", c_int32),
        *((name, c_float) for name in ("repetition", "presence", "frequency")),
        ("counted", POINTER(_Counted)),
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
class Asked:
    """What one row asks for; `counted` is None for one without penalties."""

    log_min_p: float
    top_p: float
    top_k: int
    repetition: float
    presence: float
    frequency: float
    counted: Counted | None


def structures(rows: list[Asked], steps: int) -> tuple[Any, list[Any]]:
    """An array of `D3Choice` for a run of `steps` steps, and what has to live as long as it."""
    made = (_Choice * len(rows))()
    keeps: list[Any] = []
    for structure, row in zip(made, rows, strict=True):
        for name in ("log_min_p", "top_p", "top_k", "repetition", "presence", "frequency"):
            setattr(structure, name, getattr(row, name))
        if row.counted is not None:
            tokens, counts = (np.append(a, np.zeros(steps, a.dtype)) for a in (row.counted.tokens, row.counted.counts))
            counted = _Counted(tokens.ctypes.data, counts.ctypes.data, row.counted.tokens.size, 0)
            structure.counted = ctypes.pointer(counted)
            keeps += [tokens, counts, counted]
    return made, keeps
