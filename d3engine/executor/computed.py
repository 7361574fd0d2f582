"""What running a plan yields, by any executor."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from d3engine.cache.kv_cache import IntArray
from d3engine.plan import Chosen, Cycled, Plan


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step gives for its sampled rows: `logits` float32 [plan.logit_rows, V], or the tokens where the device has
    chosen, or drafted and verified, them itself.

    `depths` [C] are the layers that each chunk ran, where some left before the plan's last layer, and None where all
    ran what the plan says.
    """

    logits: Tensor | Chosen | Cycled
    depths: IntArray | None = None

    def carried_out(self, plan: Plan) -> Plan:
        """The plan that this comes of, with as many steps as were really taken."""
        if isinstance(self.logits, Cycled):
            return plan.ended_after(len(self.logits.counts), self.logits.num_passes)
        return plan.ended_after(self.logits.num_steps) if isinstance(self.logits, Chosen) else plan
