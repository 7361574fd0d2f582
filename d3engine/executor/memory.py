"""What a device must keep free beside weights and KV cache: the largest step, and the graphs.

It is measured, not estimated: the largest graph is captured, then the largest step that the scheduler may plan is run
once, and as many tokens drawn as a step may draw, over a cache that holds just that step. What memory the device then
has less is what they need. In this order, since a capture gives back to the device what steps before it have left.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from d3engine.depth import FullDepth
from d3engine.executor.cuda_graph import GraphExecutor
from d3engine.executor.draft_target import executors_of
from d3engine.executor.interface import Computed, Executor
from d3engine.executor.sampler import Rows, best_of, scores_of, with_noise
from d3engine.request.admission import Immediate
from d3engine.request.params import SamplingParams
from d3engine.scheduling.kv_cache import KVCache
from d3engine.scheduling.plan import Plan
from d3engine.scheduling.scheduler import Scheduler, SchedulerConfig
from d3engine.scheduling.sequence import Sequence


def workspace_bytes(
    build: Callable[[int], Executor],
    config: SchedulerConfig,
    *,
    num_layers: int,
    block_size: int,
    free_bytes: Callable[[], int],
) -> int:
    """Bytes that the executor needs beside weights and pool.

    `build(num_blocks)` makes an executor over a pool of that many blocks, with that of a draft model perhaps; it is
    dropped again. `free_bytes()` is what the device has free.
    """
    plan, num_blocks = largest_plan(config, num_layers, block_size)
    _give_back()  # what loading has left would serve the trial step, and then be counted as free
    before = free_bytes()
    executor = build(num_blocks)
    executor.take_largest()
    draw(executor.run(plan), plan, config)
    needed = before - free_bytes()
    for one in executors_of(executor):
        needed -= one.pool.nbytes
        if isinstance(one, GraphExecutor):
            needed += one.expected_bytes()  # one graph was measured, many are to come
    del executor, one
    _give_back()
    return max(0, needed)


def draw(computed: Computed, plan: Plan, config: SchedulerConfig) -> None:
    """Choose as many tokens as a step may by what takes most memory: cuts, which sort rows, while all logits live."""
    assert isinstance(computed.logits, Tensor), "the largest plan wants logits of prompts"
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, min_p=0.01)
    rows = computed.logits[: config.max_num_seqs]
    sequences: Rows = [replace(plan.sequences[0], params=params)] * len(rows)
    best_of(with_noise(scores_of(rows, sequences), sequences))


def _give_back() -> None:
    """Let the device have again what torch's allocator keeps of tensors that are gone."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def largest_plan(config: SchedulerConfig, num_layers: int, block_size: int) -> tuple[Plan, int]:
    """The step of most rows and most logits: as much prompt as a step takes, the logits of every row wanted.

    Returns it with the number of blocks that it uses, which are 1, 2, 3 ...
    """
    rows = config.max_num_batched_tokens
    length = min(rows, config.max_model_len - 1)
    count = min(-(-rows // length), config.max_num_seqs)
    num_blocks = count * num_layers * -(-length // block_size)
    cache = KVCache(
        num_layers=num_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        max_sequences=count,
        max_length=config.max_model_len,
    )
    alone = replace(config, max_num_seqs=count, admission=Immediate(), num_scheduler_steps=0)
    scheduler = Scheduler(alone, cache)
    for index in range(count):
        scheduler.add(
            Sequence(
                request_id=str(index),
                index=0,
                prompt_token_ids=[0] * length,
                params=SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0),
                schedule=FullDepth().schedule(num_layers),
                eos_token_ids=frozenset(),
                seed=0,
                priority=0,
                arrival=index,
                max_length=length + 1,
                shares_prompt=False,
            )
        )
    plan = scheduler.schedule()
    assert plan is not None
    return plan, num_blocks
