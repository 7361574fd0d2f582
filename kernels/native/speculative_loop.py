"""Draft-and-verify iterations as the native library takes them: `D3SpeculativeLoop` of `abi.h`, made of arrays."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_int32, c_int64, c_void_p
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


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
        ("bridges", c_void_p),
    )


def structure_of(
    rows: dict[str, npt.NDArray[Any]],
    iterations: int,
    drafts: Drafts,
    states: npt.NDArray[np.float32],
    ends: Int64Array | None,
    control: npt.NDArray[np.int32] | None,
) -> tuple[SpeculativeLoopStructure, dict[str, Any]]:
    """The structure of some iterations, and the arrays that it points to, `drafted` and `counts` among them."""
    count = len(rows["tokens"])
    given: dict[str, Any] = {
        **rows,
        **{field.name: np.ascontiguousarray(getattr(drafts, field.name), np.int64) for field in fields(drafts)},
        "states": states,
        "drafted": np.empty((iterations, count, drafts.most), np.int64),
        "counts": np.empty((iterations, count, 3), np.int64),
    }
    if ends is not None:
        given["ends"] = np.ascontiguousarray(ends, np.int64)
    if control is not None:
        given["control"] = control
    addresses = {name: array.ctypes.data for name, array in given.items()}
    made = SpeculativeLoopStructure(count, iterations, drafts.most, **addresses)
    made.num_states = len(states)
    made.most_ends = 0 if ends is None else ends.shape[1]
    return made, given
