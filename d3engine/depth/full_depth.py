"""Full depth: every layer for every token, the baseline that all others are measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from d3engine.depth.policy import DepthPolicy
from d3engine.depth.schedule import NEVER, Schedule
from d3engine.errors import require_integer


@dataclass(frozen=True)
class FullDepth(DepthPolicy):
    """Every layer runs for every token."""

    name: ClassVar[str] = "full"

    def schedule(self, num_layers: int) -> Schedule:
        """All cutoffs `NEVER`."""
        return Schedule.nested(np.full(require_integer("num_layers", num_layers, 1), NEVER))
