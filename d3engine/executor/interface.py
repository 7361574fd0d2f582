"""What every executor is to those who build one, give it plans and ask what it has done."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from d3engine.kernels.kv_pool import KVPool
from d3engine.model.llama import Llama
from d3engine.scheduling.kv_cache import IntArray
from d3engine.scheduling.plan import Chosen, Cycled, ExecutorCapabilities, Plan


@dataclass(frozen=True, slots=True)
class Drafted:
    """Float32 `logits` [plan.logit_rows, V], and the tokens that a draft model has drafted without the host: those of
    `plan.drafts.lengths`, in the order of its plan's sampled chunks."""

    logits: Tensor
    tokens: Chosen


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step gives for its sampled rows: `logits` float32 [plan.logit_rows, V], or the tokens where the device has
    chosen, or drafted and verified, them itself.

    `depths` [C] are the layers that each chunk ran, where some left before the plan's last layer, and None where all
    ran what the plan says. `captured` are the hidden states [S, rows, H] of each of the plan's captured rows, of S
    steps, before which the host has had those of `num_before` steps of the same run.
    """

    logits: Tensor | Chosen | Cycled | Drafted
    depths: IntArray | None = None
    captured: tuple[Tensor, ...] = ()
    num_before: int = 0

    def carried_out(self, plan: Plan) -> Plan:
        """The plan that this comes of, with as many steps as were really taken."""
        if isinstance(self.logits, Cycled):
            return plan.ended_after(len(self.logits.counts), self.logits.num_passes)
        return plan.ended_after(self.logits.num_steps) if isinstance(self.logits, Chosen) else plan


def to_device(array: IntArray, device: torch.device) -> Tensor:
    """A copy of `array` on a device, for which the host does not wait: the device may be at earlier work."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # torch keeps this memory until it has been copied
    return tensor.to(device, non_blocking=True)


class DeviceBlockTables:
    """A copy of the cache's tables [slots, L, max_blocks] int32 on a device."""

    def __init__(self, slots: int, layers: int, blocks: int, device: torch.device) -> None:
        self._tensor = torch.zeros(slots, layers, blocks, dtype=torch.int32, device=device)
        self._owners: list[tuple[object, int] | None] = [None] * slots
        self._columns = np.zeros(slots, dtype=np.int64)
        self._order: IntArray = np.empty(0, dtype=np.int64)

    def write_rows(self, plan: Plan, columns: IntArray, rows: Tensor, slots: IntArray) -> None:
        """Write the first `columns` [C] blocks of the plan's chunks to `rows` [L, B, max_blocks].

        The first R rows are those of `slots` [R], in which a chunk may stand several times.

        `rows` is kept by the caller, and written by it alone: what has not changed since the last call is left.
        """
        changed = self._update(plan, columns)
        if changed or not np.array_equal(self._order, slots):
            self._order = slots
            rows[:, : slots.size] = self._tensor[to_device(slots, rows.device)].transpose(0, 1)

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
        which = to_device(slots[grown], self._tensor.device)
        fresh = to_device(plan.tables[slots[grown], :, first:last], self._tensor.device)
        self._tensor[which, :, first:last] = fresh
        self._columns[slots[grown]] = columns[grown]
        return True


@dataclass(slots=True)
class ExecutorStats:
    """Which executor and backend run, and its steps by who took them: a graph, the native library, or host and torch.

    With CUDA graphs also how many were captured, in how many seconds, and what memory they take. `bridge_bytes` is what
    the bridges take that policies have named, `student_bytes` the matrices of students that are made.
    """

    executor: str = "eager"
    backend: str = "torch"
    graphs_captured: int = 0
    graph_capture_seconds: float = 0.0
    graph_memory_bytes: int = 0
    graph_steps: int = 0
    native_steps: int = 0
    eager_steps: int = 0
    bridge_bytes: int = 0
    student_bytes: int = 0


class Executor:
    """Runs plans over a KV pool.

    Attributes:
        stats: what it is, and what it has done.
        model: the weights that it runs, and the operations for what it runs step by step.
        pool: the pool [blocks, 2, block_size, kv heads, head_dim]; block 0 is never handed out.
        max_steps: steps that a plan may stand for (`plan.multi_step`); 0 where the host tells of every step.
        capabilities: what these steps may hold.
    """

    stats: ExecutorStats
    model: Llama
    pool: KVPool
    max_steps: int = 0
    capabilities: ExecutorCapabilities = ExecutorCapabilities()

    @abstractmethod
    def run(self, plan: Plan) -> Computed:
        """Run the steps of a plan: its entries are written, and logits or chosen tokens returned."""

    def run_share(self, plan: Plan) -> Computed:
        """The logits of a single step, whose copies of entries are the caller's; of executors that have students."""
        raise TypeError(f"{type(self).__name__} has no students")

    def make_students(self) -> None:
        """Make the weights of the students that the engine's policy names: no request should wait for them."""

    def take_largest(self) -> None:
        """Take the memory that the largest step by itself will need, if that is not taken from the beginning."""

    def prepare_next(self) -> bool:
        """While there is nothing to run, do one piece of what would else be done when it is first needed.

        False where no piece was left.
        """
        return False

    def close(self) -> None:
        """Let go of what lives beside this object; calling it again does nothing."""
