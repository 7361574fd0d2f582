"""Nested windows: depth falls as D3's, and what goes are windows of a list, one after the other, wherever they lie.

The one idea: D3 has one window, and it grows to the end whether or not those layers can be spared. Where they lie
matters as much as how many they are, so here a list that was measured says in which order they go. What one step skips
the next skips too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from d3engine.depth.policy import DepthPolicy
from d3engine.depth.schedule import NEVER, OnSkip, Schedule, check_bridges, check_on_skip
from d3engine.depth.window import first_step_below
from d3engine.errors import InvalidValueError, require, require_integer, require_number

ALLOWED = "(first, stop) of windows that have no layer in common, as [[6, 9], [12, 15]]"


@dataclass(frozen=True)
class Nested(DepthPolicy):
    """Power-law depth decay over several windows (ours, not published).

    With L layers and i = 0, 1, 2 ... the generated tokens of the sequence, `floor(L * alpha**i)` layers are to run. The
    windows of the list go in its order, each whole, as soon as it and those before it are no more layers than are to be
    left out. So never more layers are left out than by D3 of the same alpha, and at most all of the list.

    Args:
        alpha: the decay, in (0, 1]; 1 never skips.
        windows: (first, stop) for the layers first .. stop - 1, in the order in which they go. `d3engine bridge
            nest` finds one.
        on_skip: what the cache holds at a skipped layer; "none" is enough, since nothing reads it.
        bridges: what stands in for skipped layers: a file of bridges, or "auto" for the one beside the weights. Where
            neighbouring windows are left out together, the file must have their union.
    """

    alpha: float
    windows: Sequence[Sequence[int]]
    on_skip: OnSkip = "none"
    bridges: str | None = None

    name: ClassVar[str] = "nested"

    def __post_init__(self) -> None:
        object.__setattr__(self, "alpha", require_number("alpha", self.alpha, 0, 1, open_low=True))
        object.__setattr__(self, "windows", _checked(self.windows))
        check_on_skip(self.on_skip)
        check_bridges(self.bridges)

    def schedule(self, num_layers: int) -> Schedule:
        """The nested schedule; raises `InvalidValueError` for a window that the model does not have."""
        require_integer("num_layers", num_layers, 1)
        last = max(stop for _, stop in self.windows)
        require(last <= num_layers, "windows", self.windows, f"within the {num_layers} layers of the model")
        cutoffs, left_out = np.full(num_layers, NEVER), 0
        for first, stop in self.windows:
            left_out += stop - first
            wanted = num_layers - left_out + 1
            cutoffs[first:stop] = first_step_below(lambda step: num_layers * self.alpha**step, wanted)
        return Schedule.nested(cutoffs, self.on_skip, self.bridges)

    def describe(self) -> dict[str, Any]:
        """The policy as JSON-ready values."""
        return {**super().describe(), "windows": [list(window) for window in self.windows]}


def _checked(windows: Any) -> tuple[tuple[int, int], ...]:
    """The windows as tuples."""
    try:
        found = tuple((int(first), int(stop)) for first, stop in windows)
        exact = all(pair == tuple(window) for pair, window in zip(found, windows, strict=True))
    except (TypeError, ValueError):
        raise InvalidValueError("windows", windows, ALLOWED) from None
    fits = exact and found and all(0 <= first < stop for first, stop in found)
    in_order = sorted(found)
    apart = all(before[1] <= behind[0] for before, behind in pairwise(in_order))
    require(bool(fits and apart), "windows", windows, ALLOWED)
    return found
