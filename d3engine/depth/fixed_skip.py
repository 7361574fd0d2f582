"""Fixed skip: named layers are left out of every token, as pruning by layers leaves them out.

The one idea: a set of layers that somebody has found, published or measured, needs no formula. The prompt still runs
all of them, which is where this differs from a model whose layers were removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from d3engine.depth.layer_ids import checked_layers, cutoffs_without
from d3engine.depth.policy import DepthPolicy
from d3engine.depth.presets import SHORTGPT_ORDER, of_layers
from d3engine.depth.schedule import OnSkip, Schedule, check_bridges, check_on_skip
from d3engine.errors import require, require_integer


@dataclass(frozen=True)
class FixedSkip(DepthPolicy):
    """Leave out the same layers at every step >= 1; the prompt pass, which yields step 0, is full.

    Args:
        skip_layers: ids of the layers, from 0; at least one.
        on_skip: what the cache holds at a skipped layer; "none" is enough, since nothing reads it.
        bridges: what stands in for skipped layers: a file of bridges, or "auto" for the one beside the weights.
    """

    skip_layers: Sequence[int]
    on_skip: OnSkip = "none"
    bridges: str | None = None

    name: ClassVar[str] = "fixed"

    def __post_init__(self) -> None:
        layers = checked_layers("skip_layers", self.skip_layers)
        require(len(layers) > 0, "skip_layers", [], "at least one layer id")
        object.__setattr__(self, "skip_layers", layers)
        check_on_skip(self.on_skip)
        check_bridges(self.bridges)

    def schedule(self, num_layers: int) -> Schedule:
        """The nested schedule: cutoff 1 for the layers left out; refuses a layer that the model has not."""
        require_integer("num_layers", num_layers, 1)
        cutoffs = cutoffs_without("skip_layers", self.skip_layers, num_layers)
        return Schedule.nested(cutoffs, self.on_skip, self.bridges)

    def describe(self) -> dict[str, Any]:
        """The policy as JSON-ready values."""
        return {**super().describe(), "skip_layers": list(self.skip_layers)}

    @classmethod
    def preset(cls, method: str, num_layers: int) -> FixedSkip:
        """The layers that ShortGPT ("shortgpt") removes from Llama-2 of 32 or 40 layers, a quarter of them or more."""
        return cls(of_layers(SHORTGPT_ORDER, method, num_layers))
