"""In which dtype the KV cache is held: that of activations, or 8-bit floats with scales (`kernels/kv_pool.py`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from d3engine.depth import Schedule
from d3engine.depth.statistics import kv_saved
from d3engine.engine.host import GIB, check_length, machine_bytes, table_bytes
from d3engine.engine.settings import EngineSettings
from d3engine.errors import InvalidValueError, require, require_integer
from d3engine.kernels.blocks import BLOCK_TYPES
from d3engine.kernels.interleaved import LANES
from d3engine.kernels.kv_pool import FP8, FP8_CAPABILITY, block_bytes
from d3engine.kernels.split_blocks import SPLIT_TYPES
from d3engine.kernels.target import target_of
from d3engine.model.checkpoint import SCALES, VALUES, dtype_of
from d3engine.model.config import ModelConfig
from d3engine.model.expected_tensors import expected_tensors, held_dtype
from d3engine.model.shard import Part, shard_of, shard_shapes
from d3engine.model.source import ModelFiles, files_of

NAMES = ("auto", "fp8", "fp8_e4m3")
"""As in vLLM; "auto" is the dtype of activations, the other two are the same."""

KV_CACHE_DTYPE = "kv_cache_dtype"

DTYPE = torch.bfloat16
"""Of activations and float weights of a `Fit`, and of cache entries unless a demand has others."""

_log = logging.getLogger(__name__)


def resolve_kv_cache_dtype(given: str, *, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of the cache's entries beside activations of `dtype`.

    Raises `InvalidValueError` for another name, and for fp8 on a GPU that converts no such values.
    """
    named = named_dtype(given, dtype)
    if named == dtype:
        return dtype
    if device.type == "cuda":
        here = target_of(device)
        allowed = f"auto on a GPU of compute capability {here.name}: 8.9 is the first that converts 8-bit floats"
        require(here.has(FP8_CAPABILITY), KV_CACHE_DTYPE, given, allowed)
    return named


def named_dtype(given: str, dtype: torch.dtype, field: str = KV_CACHE_DTYPE) -> torch.dtype:
    """What `given` stands for beside activations of `dtype`, on whatever device.

    Raises `InvalidValueError` for another name, by that of its `field`.
    """
    require(isinstance(given, str) and given in NAMES, field, given, f"one of {', '.join(NAMES)}")
    return dtype if given == "auto" else FP8


CPU_CACHE_BYTES = 2**30
"""What the KV cache takes on a CPU unless told otherwise, or one sequence of full length if that is more."""

CPU_MEMORY_SHARE = 0.9
"""Of a machine's memory, for weights and one sequence of the default length."""
GRAPH_BYTES = 2**30
"""About what CUDA itself, its graphs and its allocator take beside weights and steps."""
LEAST_LENGTH, MOST_LENGTH = 2048, 2**20
"""Between these is a default length that the memory decides: a config.json may claim any number of positions, and each
has its entries in tables."""


def check_cache_bytes(settings: EngineSettings) -> None:
    """Refuse a size of the KV cache that is too small for a block of each layer, or that there is no memory for."""
    given = settings.kv_cache_memory_bytes
    if given is None:
        return
    require_integer("kv_cache_memory_bytes", given, settings.block_bytes * settings.config.num_layers)
    there = _bytes_of(settings.device)
    allowed = f"at most the memory that is there, {there} bytes"
    require(there is None or given <= there, "kv_cache_memory_bytes", given, allowed)


def _bytes_of(device: torch.device) -> int | None:
    """All memory of a device; None where a system does not tell."""
    return machine_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[1]


def check_memory(settings: EngineSettings) -> None:
    """Refuse, before anything is allocated, a length that the machine has no memory for."""
    is_cpu = settings.device.type == "cpu"
    blocks = settings.sequence_blocks if is_cpu and settings.kv_cache_memory_bytes is None else 0
    check_length(settings, sequence_bytes=blocks * settings.block_bytes)


