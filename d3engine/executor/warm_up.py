"""Compiles kernels before the first request, by a small prompt of each class of rows and the
graphs of the deepest step; and those of what is loaded later, where it is loaded."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from tqdm import tqdm

from d3engine.executor.adapters import AdapterStore
from d3engine.executor.bridging import BridgeStore
from d3engine.executor.cuda_graph import GraphExecutor
from d3engine.executor.draft_target import executors_of
from d3engine.executor.eager import EagerExecutor
from d3engine.executor.interface import Executor
from d3engine.executor.memory import draw, largest_plan
from d3engine.kernels.low_rank import LM_HEAD
from d3engine.model.adapters import Adapter
from d3engine.model.bridges import BridgeWeights
from d3engine.scheduling.plan import Plan
from d3engine.scheduling.scheduler import SchedulerConfig
from d3engine.utils.progress import bar_columns, hides_bars

_log = logging.getLogger(__name__)

PRODUCT_ROWS = (1, 2, 9, 17, 33, 65, 129, 257, 385, 513)
"""The first row count of each tile of a product; those from 129 on are of quantized weights."""


def warm_up(
    executor: Executor,
    config: SchedulerConfig,
    *,
    block_size: int,
    adapters: AdapterStore | None = None,
    bridges: BridgeStore | None = None,
) -> None:
    """Run a prompt of each class of rows, capture the expected graphs of most layers, and follow the stores.

    Graphs of fewer layers need no further kernel: they are captured while the engine waits. The pool's entries are
    overwritten, so this comes before the first of them is kept. Prompts that the pool cannot hold are left out.
    """
    begun = time.perf_counter()
    prompts = Prompts(config, block_size)
    for one in executors_of(executor):
        _warm_up_one(one, prompts)
    compiler = LoadCompiler(executors_of(executor)[0], prompts)
    if adapters is not None:
        adapters.follow(compiler.compile_adapter)
    if bridges is not None:
        bridges.follow(compiler.compile_bridges, compiler.compile_student)
    seconds = time.perf_counter() - begun
    _log.info("kernels for prompts of any length and %d graphs in %.1f s", executor.stats.graphs_captured, seconds)


def _warm_up_one(executor: Executor, prompts: Prompts) -> None:
    steps_before = executor.stats.eager_steps
    rows = prompts.rows(executor)
    graphs = executor.num_deepest if isinstance(executor, GraphExecutor) else 0
    with tqdm(desc="Compiling", total=len(rows) + graphs, disable=hides_bars(), ncols=bar_columns()) as bar:
        for count in rows:
            plan, _, alone = prompts.of(executor, count)
            computed = executor.run(plan)
            if plan.prompt_rows:  # else ranks choose among themselves
                draw(computed, plan, alone)
            bar.update()
        executor.stats.eager_steps = steps_before  # of requests alone
        if isinstance(executor, GraphExecutor):
            executor.take_largest()  # it has penalties, whose kernels no expected graph brings
        for _ in range(graphs):
            if not executor.prepare_next():
                break
            bar.update()


@dataclass(frozen=True)
class Prompts:
    """Plans of one prompt each, for an executor of these limits."""

    config: SchedulerConfig
    block_size: int

    def rows(self, executor: Executor) -> list[int]:
        """The first row count of each class that a step and the pool can hold."""
        model = executor.model.config
        most = min(self.config.max_num_batched_tokens, self.config.max_model_len - 1)
        blocks = (executor.pool.shape[0] - 1) // model.num_layers  # a smaller cache never has so long a step
        most = min(most, blocks * self.block_size)
        return [count for count in row_classes(model.num_heads // model.num_kv_heads) if count <= most]

    def of(self, executor: Executor, count: int) -> tuple[Plan, int, SchedulerConfig]:
        """A prompt of `count` rows that also copies an entry, the blocks that it takes, and the limits of its step."""
        alone = replace(self.config, max_num_seqs=1, max_num_batched_tokens=count)
        plan, num_blocks = largest_plan(alone, executor.model.config.num_layers, self.block_size)
        first = np.zeros(1, dtype=np.int64)  # of the block that no sequence has
        return replace(plan, copies_after=(first, first)), num_blocks, alone


class LoadCompiler:
    """Compiles what adapters, bridges and students need before a step runs them, on the thread that loads them.

    Another thread may run steps: prompts take another pool.
    """

    def __init__(self, executor: Executor, prompts: Prompts) -> None:
        self._executor = weakref.ref(executor)  # an engine that is closed drops it
        self._prompts = prompts
        self._matrices: frozenset[str] = frozenset()

    def compile_adapter(self, adapter: Adapter) -> None:
        """Compile the sums of those matrices that no adapter before had maps for; ranks make no difference."""
        executor = self._executor()
        if executor is None or adapter.matrices <= self._matrices:
            return
        self._run(_eager(executor), adapter)
        if LM_HEAD in adapter.matrices and isinstance(executor, GraphExecutor):
            executor.draw_from_logits()
        self._matrices |= adapter.matrices

    def compile_student(self, name: str) -> None:
        """Make a student's weights, and run prompts by them: rows that come back after a preemption are many."""
        if (executor := self._executor()) is not None:
            self._run(_eager(executor).students.of(name))

    @torch.inference_mode()
    def compile_bridges(self, bridges: Iterable[BridgeWeights]) -> None:
        """Cross one bridge of each rank, as eager steps do and as graphs do."""
        if (executor := self._executor()) is None:
            return
        kinds = {(one.weight.shape, None if one.down is None else one.down.shape): one for one in bridges}
        for bridge, count in product(kinds.values(), self._prompts.rows(executor)):
            states = bridge.offset.new_zeros(count, bridge.offset.shape[0])
            for num_rows in (None, torch.zeros(1, dtype=torch.int32, device=states.device)):
                bridge.cross(executor.model.kernels, states, num_rows)

    def _run(self, eager: EagerExecutor, adapter: Adapter | None = None) -> None:
        for count in self._prompts.rows(eager):
            plan, num_blocks, _ = self._prompts.of(eager, count)
            plan.sequences[0].adapter = adapter
            eager.over_small_pool(num_blocks).run(replace(plan, prompt_rows=()))


def _eager(executor: Executor) -> EagerExecutor:
    eager = executor.eager if isinstance(executor, GraphExecutor) else executor
    assert isinstance(eager, EagerExecutor), "several ranks refuse adapters and students"
    return eager


def row_classes(group: int) -> list[int]:
    """The first row count of each class, where `group` heads of queries share one of keys and values.

    Attention packs the rows of a prompt times these heads into tiles of three other classes.
    """
    return sorted({*PRODUCT_ROWS, 16 // group + 1, 256 // group + 1})
