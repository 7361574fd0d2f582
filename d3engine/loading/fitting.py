"""Whether a model fits on given devices, before any of it is there: bytes of weights, room for KV, sequences at once.

The one idea: the shapes are those that ranks would load. What steps take beside them is an estimate, of the largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from d3engine.depth import Schedule
from d3engine.depth.statistics import kv_saved
from d3engine.errors import InvalidValueError
from d3engine.kernels.kv_pool import block_bytes
from d3engine.model.config import ModelConfig
from d3engine.model.expected_tensors import SCALES, VALUES
from d3engine.model.part import Part, part_of
from d3engine.model.part_tensors import part_shapes

DTYPE = torch.bfloat16
"""Of activations and float weights, and of cache entries unless a demand has others."""


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


def fit(config: ModelConfig, scheme: str | None, devices: Sequence[int], demand: Demand) -> Fit:
    """How `config` fits with weights of `scheme` (None: bfloat16) on devices of so many bytes, a rank on each."""
    named = scheme or str(DTYPE).removeprefix("torch.")
    of_scheme = config if scheme == config.quantization else config.quantized(scheme)
    try:
        parts = [part_of(of_scheme, rank, len(devices)) for rank in range(len(devices))]
    except InvalidValueError as error:
        return Fit(weights=named, reason=str(error))
    return min(
        (_on_device(of_scheme, part, device, demand, named) for part, device in zip(parts, devices, strict=True)),
        key=lambda found: found.room / found.sequence_bytes,
    )


def _on_device(config: ModelConfig, part: Part, device: int, demand: Demand, named: str) -> Fit:
    own = part.config(config)
    weights = weight_bytes(config, part) + bridge_bytes(config, demand.schedule)
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

    return sum(prod(shape) * of_value(name) for name, shape in part_shapes(config, part).items())


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
