"""Tail skip: later tokens leave out the last layers, as many as a given mean depth asks for.

The one idea: an early exit whose budget is fixed beforehand. It looks at no hidden state, so it needs no LM head in the
middle of the model, and what it never runs again it frees.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import floor
from typing import ClassVar

import numpy as np

from d3engine.depth.policy import DepthPolicy
from d3engine.depth.schedule import NEVER, OnSkip, Schedule, check_bridges, check_on_skip
from d3engine.depth.window import exact_fraction, plain_number
from d3engine.errors import require, require_integer


@dataclass(frozen=True)
class TailSkip(DepthPolicy):
    """The lowest layers only, from step 1 on, so that the mean over `max_tokens` steps is `mean_layers`.

    This is the budget-matched baseline of comparisons at equal mean depth. With N = max_tokens and L layers, step 0 is
    at full depth and the other N - 1 steps share what is left of the budget, `round(N * mean_layers) - L` layer runs
    (halves up), as evenly as whole layers allow: the first ones run one layer more than the rest. The mean is so met to
    within half a layer run in all. From step N on the depth stays that of step N - 1.

    Args:
        mean_layers: the mean depth; float, Fraction, Decimal, or text such as "32/3".
        max_tokens: N, the steps that the mean is over, at least 2.
        on_skip: what the cache holds at a skipped layer; "none" is enough, since nothing reads it.
        bridges: what stands in for skipped layers: a file of bridges, or "auto" for the one beside the weights.
    """

    mean_layers: float | Fraction
    max_tokens: int
    on_skip: OnSkip = "none"
    bridges: str | None = None

    name: ClassVar[str] = "tail-skip"

    def __post_init__(self) -> None:
        mean = exact_fraction("mean_layers", self.mean_layers)
        require(mean > 0, "mean_layers", self.mean_layers, "a finite number above 0")
        object.__setattr__(self, "mean_layers", plain_number(mean))
        object.__setattr__(self, "max_tokens", require_integer("max_tokens", self.max_tokens, 2))
        check_on_skip(self.on_skip)
        check_bridges(self.bridges)

    def schedule(self, num_layers: int) -> Schedule:
        """The nested schedule; raises `InvalidValueError` for a mean that 1 to `num_layers` layers do not reach."""
        require_integer("num_layers", num_layers, 1)
        later_steps = self.max_tokens - 1
        budget = floor(exact_fraction("mean_layers", self.mean_layers) * self.max_tokens + Fraction(1, 2)) - num_layers
        lowest = (num_layers + later_steps) / self.max_tokens
        allowed = f"from {lowest:g} (1 layer after step 0) to {num_layers}"
        require(later_steps <= budget <= later_steps * num_layers, "mean_layers", self.mean_layers, allowed)
        layers, steps_with_one_more = divmod(budget, later_steps)
        cutoffs = np.full(num_layers, NEVER)
        cutoffs[layers:] = 1
        if steps_with_one_more:
            cutoffs[layers] = 1 + steps_with_one_more
        return Schedule.nested(cutoffs, self.on_skip, self.bridges)