def fitting_length(settings: EngineSettings, part: Part, draft: EngineSettings | None = None) -> int:
    """Tokens of one sequence that the memory of a rank, which `settings` are of, has room for beside its weights.

    On a GPU also beside the weights and the cache of a model that drafts, of which `draft` are. Never so few that a
    model is of no use: whether its weights fit is another question.
    """
    one = replace(settings, max_model_len=settings.block_size)  # what a block's tokens take, at every layer
    config, given = settings.config, settings.kv_cache_memory_bytes
    cached = one.sequence_blocks * one.block_bytes if given is None else 0
    is_cpu, there = settings.device.type == "cpu", machine_bytes()
    weights = _held_bytes(settings, part)
    if draft is not None and cached:
        weights += _held_bytes(draft, shard_of(draft.config, 0, 1))
        cached += draft.config.num_layers * draft.block_bytes
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


def check_weights(settings: EngineSettings, part: Part) -> None:
    """Refuse the weights of a rank for which there is no memory at all, before any are read.

    On a CPU warn of those that are larger than the memory only with what stays in mapped files: that needs no memory,
    only patience.
    """
    weights, is_cpu = _held_bytes(settings, part), settings.device.type == "cpu"
    there = _bytes_of(settings.device)
    if there is None or weights <= there:
        return
    copied = _copied_bytes(settings) if is_cpu else weights
    where = "this machine or its container" if is_cpu else "this GPU"
    advice = "a smaller form of it, such as a GGUF file of fewer bits or d3engine weights quantize --scheme int4"
    if settings.keeps_blocks and settings.activations == "int8":
        advice += ', or activations="float32", which reads the matrices in the mapped file'
    room = f"and {where} has {there / GIB:.1f} GiB"
    allowed = f"one whose weights fit: they take {copied / GIB:.1f} GiB of memory, {room} (take {advice})"
    require(copied <= there, "model", str(settings.model), allowed)
    _log.warning("the weights take %.1f GiB, %s: take %s", weights / GIB, room, advice)


def _copied_bytes(settings: EngineSettings) -> int:
    """Bytes of a rank's weights that are in memory on a CPU, at least: not in a mapped file as they are stored."""
    config = settings.config
    names = config.tensor_names
    stacked = [f".self_attn.{module}." for module in names.qkv]
    stacked += [f".{module}." for module in names.gate_up if len(names.gate_up) > 1]
    table = None if config.tie_word_embeddings else names.embedding
    found = 0.0
    with files_of(settings.directory).open_checkpoint() as checkpoint:
        entries = [checkpoint.entries[name] for name in expected_tensors(config) if name in checkpoint.entries]
    for entry in entries:
        if settings.keeps_blocks and entry.type_name in BLOCK_TYPES:
            is_interleaved = settings.activations == "int8" and entry.shape[0] % (2 * LANES) == 0
            found += entry.nbytes if is_interleaved and entry.name != table else 0
            continue
        held = held_dtype(entry, settings.weight_dtype)
        is_stored = entry.packed is None and dtype_of(entry.dtype) == held
        if not is_stored or any(module in entry.name for module in stacked):
            found += entry.num_values * held.itemsize
    smallest = 0.75 if settings.weight_compression == "bf12" else 1
    return int(found * smallest) // settings.tensor_parallel_size


def _held_bytes(settings: EngineSettings, part: Part) -> int:
    """Bytes of the weights of a rank as they are held."""
    return _packed_bytes(settings) or weight_bytes(settings.config, part, settings.weight_dtype)


def _packed_bytes(settings: EngineSettings) -> int | None:
    """Bytes of weights whose matrices stay in blocks; None for all others."""
    files = files_of(settings.directory)
    packed = files.packed_bytes() if settings.keeps_blocks else None
    return split_bytes(files, settings.weight_dtype) if packed is not None and settings.splits_blocks else packed


