"""D3, position-aware depth decay: later tokens of an answer are easier, so each runs a little less deep.

The one idea: depth falls as a power of the generation step, and the layers that go are one window that starts
at a fixed fraction of the model and grows towards its last layer. So what one step skips, the next skips too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from d3engine.depth.policy import DepthPolicy
from d3engine.depth.presets import preset
from d3engine.depth.schedule import OnSkip, Schedule, check_bridges, check_on_skip
from d3engine.depth.window import exact_fraction, plain_number, window_cutoffs
from d3engine.errors import require, require_integer, require_number


@dataclass(frozen=True)
class D3(DepthPolicy):
    """Power-law depth decay (the D3 paper, section 3).

    With L layers and i = 0, 1, 2 ... the generated tokens of the sequence:

        first  = floor(start * L)                            exactly: start is the number as it is written
        keep_i = max(floor(L * alpha**i), first + tail)      in float64
        skip_i = layers [first, first + L - keep_i)

    The prompt pass yields token 0 at full depth. A small `start` on a small model can leave no layer at all
    for late tokens; that is what the formula says, and the engine does it.

    Args:
        alpha: the decay, in (0, 1]; 1 never skips.
        start: the fraction of the layers below the window, in (0, 1); float, Fraction, Decimal, or text such
            as "1/3".
        tail: this many last layers are never skipped (ours, not in the paper).
        on_skip: what the cache holds at a skipped layer; "none" is enough, since nothing reads it.
        bridges: what stands in for skipped layers: a file of bridges, or "auto" for the one beside the weights.
    """

    alpha: float
    start: float | Fraction
    tail: int = 0
    on_skip: OnSkip = "none"
    bridges: str | None = None

    name: ClassVar[str] = "d3"

    def __post_init__(self) -> None:
        alpha = require_number("alpha", self.alpha, 0, 1, open_low=True)
        start = exact_fraction("start", self.start)
        require(0 < start < 1, "start", self.start, "a finite number in (0, 1)")
        object.__setattr__(self, "alpha", alpha)
        object.__setattr__(self, "start", plain_number(start))
        object.__setattr__(self, "tail", require_integer("tail", self.tail, 0))
        check_on_skip(self.on_skip)
        check_bridges(self.bridges)

    def first_layer(self, num_layers: int) -> int:
        """The lowest layer that is ever skipped, `floor(start * L)` in exact arithmetic."""
        return math.floor(exact_fraction("start", self.start) * num_layers)

    def schedule(self, num_layers: int) -> Schedule:
        """The nested schedule; raises `InvalidValueError` if `tail` reaches below the window."""
        require_integer("num_layers", num_layers, 1)
        first = self.first_layer(num_layers)
        require(
            first + self.tail <= num_layers,
            "tail",
            self.tail,
            f"at most {num_layers - first}, since the window starts at layer {first} of {num_layers}",
        )
        cutoffs = window_cutoffs(num_layers, first, num_layers - self.tail, lambda step: num_layers * self.alpha**step)
        return Schedule.nested(cutoffs, self.on_skip, self.bridges)

    @classmethod
    def preset(cls, task: str, num_layers: int) -> D3:
        """The setting of the D3 paper for "bbh" or "gsm8k" and a Llama-2 of `num_layers`."""
        alpha, start = preset(task, num_layers)
        return cls(alpha, start)
