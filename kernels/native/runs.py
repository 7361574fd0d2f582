"""Runs as the native library takes them: `D3Run` of `abi.h`, and what a caller says of the rows of one."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Structure, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from d3engine.kernels.native.choices import FORM, Asked, Form
from d3engine.kernels.native.model import NativeBridges

_ARRAYS = (
    *("tokens", "positions", "generation", "slots", "cutoffs", "tables", "temperatures", "seeds", "indices"),
    *("chosen", "scores", "logits", "yields", "control", "choices"),
)


INTEGERS = ("tokens", "positions", "generation", "slots")
OF_STATES = ("kept_layers", "kept_places", "resumed_places")


class RunStructure(Structure):
    """`D3Run`."""

    _fields_ = (
        ("rows", c_int32),
        ("steps", c_int32),
        *((name, c_void_p) for name in (*_ARRAYS, "states")),
        ("num_states", c_int64),
        *((name, c_void_p) for name in (*OF_STATES, "ends")),
        ("most_ends", c_int64),
        ("taken", POINTER(c_int32)),
        ("logit_places", c_void_p),
        ("num_logits", c_int64),
        ("form", FORM),
        ("bridges", c_void_p),
    )


@dataclass(frozen=True, eq=False)
class Draws:
    """How rows draw: `temperatures` float32, 0 for the likeliest token, int64 `seeds` and `indices`; [rows] each.

    `asked` has what each row asks for beside it, None for one whose token nobody wants; it is None where nobody cuts,
    has penalties or rules. `form` is asked for the rows whose rules say so.
    """

    temperatures: npt.NDArray[np.float32]
    seeds: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int64]
    asked: list[Asked | None] | None = None
    form: Form | None = None


@dataclass(frozen=True, eq=False)
class HiddenStates:
    """Hidden states that outlive a run: float32 `states` [places, H], and who leaves or takes which, int64 [rows] each.

    At the n-th step a row leaves its state below layer `kept_layers` at `kept_places` + n, and begins, in place of its
    token's embedding, with the state at `resumed_places` + n. A place of -1 stands for none.
    """

    states: npt.NDArray[np.float32]
    kept_layers: npt.NDArray[np.int64]
    kept_places: npt.NDArray[np.int64]
    resumed_places: npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Rows:
    """What a run begins with, [rows] integers each; `cutoffs` [rows, L], `tables` int32 [slots, L, blocks].

    `bridges` has by what each row crosses the layers that it leaves out, None where it passes them as it is; None
    where all do.
    """

    tokens: npt.NDArray[np.integer]
    positions: npt.NDArray[np.integer]
    generation: npt.NDArray[np.integer]
    slots: npt.NDArray[np.integer]
    cutoffs: npt.NDArray[np.integer]
    tables: npt.NDArray[np.integer]
    bridges: Sequence[NativeBridges | None] | None = None


def arrays_of_rows(rows: Rows) -> dict[str, npt.NDArray[Any]]:
    """The arrays of rows as the library reads them."""
    return {
        **{name: np.ascontiguousarray(getattr(rows, name), np.int64) for name in INTEGERS},
        "cutoffs": np.ascontiguousarray(rows.cutoffs, np.int32),
        "tables": np.ascontiguousarray(rows.tables, np.int32),
    }


def addresses_of_bridges(bridges: Sequence[NativeBridges | None]) -> npt.NDArray[np.uintp]:
    """Where those of each row lie, 0 for none."""
    return np.array([0 if own is None else own.address for own in bridges], np.uintp)
