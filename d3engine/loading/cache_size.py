"""How many blocks the KV cache gets: of what the memory allows, and no more than all sequences could use."""

from __future__ import annotations

from collections.abc import Callable

import torch

from d3engine.errors import require, require_integer, require_number
from d3engine.loading.host_memory import check_length, machine_bytes
from d3engine.model.config import ModelConfig

CPU_CACHE_BYTES = 2**30
"""What the KV cache takes on a CPU unless told otherwise, or one sequence of full length if that is more."""


def check_memory(
    config: ModelConfig,
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    max_num_seqs: int,
    max_model_len: int,
    kv_cache_memory_bytes: int | None,
) -> None:
    """Refuse, before anything is allocated, a KV cache or a length that the machine has no memory for."""
    is_cpu = device.type == "cpu"
    if kv_cache_memory_bytes is not None:
        least = block_bytes(config, block_size, dtype) * config.num_layers
        require_integer("kv_cache_memory_bytes", kv_cache_memory_bytes, least)
        there = machine_bytes() if is_cpu else torch.cuda.mem_get_info(device)[1]
        allowed = f"at most the memory that is there, {there} bytes"
        fits = there is None or kv_cache_memory_bytes <= there
        require(fits, "kv_cache_memory_bytes", kv_cache_memory_bytes, allowed)
    blocks = config.num_layers * -(-max_model_len // block_size) if is_cpu and kv_cache_memory_bytes is None else 0
    check_length(
        config,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        block_size=block_size,
        sequence_bytes=blocks * block_bytes(config, block_size, dtype),
    )


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: keys and values of `block_size` positions of one layer."""
    return 2 * block_size * config.kv_size * dtype.itemsize


def num_blocks(
    config: ModelConfig,
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    max_num_seqs: int,
    max_model_len: int,
    kv_cache_memory_bytes: int | None,
    gpu_memory_utilization: float,
    workspace_bytes: Callable[[], int],
    draft: ModelConfig | None = None,
) -> int:
    """Blocks of the pool: what the memory allows, and no more than all sequences at full length could use.

    On a GPU, whose weights are loaded by now, `workspace_bytes()` is asked what steps and graphs need beside them, and
    with each block goes its share of the cache that a second model, `draft`, keeps for the same entries.
    """
    share = require_number("gpu_memory_utilization", gpu_memory_utilization, 0.0, 1.0, open_low=True)
    one = block_bytes(config, block_size, dtype)
    sequence = config.num_layers * -(-max_model_len // block_size)
    if kv_cache_memory_bytes is not None:
        return kv_cache_memory_bytes // one
    most = max_num_seqs * sequence
    if device.type == "cpu":
        return min(most, max(sequence, CPU_CACHE_BYTES // one))
    workspace = workspace_bytes()
    free, total = torch.cuda.mem_get_info(device)
    with_draft = one
    if draft is not None:
        with_draft += block_bytes(draft, block_size, dtype) * draft.num_layers // config.num_layers
    room = max(0, int(free - workspace - (1 - share) * total)) // with_draft
    require(
        room >= sequence,
        "gpu_memory_utilization",
        gpu_memory_utilization,
        f"enough for one sequence of max_model_len={max_model_len}, {sequence} blocks of {with_draft} bytes"
        f" (beside weights, graphs and {workspace} bytes of workspace there is room for {room})",
    )
    return min(most, room)
