"""Compiles kernels before the first request: a small prompt of each class of rows, and the
graphs of the deepest step."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from tqdm import tqdm

from d3engine.executor.cuda_graph import GraphExecutor
from d3engine.executor.draft_target import executors_of
from d3engine.executor.interface import Executor
from d3engine.executor.memory import draw, largest_plan
from d3engine.model.adapters import Adapter
from d3engine.scheduling.scheduler import SchedulerConfig
from d3engine.utils.progress import bar_columns, hides_bars

_log = logging.getLogger(__name__)

PRODUCT_ROWS = (1, 2, 9, 17, 33, 65, 129, 257, 385, 513)
"""The first row count of each tile of a product; those from 129 on are of quantized weights."""


def warm_up(executor: Executor, config: SchedulerConfig, *, block_size: int, adapters: Sequence[Adapter] = ()) -> None:
    """Run a prompt of each class of rows, of each adapter too, and capture the expected graphs of most layers.

    Graphs of fewer layers need no further kernel: they are captured while the engine waits. The pool's entries are
    overwritten, so this comes before the first of them is kept. Prompts that the pool cannot hold are left out.
    """
    begun = time.perf_counter()
    for one in executors_of(executor):
        _warm_up_one(one, config, block_size, adapters)
    seconds = time.perf_counter() - begun
    _log.info("kernels for prompts of any length and %d graphs in %.1f s", executor.stats.graphs_captured, seconds)


def _warm_up_one(executor: Executor, config: SchedulerConfig, block_size: int, adapters: Sequence[Adapter]) -> None:
    model, steps_before = executor.model.config, executor.stats.eager_steps
    most = min(config.max_num_batched_tokens, config.max_model_len - 1)
    rows = [count for count in row_classes(model.num_heads // model.num_kv_heads) if count <= most]
    graphs = executor.num_deepest if isinstance(executor, GraphExecutor) else 0
    prompts = list(product((None, *adapters), rows))
    with tqdm(desc="Compiling", total=len(prompts) + graphs, disable=hides_bars(), ncols=bar_columns()) as bar:
        for adapter, count in prompts:
            alone = replace(config, max_num_seqs=1, max_num_batched_tokens=count)
            plan, num_blocks = largest_plan(alone, model.num_layers, block_size)
            for sequence in plan.sequences:
                sequence.adapter = adapter
            if num_blocks < executor.pool.shape[0]:  # a smaller cache never has so long a step
                draw(executor.run(plan), plan, alone)
            bar.update()
        executor.stats.eager_steps = steps_before  # of requests alone
        if isinstance(executor, GraphExecutor):
            executor.take_largest()  # it has penalties, whose kernels no expected graph brings
        for _ in range(graphs):
            if not executor.prepare_next():
                break
            bar.update()


def row_classes(group: int) -> list[int]:
    """The first row count of each class, where `group` heads of queries share one of keys and values.

    Attention packs the rows of a prompt times these heads into tiles of three other classes.
    """
    return sorted({*PRODUCT_ROWS, 16 // group + 1, 256 // group + 1})
