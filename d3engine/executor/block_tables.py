"""The block tables as the device has them, kept up to date by what changed and not by copying them whole.

A sequence's table only grows while it runs: a step appends blocks, and what a sleeping layer gives back is never read
again. So a slot is copied whole when another sequence has taken it, and afterwards only where it has grown.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from d3engine.cache.kv_cache import IntArray
from d3engine.plan import Plan


class DeviceBlockTables:
    """A copy of the cache's tables [slots, L, max_blocks] int32 on a device."""

    def __init__(self, slots: int, layers: int, blocks: int, device: torch.device) -> None:
        self._tensor = torch.zeros(slots, layers, blocks, dtype=torch.int32, device=device)
        self._owners: list[tuple[object, int] | None] = [None] * slots
        self._columns = np.zeros(slots, dtype=np.int64)
        self._order: IntArray = np.empty(0, dtype=np.int64)

    def write_rows(self, plan: Plan, columns: IntArray, rows: Tensor) -> None:
        """Write the first `columns` [C] blocks of the plan's chunks to the first C rows of `rows` [L, B, max_blocks].

        `rows` is kept by the caller, and written by nobody else: what has not changed since the last call is left.
        """
        changed = self._update(plan, columns)
        if changed or not np.array_equal(self._order, plan.slots):
            self._order = plan.slots
            rows[:, : plan.slots.size] = self._tensor[torch.from_numpy(plan.slots).to(rows.device)].transpose(0, 1)

    def _update(self, plan: Plan, columns: IntArray) -> bool:
        """Bring the slots up to date; whether anything had to be."""
        slots = plan.slots
        for slot, sequence in zip(slots.tolist(), plan.sequences, strict=True):
            owner = (sequence, sequence.num_preemptions)  # who comes back after a preemption has other blocks
            if self._owners[slot] != owner:
                self._owners[slot] = owner
                self._columns[slot] = 0
        grown = self._columns[slots] < columns
        if not grown.any():
            return False
        first, last = int(self._columns[slots[grown]].min()), int(columns[grown].max())
        which = torch.from_numpy(slots[grown]).to(self._tensor.device)
        fresh = torch.from_numpy(plan.tables[slots[grown], :, first:last]).to(self._tensor.device)
        self._tensor[which, :, first:last] = fresh
        self._columns[slots[grown]] = columns[grown]
        return True
