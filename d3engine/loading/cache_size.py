"""How many blocks the KV cache gets: of what the memory allows, and no more than all sequences could use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from d3engine.errors import require, require_integer
from d3engine.loading.fitting import step_bytes, weight_bytes
from d3engine.loading.host_memory import check_length, machine_bytes, table_bytes
from d3engine.loading.settings import EngineSettings
from d3engine.model.config import ModelConfig
from d3engine.model.part import Part

CPU_CACHE_BYTES = 2**30
"""What the KV cache takes on a CPU unless told otherwise, or one sequence of full length if that is more."""

CPU_MEMORY_SHARE = 0.9
"""Of a machine's memory, for weights and one sequence of the default length."""
GRAPH_BYTES = 2**30
"""About what CUDA itself, its graphs and its allocator take beside weights and steps."""
LEAST_LENGTH, MOST_LENGTH = 2048, 2**20
"""Between these is a default length that the memory decides: a config.json may claim any number of positions, and each
has its entries in tables."""


def check_memory(settings: EngineSettings) -> None:
    """Refuse, before anything is allocated, a KV cache or a length that the machine has no memory for."""
    is_cpu, given = settings.device.type == "cpu", settings.kv_cache_memory_bytes
    if given is not None:
        require_integer("kv_cache_memory_bytes", given, settings.block_bytes * settings.config.num_layers)
        there = machine_bytes() if is_cpu else torch.cuda.mem_get_info(settings.device)[1]
        allowed = f"at most the memory that is there, {there} bytes"
        require(there is None or given <= there, "kv_cache_memory_bytes", given, allowed)
    blocks = settings.sequence_blocks if is_cpu and given is None else 0
    check_length(settings, sequence_bytes=blocks * settings.block_bytes)


def fitting_length(settings: EngineSettings, part: Part) -> int:
    """Tokens of one sequence that the memory of a rank, which `settings` are of, has room for beside its weights.

    Never so few that a model is of no use: whether its weights fit is another question.
    """
    one = replace(settings, max_model_len=settings.block_size)  # what a block's tokens take, at every layer
    config, given = settings.config, settings.kv_cache_memory_bytes
    cached = one.sequence_blocks * one.block_bytes if given is None else 0
    is_cpu, there = settings.device.type == "cpu", machine_bytes()
    weights = weight_bytes(config, part, settings.weight_dtype)
    rooms = []
    if there is not None:
        beside = weights + (given or 0) if is_cpu else 0
        rooms.append((int(CPU_MEMORY_SHARE * there) - beside) // (table_bytes(one) + (cached if is_cpu else 0)))
    if not is_cpu and cached:
        free, total = torch.cuda.mem_get_info(settings.device)
        steps = step_bytes(config, len(part.vocabulary), settings.max_num_batched_tokens)
        left = free - int((1 - settings.gpu_memory_utilization) * total) - weights - GRAPH_BYTES - steps
        rooms.append(left // cached)
    length = settings.block_size * min(rooms, default=MOST_LENGTH)
    return max(LEAST_LENGTH, min(length, MOST_LENGTH))


def num_blocks(settings: EngineSettings, workspace_bytes: Callable[[], int], draft: ModelConfig | None = None) -> int:
    """Blocks of the pool: what the memory allows, and no more than all sequences at full length could use.

    On a GPU, whose weights are loaded by now, `workspace_bytes()` is asked what steps and graphs need beside them, and
    with each block goes its share of the cache that a second model, `draft`, keeps for the same entries.
    """
    one, sequence = settings.block_bytes, settings.sequence_blocks
    if settings.kv_cache_memory_bytes is not None:
        return settings.kv_cache_memory_bytes // one
    most = settings.max_num_seqs * sequence
    if settings.device.type == "cpu":
        return min(most, max(sequence, CPU_CACHE_BYTES // one))
    workspace, share = workspace_bytes(), settings.gpu_memory_utilization
    free, total = torch.cuda.mem_get_info(settings.device)
    with_draft = one
    if draft is not None:
        drafts = settings.block_bytes_of(draft) * draft.num_layers
        with_draft += drafts // settings.config.num_layers
    room = max(0, int(free - workspace - (1 - share) * total)) // with_draft
    allowed = (
        f"enough for one sequence of max_model_len={settings.max_model_len}, {sequence} blocks of {with_draft} bytes"
        f" (beside weights, graphs and {workspace} bytes of workspace there is room for {room})"
    )
    require(room >= sequence, "gpu_memory_utilization", share, allowed)
    return min(most, room)
