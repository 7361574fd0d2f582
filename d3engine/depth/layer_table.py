"""A table of the user's own: which layers run at each generation step, written out.

The one idea: any schedule at all can be tried without writing a class. If the table happens to be nested it
costs what D3 costs; if layers wake up again, the entries they slept through are filled by `on_skip`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from d3engine.depth.policy import DepthPolicy
from d3engine.depth.schedule import BoolArray, OnSkip, Schedule, check_bridges, check_on_skip
from d3engine.errors import InvalidValueError, require, require_integer


@dataclass(frozen=True)
class LayerTable(DepthPolicy):
    """Row i holds the layers that run at step i; the last row holds for all later steps.

    Args:
        active: a sequence of rows; each row is either the ids of the layers that run, or one bool for each
            layer. Row 0 must name every layer, since the prompt pass yields step 0.
        on_skip: "copy" or "project"; "none" only for a nested table (a layer that is off stays off).
        bridges: what stands in for skipped layers: a file of bridges, or "auto" for the one beside the weights.
    """

    active: Sequence[Sequence[int]] | Sequence[Sequence[bool]]
    on_skip: OnSkip = "copy"
    bridges: str | None = None

    name: ClassVar[str] = "table"

    def __post_init__(self) -> None:
        check_on_skip(self.on_skip)
        check_bridges(self.bridges)
        given: Any = self.active
        require(_is_sequence(given) and len(given) > 0, "active", given, "a sequence of rows, one for each step")
        rows = tuple(_checked_row(f"active[{step}]", row) for step, row in enumerate(given))
        object.__setattr__(self, "active", rows)

    def schedule(self, num_layers: int) -> Schedule:
        """The schedule, nested where the table is; raises `InvalidValueError` if a row does not fit."""
        require_integer("num_layers", num_layers, 1)
        rows = [_flags(f"active[{step}]", row, num_layers) for step, row in enumerate(self.active)]
        require(bool(rows[0].all()), "active[0]", self.active[0], "every layer, since the prompt pass yields step 0")
        return Schedule.from_table(np.stack(rows), self.on_skip, self.bridges)

    def describe(self) -> dict[str, Any]:
        """The policy as JSON-ready values."""
        return {**super().describe(), "active": [list(row) for row in self.active]}


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)


def _checked_row(field: str, row: Any) -> tuple[int, ...] | tuple[bool, ...]:
    """A row as a tuple of Python bools, or of Python ints in ascending order."""
    if _is_sequence(row):
        if len(row) and all(isinstance(flag, bool | np.bool_) for flag in row):
            return tuple(bool(flag) for flag in row)
        if all(isinstance(layer, int | np.integer) and not isinstance(layer, bool) for layer in row):
            ids = tuple(sorted(int(layer) for layer in row))
            require(len(set(ids)) == len(ids), field, row, "layer ids without repeats")
            return ids
    raise InvalidValueError(field, row, "layer ids, or one bool for each layer")


def _flags(field: str, row: Sequence[int] | Sequence[bool], num_layers: int) -> BoolArray:
    """Bool [L] of a checked row."""
    if len(row) and isinstance(row[0], bool):
        require(len(row) == num_layers, field, row, f"{num_layers} bools, one for each layer")
        return np.array(row, dtype=np.bool_)
    in_range = not row or (row[0] >= 0 and row[-1] < num_layers)
    require(in_range, field, row, f"layer ids from 0 to {num_layers - 1}")
    flags = np.zeros(num_layers, dtype=np.bool_)
    flags[list(row)] = True
    return flags