def split_bytes(files: ModelFiles, dtype: torch.dtype = DTYPE) -> int:
    """Bytes on a GPU of weights in blocks, those that it cannot read packed as floats of `dtype`."""
    each = dtype.itemsize
    with files.open_checkpoint() as checkpoint:
        return sum(
            one.nbytes if one.type_name in SPLIT_TYPES and checkpoint.order_of(name) is None else prod(one.shape) * each
            for name, one in checkpoint.entries.items()
        )


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


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What is to run at once: sequences of `context` tokens, of which `answer` are generated under `schedule`.

    `kv_cache_dtype` is that of cache entries; 8-bit ones are counted with their scales.
    """

    context: int
    answer: int
    max_num_batched_tokens: int
    block_size: int
    schedule: Schedule
    kv_cache_dtype: torch.dtype = DTYPE


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How a model with weights of one kind lies on the devices; bytes of the device that has least room left.

    The bridges of the schedule are counted in `weight_bytes`. `room` is what is left there for KV, negative where not
    even the weights fit; `sequences` at their full length, and `sequences_by_depth` of mixed ages, with what the
    schedule has freed of them on average. `reason` says why the model cannot be parted so, and then nothing else is
    known.
    """

    weights: str
    weight_bytes: int = 0
    step_bytes: int = 0
    room: int = 0
    sequence_bytes: int = 0
    sequences: int = 0
    sequences_by_depth: int = 0
    reason: str | None = None

    @property
    def fits(self) -> bool:
        """Whether at least one sequence of full length does."""
        return self.sequences > 0


def fit(
    config: ModelConfig, scheme: str | None, devices: Sequence[int], demand: Demand, packed: int | None = None
) -> Fit:
    """How `config` fits with weights of `scheme` (None: bfloat16) on devices with this memory, a rank on each.

    `packed` are the bytes of weights that stay as they are in their file, on one device.
    """
    named = "as in the file" if packed is not None else scheme or str(DTYPE).removeprefix("torch.")
    of_scheme = config if scheme == config.quantization else config.quantized(scheme)
    try:
        parts = [shard_of(of_scheme, rank, len(devices)) for rank in range(len(devices))]
    except InvalidValueError as error:
        return Fit(weights=named, reason=str(error))
    return min(
        (
            _on_device(of_scheme, part, device, demand, named, packed)
            for part, device in zip(parts, devices, strict=True)
        ),
        key=lambda found: found.room / found.sequence_bytes,
    )


def _on_device(config: ModelConfig, part: Part, device: int, demand: Demand, named: str, packed: int | None) -> Fit:
    own = part.config(config)
    weights = (packed or weight_bytes(config, part)) + bridge_bytes(config, demand.schedule)
    steps = step_bytes(own, len(part.vocabulary), demand.max_num_batched_tokens)
    blocks = config.num_layers * -(-demand.context // demand.block_size)
    sequence = blocks * block_bytes(demand.block_size, own.num_kv_heads, own.head_dim, demand.kv_cache_dtype)
    room = device - weights - steps
    saved = kv_saved(demand.schedule, max(1, demand.context - demand.answer), demand.answer)
    by_depth = int(max(0, room) / (sequence * (1 - saved.mean_fraction)))
    return Fit(
        weights=named,
        weight_bytes=weights,
        step_bytes=steps,
        room=room,
        sequence_bytes=sequence,
        sequences=max(0, room // sequence),
        sequences_by_depth=by_depth,
    )


def weight_bytes(config: ModelConfig, part: Part, dtype: torch.dtype = DTYPE) -> int:
    """Bytes of the weights of a rank, floats in `dtype`."""

    def of_value(name: str) -> int:
        if config.quantization is not None and name.endswith((VALUES, SCALES)):
            return 1 if name.endswith(VALUES) else 4
        return dtype.itemsize

    return sum(prod(shape) * of_value(name) for name, shape in shard_shapes(config, part).items())


def bridge_bytes(config: ModelConfig, schedule: Schedule) -> int:
    """Bytes of the bridges that a schedule names, as full maps; in int8 beside quantized weights."""
    if schedule.bridges is None:
        return 0
    of_value = DTYPE.itemsize if config.quantization is None else 1
    return len(schedule.windows()) * config.hidden_size * (config.hidden_size + 1) * of_value


def step_bytes(own: ModelConfig, ranks: int, rows: int) -> int:
    """About what the largest step takes: `rows` tokens of a prompt, and the logits of all of them."""
    wide = 4 * own.hidden_size + 2 * own.q_size + 2 * own.kv_size + 3 * own.intermediate_size
    logits = 4 * own.vocab_size * (1 if ranks == 1 else 2)
    return rows * (wide * DTYPE.itemsize + logits)
