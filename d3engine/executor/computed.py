"""What running a plan yields, by any executor."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from d3engine.kv_cache import IntArray


@dataclass(frozen=True, slots=True)
class Computed:
    """Float32 `logits` [plan.logit_rows, V]; `depths` [C] are the layers that each chunk ran, where some left before
    the plan's last layer, and None where all ran what the plan says."""

    logits: Tensor
    depths: IntArray | None = None
