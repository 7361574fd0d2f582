"""The chunks of a step while it is being planned: which tokens of which sequences run, and through which layers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from d3engine.cache.kv_cache import IntArray
from d3engine.plan import BoolArray


@dataclass(frozen=True, slots=True)
class Chunks:
    """C chunks; each is a run of tokens of one slot that all run the same layers.

    No slot has a trait that is not among `traits`, so that a step of plain sequences need not look for any.
    """

    slots: IntArray  # [C]
    starts: IntArray  # [C] the first position
    stops: IntArray  # [C] the position after the last
    steps: IntArray  # [C] the generation step of the first token; -1 in the prompt
    active: BoolArray  # [C, L]
    traits: int

    def deepest_first(self) -> Chunks:
        """The same chunks, those that run more layers before those that run fewer; of one depth, the youngest first.

        Chunks of one schedule keep this order at every later step.
        """
        if self.slots.size == 1:
            return self
        return self.take(np.lexsort((self.steps, -self.active.sum(axis=1))))

    def take(self, which: IntArray | BoolArray) -> Chunks:
        """The chunks at these indices, or where a mask is True."""
        starts, stops, steps = self.starts[which], self.stops[which], self.steps[which]
        return Chunks(self.slots[which], starts, stops, steps, self.active[which], self.traits)
