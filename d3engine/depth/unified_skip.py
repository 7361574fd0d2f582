"""Unified layer skipping: the same evenly spaced layers for every token, as many as the speed-up allows.

The one idea: rather than a contiguous piece of the model, layers are left out in balance, so that no jump
between two layers that run is much wider than another (Liu et al. 2024, "A Unified Layer Skipping Strategy").
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import numpy as np

from d3engine.depth.policy import DepthPolicy
from d3engine.depth.schedule import NEVER, OnSkip, Schedule, check_on_skip
from d3engine.depth.window import exact_fraction, plain_number
from d3engine.errors import require, require_integer


@dataclass(frozen=True)
class UnifiedSkip(DepthPolicy):
    """Keep K = floor(L / speedup) evenly spaced layers, the first and the last among them.

    The interval between kept layers is the real number (L - 1) / (K - 1), and kept layer j is number j times
    the interval, halves rounded up, j = 0 .. K - 1. A whole interval would not do: at speed-ups below 2 it is
    1, which keeps one solid piece and is not balanced. The set is the same at every step >= 1; the prompt
    pass, which yields step 0, is full.

    Args:
        speedup: the wanted layer speed-up, at least 1; float, Fraction, Decimal, or text such as "4/3".
        on_skip: what the cache holds at a skipped layer.
    """

    speedup: float | Fraction
    on_skip: OnSkip = "none"

    name: ClassVar[str] = "unified"

    def __post_init__(self) -> None:
        speedup = exact_fraction("speedup", self.speedup)
        require(speedup >= 1, "speedup", self.speedup, "a finite number of at least 1")
        object.__setattr__(self, "speedup", plain_number(speedup))
        check_on_skip(self.on_skip)

    def kept_layers(self, num_layers: int) -> list[int]:
        """The layers that run at every step >= 1, ascending."""
        kept = math.floor(num_layers / exact_fraction("speedup", self.speedup))
        require(
            kept >= min(2, num_layers),
            "speedup",
            self.speedup,
            f"at most {num_layers / 2:g}, since the first and the last of {num_layers} layers always run",
        )
        # j * (L - 1) / (K - 1), rounded half up in integers; the spacing is at least 1, so no two fall
        # together.
        gaps = max(kept - 1, 1)
        return [(2 * j * (num_layers - 1) + gaps) // (2 * gaps) for j in range(kept)]

    def schedule(self, num_layers: int) -> Schedule:
        """The nested schedule: cutoff 1 for the layers left out."""
        cutoffs = np.full(require_integer("num_layers", num_layers, 1), 1)
        cutoffs[self.kept_layers(num_layers)] = NEVER
        return Schedule.nested(cutoffs, self.on_skip)
