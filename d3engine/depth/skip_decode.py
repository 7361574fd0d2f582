"""SkipDecode: one depth per generation step, falling linearly from full to a minimum.

The one idea: the lowest layers warm up every token, the uppermost run too, and what lies above the warm-up is
skipped from below, a little more at each step (Del Corro et al. 2023, "SkipDecode").
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from d3engine.depth.policy import DepthPolicy
from d3engine.depth.presets import MAX_TOKENS, SKIP_DECODE_MEANS, of_layers
from d3engine.depth.schedule import OnSkip, Schedule, check_bridges, check_on_skip
from d3engine.depth.statistics import mean_depth
from d3engine.depth.window import exact_fraction, window_cutoffs
from d3engine.errors import require, require_integer, require_number


@dataclass(frozen=True)
class SkipDecode(DepthPolicy):
    """Linear depth decay over `max_tokens` steps.

    With N = max_tokens, at step i >= 1 the layers [warmup, warmup + L - n_i) are skipped, where

        n_i = max(min_layers, round(max_layers - (max_layers - min_layers) * i / (N - 1)))

    Halves are rounded up (towards more layers), in integer arithmetic. From step N - 1 on the depth stays
    `min_layers`. Step 0 is at full depth whatever `max_layers` says, because the prompt pass yields it. The
    windows are nested, so no entries are needed; `on_skip="copy"` reproduces the published behaviour (same
    tokens).

    Args:
        max_tokens: N, the steps of the decay, at least 2.
        min_layers: the depth of the last step, at least `warmup`; None where `mean_layers` is given.
        max_layers: the depth the line starts from; None is all layers.
        warmup: this many lowest layers always run.
        on_skip: what the cache holds at a skipped layer.
        mean_layers: the mean depth over `max_tokens` steps, instead of `min_layers` and `max_layers`: a decay from all
            layers to the `min_layers` that `for_mean` finds once their number is known.
        bridges: what stands in for skipped layers: a file of bridges, or "auto" for the one beside the weights.
    """

    max_tokens: int
    min_layers: int | None = None
    max_layers: int | None = None
    warmup: int = 1
    on_skip: OnSkip = "none"
    mean_layers: float | None = None
    bridges: str | None = None

    name: ClassVar[str] = "skipdecode"

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_tokens", require_integer("max_tokens", self.max_tokens, 2))
        object.__setattr__(self, "warmup", require_integer("warmup", self.warmup, 0))
        if self.mean_layers is not None:
            given = {"min_layers": self.min_layers, "max_layers": self.max_layers}
            for field, value in given.items():
                require(value is None, field, value, "absent beside mean_layers")
            mean = float(exact_fraction("mean_layers", self.mean_layers))
            require(mean > 0, "mean_layers", self.mean_layers, "a finite number above 0")
            object.__setattr__(self, "mean_layers", mean)
        else:
            require(self.min_layers is not None, "min_layers", None, "given, or mean_layers in its place")
            object.__setattr__(self, "min_layers", require_integer("min_layers", self.min_layers, max(1, self.warmup)))
        if self.max_layers is not None:
            object.__setattr__(self, "max_layers", require_integer("max_layers", self.max_layers, self.min_layers or 1))
        check_on_skip(self.on_skip)
        check_bridges(self.bridges)

    def layers_at(self, step: int, num_layers: int) -> int:
        """`n_i` of the class's formula, for any step."""
        assert self.min_layers is not None, "the policy is one of a mean depth"
        lowest = self.min_layers
        highest = num_layers if self.max_layers is None else self.max_layers
        last_step = self.max_tokens - 1
        numerator = highest * last_step - (highest - lowest) * min(step, last_step)
        return (2 * numerator + last_step) // (2 * last_step)  # round half up

    def schedule(self, num_layers: int) -> Schedule:
        """The nested schedule; raises `InvalidValueError` if the depths do not fit `num_layers`."""
        require_integer("num_layers", num_layers, 1)
        if self.mean_layers is not None:
            found = self.for_mean(
                self.mean_layers, num_layers=num_layers, max_tokens=self.max_tokens, warmup=self.warmup
            )
            return replace(found, on_skip=self.on_skip, bridges=self.bridges).schedule(num_layers)
        lowest = require_integer("min_layers", self.min_layers, 1, num_layers)
        if self.max_layers is not None:
            require_integer("max_layers", self.max_layers, 1, num_layers)
        end = self.warmup + num_layers - lowest
        cutoffs = window_cutoffs(num_layers, self.warmup, end, lambda step: self.layers_at(step, num_layers))
        return Schedule.nested(cutoffs, self.on_skip, self.bridges)

    @classmethod
    def for_mean(cls, mean_layers: float, *, num_layers: int, max_tokens: int, warmup: int = 1) -> SkipDecode:
        """The decay from full depth whose mean depth over `max_tokens` steps is closest to `mean_layers`.

        `min_layers` is a whole number, so the mean is met to about a quarter of a layer; of two equally close
        ones the deeper is returned. Raises `InvalidValueError` for a mean that no `min_layers` reaches.
        """
        require_integer("num_layers", num_layers, 1)
        lowest = require_integer("warmup", warmup, 0, num_layers)
        candidates = [cls(max_tokens, layers, warmup=warmup) for layers in range(num_layers, max(lowest, 1) - 1, -1)]
        means = [mean_depth(candidate.schedule(num_layers), max_tokens) for candidate in candidates]
        wanted = require_number("mean_layers", mean_layers, means[-1], num_layers)
        distances = [abs(mean - wanted) for mean in means]
        return candidates[distances.index(min(distances))]

    @classmethod
    def preset(cls, task: str, num_layers: int) -> SkipDecode:
        """The mean depth that the D3 paper's Table 6 prints for SkipDecode on "bbh" or "gsm8k", of Llama-2."""
        mean = of_layers(SKIP_DECODE_MEANS, task, num_layers)
        return cls(MAX_TOKENS[task], mean_layers=mean)
