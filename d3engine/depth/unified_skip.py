"""Unified layer skipping: the same layers for every token, as many as the speed-up allows.

The one idea: rather than what a token needs, the wanted speed-up alone says how many layers run, and they are spread
over the model (Liu et al. 2024, "Accelerating Inference in Large Language Models with a Unified Layer Skipping
Strategy"). Which ones is told by the authors' code, and it is followed to the letter here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import numpy as np

from d3engine.depth.policy import DepthPolicy
from d3engine.depth.schedule import NEVER, OnSkip, Schedule, check_bridges, check_on_skip
from d3engine.depth.window import exact_fraction, plain_number
from d3engine.errors import require, require_integer


@dataclass(frozen=True)
class UnifiedSkip(DepthPolicy):
    """Keep K = floor(L / speedup) layers: the first, the last, and every layer in between whose number is a multiple
    of floor(L / (K - 1)), from below, until there are K.

    At speed-ups of 2 and more they are spread over the model. Below about 2 the interval is 1, and what is left out is
    one piece below the last layer: then `EvenSkip` spreads them. The set is the same at every step >= 1; the prompt
    pass, which yields step 0, is full.

    Args:
        speedup: the wanted layer speed-up, at least 1; float, Fraction, Decimal, or text such as "4/3".
        on_skip: what the cache holds at a skipped layer; the authors copy ("copy"), which changes no token.
        bridges: what stands in for skipped layers: a file of bridges, or "auto" for the one beside the weights.
    """

    speedup: float | Fraction
    on_skip: OnSkip = "none"
    bridges: str | None = None

    name: ClassVar[str] = "unified"

    def __post_init__(self) -> None:
        speedup = exact_fraction("speedup", self.speedup)
        require(speedup >= 1, "speedup", self.speedup, "a finite number of at least 1")
        object.__setattr__(self, "speedup", plain_number(speedup))
        check_on_skip(self.on_skip)
        check_bridges(self.bridges)

    def kept_layers(self, num_layers: int) -> list[int]:
        """The layers that run at every step >= 1, ascending."""
        kept = math.floor(num_layers / exact_fraction("speedup", self.speedup))
        require(
            kept >= min(2, num_layers),
            "speedup",
            self.speedup,
            f"at most {num_layers / 2:g}, since the first and the last of {num_layers} layers always run",
        )
        return self._spread(num_layers, kept)

    def _spread(self, num_layers: int, kept: int) -> list[int]:
        """`kept` of the layers, the first and the last among them."""
        interval = num_layers // max(kept - 1, 1)
        inner = range(interval, num_layers - 1, interval)[: max(kept - 2, 0)]
        return sorted({0, *inner, num_layers - 1})

    def schedule(self, num_layers: int) -> Schedule:
        """The nested schedule: cutoff 1 for the layers left out."""
        cutoffs = np.full(require_integer("num_layers", num_layers, 1), 1)
        cutoffs[self.kept_layers(num_layers)] = NEVER
        return Schedule.nested(cutoffs, self.on_skip, self.bridges)
