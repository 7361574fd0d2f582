"""What every executor is to those who build one, give it plans and ask what it has done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from d3engine.executor.computed import Computed
from d3engine.kernels.kv_pool import KVPool
from d3engine.model.llama import Llama
from d3engine.plan import ExecutorCapabilities, Plan


@dataclass(slots=True)
class ExecutorStats:
    """Which executor runs, in words, and its steps by who took them: a graph, the native library, or host and torch.

    With CUDA graphs also how many were captured, in how many seconds, and what memory they take. `bridge_bytes` is what
    the bridges take that policies have named.
    """

    executor: str = "eager"
    graphs_captured: int = 0
    graph_capture_seconds: float = 0.0
    graph_memory_bytes: int = 0
    graph_steps: int = 0
    native_steps: int = 0
    eager_steps: int = 0
    bridge_bytes: int = 0


class Executor(Protocol):
    """Runs plans over a KV pool."""

    stats: ExecutorStats

    @property
    def model(self) -> Llama:
        """The weights that it runs, and the operations for what it runs step by step."""
        ...

    @property
    def pool(self) -> KVPool:
        """The pool [blocks, 2, block_size, kv heads, head_dim]; block 0 is handed to nobody."""
        ...

    @property
    def max_steps(self) -> int:
        """Steps that a plan may stand for (`plan.multi_step`); 0 where the host tells of every step."""
        ...

    @property
    def capabilities(self) -> ExecutorCapabilities:
        """What these steps may hold."""
        ...

    def run(self, plan: Plan) -> Computed:
        """Run the steps of a plan: its entries are written, and logits or chosen tokens returned."""
        ...

    def take_largest(self) -> None:
        """Take the memory that the largest step by itself will need, if that is not taken from the beginning."""
        ...

    def prepare_next(self) -> bool:
        """While there is nothing to run, do one piece of what would else be done when it is first needed.

        False where no piece was left.
        """
        ...

    def close(self) -> None:
        """Let go of what lives beside this object; calling it again does nothing."""
        ...
