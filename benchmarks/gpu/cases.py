"""Every operation of the model on real shapes, for any module with the operations of `reference.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import torch_sampling
from benchmarks.gpu.common import Round
from d3engine.kernels.blocks import BLOCK_FORMATS, INTEGER_TYPES, BlockWeight
from d3engine.kernels.decode_rows import DecodeRows
from d3engine.kernels.kv_pool import FP8
from d3engine.kernels.low_rank import LowRankMap, RowMaps
from d3engine.kernels.matrices import Weight
from d3engine.kernels.quantized import GROUP, Fp8Weight, Int4Weight, Int8Weight
from d3engine.kernels.split_blocks import SPLIT_TYPES, SplitBlockWeight, split_blocks

EPS = 1e-5
BLOCK_SIZE = 16

Inputs = dict[str, Weight]
"""Tensors by name, and quantized matrices."""


@dataclass(frozen=True)
class Shape:
    """The sizes of one model, and what is run at them."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    channels: int
    intermediate: int
    vocabulary: int
    rows: tuple[int, ...] = (1, 8, 64)
    contexts: tuple[int, ...] = (512, 64, 2048)


SHAPES = (
    Shape("llama2-7b", 4096, 32, 32, 128, 11008, 32000),
    Shape("llama3-8b", 4096, 32, 8, 128, 14336, 128256),
)
TINY = (Shape("tiny", 64, 4, 2, 16, 96, 128, rows=(1, 3), contexts=(32, 9)),)


@dataclass(frozen=True)
class Case:
    """One operation and its inputs.

    `rotated` names the input that stands in device memory when an engine comes to it, and so must not be found in the
    L2 cache; `written` picks what the operation has written out of the inputs; `bytes_moved` counts every byte that
    must be read or written once. `by_torch` is how a user of plain torch would have it, where `reference.py` is not.
    """

    operation: str
    inputs: Inputs
    call: Callable[[ModuleType, Any, Any], Tensor | tuple[Tensor, ...] | None]
    bytes_moved: int
    rotated: str | None = None
    written: Callable[[Any], Tensor | tuple[Tensor, ...]] | None = None
    prepare: Callable[[ModuleType, Any], Any] = lambda kernels, inputs: None
    product: tuple[str, str] | None = None  # the names of rows and matrix, for cuBLAS alone
    by_torch: Callable[[Any], object] | None = None

    def results(self, kernels: ModuleType, inputs: Inputs) -> list[Tensor]:
        """Everything the operation returns or writes; `inputs` are changed."""
        returned = _as_list(self.call(kernels, inputs, self.prepare(kernels, inputs)))
        return returned if self.written is None else [*returned, *_as_list(self.written(inputs))]


def _as_list(found: Tensor | tuple[Tensor, ...] | None) -> list[Tensor]:
    return [] if found is None else list(found) if isinstance(found, tuple) else [found]


def cases(shape: Shape, rows: int, current: Round) -> Iterator[Case]:
    """All operations of one layer and the head, for `rows` sequences that decode a token each."""
    draw = Draw(current)
    yield from _products(shape, rows, draw, "")
    width, kv_size, q_size = current.dtype.itemsize, shape.kv_heads * shape.channels, shape.heads * shape.channels
    yield Case(
        "embed",
        {
            "table": draw.normal(shape.vocabulary // 8, shape.hidden),
            "token_ids": torch.randint(shape.vocabulary // 8, (rows,), device=current.device),
        },
        lambda kernels, i, _: kernels.embed(i["table"], i["token_ids"], current.dtype),
        rows * (2 * shape.hidden * width + 8),
    )
    yield Case(
        "rms_norm",
        {"x": draw.normal(rows, shape.hidden), "norm": draw.norm(shape.hidden)},
        lambda kernels, i, _: kernels.rms_norm(i["x"], i["norm"], EPS),
        (2 * rows + 1) * shape.hidden * width,
    )
    yield Case(
        "add_norm",
        {"x": draw.normal(rows, shape.hidden), "norm": draw.norm(shape.hidden), "to": draw.normal(rows, shape.hidden)},
        lambda kernels, i, _: kernels.add_norm(i["x"], i["norm"], EPS, i["to"]),
        (3 * rows + 1) * shape.hidden * width,
        written=lambda i: i["to"],
    )
    yield _with_adapters(shape, rows, draw)
    for context in shape.contexts:
        pool, tables = _cache(shape, rows, context, draw)
        yield Case(
            f"paged_attention {context}",
            {"queries": draw.normal(rows, shape.heads, shape.channels), "pool": pool, "tables": tables},
            lambda kernels, i, inputs: kernels.paged_attention(i["queries"], i["pool"], inputs, shape.channels**-0.5),
            rows * (2 * context * kv_size + 2 * q_size) * width,
            rotated="pool",
            prepare=lambda kernels, i, lengths=(context,) * rows: kernels.attention_inputs(  # type: ignore[misc]
                list(range(rows + 1)), list(lengths), i["tables"].to(kernels.TABLE_DTYPE)
            )[0],
        )
    order = torch.randperm(pool.shape[0] * 2 * BLOCK_SIZE, device=current.device)[: 2 * rows]
    yield Case(
        "copy_entries",
        {"pool": pool, "source": order[:rows], "target": order[rows:]},
        lambda kernels, i, _: kernels.copy_entries(i["pool"], i["source"], i["target"]),
        2 * rows * kv_size * width,
        written=lambda i: i["pool"].view(-1, kv_size)[i["target"]],
    )
    yield from _choices(shape, rows, current)
    yield from _step_ends(shape, rows, current)


ADAPTERS, RANK = 4, 16


def _with_adapters(shape: Shape, rows: int, draw: Draw) -> Case:
    """The output projection where each row has one of some LoRA adapters, or none."""
    width, columns = draw.current.dtype.itemsize, shape.heads * shape.channels
    weight = draw.matrix(shape.hidden, columns, "")
    downs = draw.normal(ADAPTERS, RANK, columns, deviation=columns**-0.5)
    ups = draw.normal(ADAPTERS, RANK, shape.hidden, deviation=RANK**-0.5)
    used = min(rows, ADAPTERS)
    return Case(
        "linear_residual o, adapters",
        {
            "x": draw.normal(rows, columns),
            "weight": weight,
            "residual": draw.normal(rows, shape.hidden),
            "downs": downs,
            "ups": ups,
        },
        lambda kernels, i, maps: kernels.linear_residual(i["x"], i["weight"], None, i["residual"], maps=maps),
        weight.nbytes + rows * (columns + 2 * shape.hidden) * width + used * (downs[0].nbytes + ups[0].nbytes),
        rotated="weight",
        written=lambda i: i["residual"],
        prepare=lambda kernels, i: _row_maps(i["downs"], i["ups"], rows),
    )


def _row_maps(downs: Tensor, ups: Tensor, rows: int) -> RowMaps:
    """The adapters in turn, and after the last of them a row without one."""
    device = downs.device
    maps = [LowRankMap(*pair).to(downs.dtype, device) for pair in zip(downs, ups, strict=True)]
    table = torch.tensor([[[one.down.data_ptr(), one.up.data_ptr(), one.rank]] for one in maps], device=device)
    numbers = torch.arange(rows, device=device) % (len(maps) + 1)
    adapters = torch.where(numbers < len(maps), numbers, -1).int()
    return RowMaps(adapters, lambda number: (maps[number],), (ups.shape[2],), table, RANK)


def quantized_cases(shape: Shape, rows: int, current: Round, scheme: str) -> Iterator[Case]:
    """The operations that read a matrix, with it in one of QUANTIZATION_SCHEMES, or in blocks of this type."""
    return _products(shape, rows, Draw(current), scheme)


def _products(shape: Shape, rows: int, draw: Draw, scheme: str) -> Iterator[Case]:
    """One case for each matrix of a layer, and the head; `scheme` "" is the round's own dtype."""
    hidden, kv_size, q_size = shape.hidden, shape.kv_heads * shape.channels, shape.heads * shape.channels
    width = draw.current.dtype.itemsize
    x, norm = draw.normal(rows, hidden), draw.norm(hidden)
    row, suffix = hidden * width, f" {scheme}" if scheme else ""

    pool, tables = _cache(shape, rows, BLOCK_SIZE, draw)
    keys = tables[0, :, 0] * 2 * BLOCK_SIZE + BLOCK_SIZE - 1
    angles = torch.rand(rows, shape.channels // 2, device=pool.device) * 6.2831853
    rotations = torch.polar(torch.ones_like(angles), angles)
    weight = draw.matrix(q_size + 2 * kv_size, hidden, scheme)
    entries = torch.stack((keys, keys + BLOCK_SIZE), dim=1)
    yield Case(
        "qkv" + suffix,
        {"x": x, "norm": norm, "weight": weight, "rotations": rotations, "pool": pool, "entries": entries},
        lambda kernels, i, _: kernels.qkv(
            i["x"], i["norm"], EPS, i["weight"], None, i["rotations"], i["pool"], i["entries"], shape.heads
        ),
        weight.nbytes + rows * (row + (q_size + 2 * kv_size) * width) + rotations.nbytes,
        rotated="weight",
        written=lambda i: i["pool"].view(-1, kv_size)[i["entries"].view(-1)],
        product=("x", "weight"),
    )
    for name, columns in (("linear_residual o", q_size), ("linear_residual down", shape.intermediate)):
        weight = draw.matrix(hidden, columns, scheme)
        yield Case(
            name + suffix,
            {"x": draw.normal(rows, columns), "weight": weight, "residual": draw.normal(rows, hidden)},
            lambda kernels, i, _: kernels.linear_residual(i["x"], i["weight"], None, i["residual"]),
            weight.nbytes + rows * (columns * width + 2 * row),
            rotated="weight",
            written=lambda i: i["residual"],
            product=("x", "weight"),
        )
    weight = draw.matrix(2 * shape.intermediate, hidden, scheme)
    yield Case(
        "gate_up" + suffix,
        {"x": x, "norm": norm, "weight": weight},
        lambda kernels, i, _: kernels.gate_up(i["x"], i["norm"], EPS, i["weight"], None),
        weight.nbytes + rows * (row + shape.intermediate * width),
        rotated="weight",
        product=("x", "weight"),
    )
    weight = draw.matrix(shape.vocabulary, hidden, scheme)
    for name, bytes_a_row in (("lm_head", 4 * shape.vocabulary), ("lm_head_argmax", 12)):
        yield Case(
            name + suffix,
            {"x": x, "norm": norm, "weight": weight},
            lambda kernels, i, _, name=name: getattr(kernels, name)(i["x"], i["norm"], EPS, i["weight"]),  # type: ignore[misc]
            weight.nbytes + rows * (row + bytes_a_row),
            rotated="weight",
            product=("x", "weight"),
        )
    draws = _draws(rows, draw.current.device)
    yield Case(
        "lm_head_sample" + suffix,
        {"x": x, "norm": norm, "weight": weight} | draws,
        lambda kernels, i, _: kernels.lm_head_sample(i["x"], i["norm"], EPS, i["weight"], *(i[name] for name in draws)),
        weight.nbytes + rows * (row + 12) + sum(value.nbytes for value in draws.values()),
        rotated="weight",
        product=("x", "weight"),
        by_torch=lambda i: torch_sampling.lm_head_sample(i, EPS),
    )


def _choices(shape: Shape, rows: int, current: Round) -> Iterator[Case]:
    """Draws from logits that are there: with nothing else, with cuts, with penalties too; and the count of tokens.

    Logits come fresh from the LM head, so they are left where they are: in the L2 cache, if they fit.
    """
    device, vocabulary = current.device, shape.vocabulary

    def full(value: float) -> Tensor:
        return torch.full((rows,), value, device=device)

    draws: Inputs = {"logits": 3 * torch.randn(rows, vocabulary, device=device), **_draws(rows, device)}
    cuts: Inputs = {"min_p": full(0.02), "top_k": full(50).long(), "top_p": full(0.9)}
    counts = (torch.rand(rows, vocabulary, device=device) < 0.005).int()
    penalties: Inputs = {
        "repetition": full(1.1),
        "presence": full(0.5),
        "frequency": full(0.1),
        "prompt_seen": (torch.rand(rows, vocabulary, device=device) < 0.01).to(torch.uint8),
        "output_counts": counts,
    }
    for name, inputs in (
        ("sample", draws),
        ("sample, cuts", draws | cuts),
        ("sample, cuts and penalties", draws | cuts | penalties),
    ):
        yield Case(
            name,
            inputs,
            lambda kernels, i, _: kernels.sample(i["logits"], torch_sampling.sampling_rows(i), i["steps"]),
            sum(value.nbytes for value in inputs.values()) + rows * 12,
            by_torch=torch_sampling.sample,
        )
    yield Case(
        "count_tokens",
        {"output_counts": counts, "tokens": torch.randint(vocabulary, (rows,), device=device)},
        lambda kernels, i, _: kernels.count_tokens(i["output_counts"], i["tokens"]),
        rows * (8 + 2 * 4),
        written=lambda i: i["output_counts"],
    )


def _draws(rows: int, device: torch.device) -> dict[str, Tensor]:
    """What a draw of each row takes besides its logits, in the order of `lm_head_sample`."""
    return {
        "temperature": torch.full((rows,), 0.8, device=device),
        "seeds": torch.randint(2**62, (rows,), device=device),
        "indices": torch.zeros(rows, dtype=torch.int64, device=device),
        "steps": torch.arange(rows, device=device),
    }


def _step_ends(shape: Shape, rows: int, current: Round) -> Iterator[Case]:
    """Both ends of a decode step that stays on the device, of a model of 32 layers."""
    layers, context, device = 32, shape.contexts[0], current.device
    blocks = -(-context // BLOCK_SIZE)
    state = DecodeRows.empty(rows, layers, blocks, shape.channels, 16, device)
    state.num_rows.fill_(rows)
    state.positions.copy_(torch.arange(rows, device=device) % context)
    state.steps.copy_(torch.arange(rows, device=device))
    state.cutoffs.copy_(torch.arange(layers, device=device).flip(0) + 1)
    state.block_tables.copy_(torch.randperm(layers * rows * blocks, device=device).view(layers, rows, blocks))
    tensors: Inputs = dict(vars(state))
    angles = torch.rand(context, shape.channels // 2, device=device) * 6.2831853
    derived = ("kv_lengths", "active_rows", "entries", "rotations")
    yield Case(
        "begin_step",
        tensors | {"rotation_table": torch.polar(torch.ones_like(angles), angles)},
        lambda kernels, i, _: kernels.begin_step(_decode_rows(i), i["rotation_table"], BLOCK_SIZE),
        sum(getattr(state, name).nbytes for name in ("positions", "steps", "cutoffs", *derived))
        + 4 * layers * rows  # a block of each table
        + state.rotations.nbytes,
        written=lambda i: tuple(torch.view_as_real(i[n]) if n == "rotations" else i[n] for n in derived),
    )

    def end_step(kernels: ModuleType, inputs: Any, _: object) -> None:
        inputs["taken"].zero_()  # or its room would be full after 16 calls: one launch more than the operation has
        kernels.end_step(_decode_rows(inputs), inputs["new_tokens"], inputs["new_scores"])

    yield Case(
        "end_step",
        tensors
        | {
            "new_tokens": torch.randint(shape.vocabulary, (rows,), device=device),
            "new_scores": torch.randn(rows, device=device),
        },
        end_step,
        rows * (12 + 12 + 8 + 4 * 8),
        written=lambda i: (i["tokens"], i["positions"], i["steps"], i["taken"], i["chosen"], i["scores"]),
    )


def _decode_rows(inputs: Any) -> DecodeRows:
    return DecodeRows(**{field.name: inputs[field.name] for field in fields(DecodeRows)})


def _cache(shape: Shape, rows: int, context: int, draw: Draw) -> tuple[Tensor, Tensor]:
    """A pool that holds `context` entries per row, and the table [1, rows, blocks] of its blocks in random order."""
    blocks = -(-context // BLOCK_SIZE)
    pool = draw.normal(rows * blocks, 2, BLOCK_SIZE, shape.kv_heads, shape.channels)
    return pool, torch.randperm(rows * blocks, device=pool.device).view(1, rows, blocks)


@dataclass(frozen=True)
class Draw:
    """Random inputs in a round's dtype on its device."""

    current: Round

    def normal(self, *sizes: int, deviation: float = 1.0) -> Tensor:
        """Normal numbers around 0."""
        empty = torch.empty(sizes, dtype=self.current.dtype, device=self.current.device)
        return empty.normal_(0.0, deviation)

    def norm(self, size: int) -> Tensor:
        """A norm's weights, around 1."""
        return 1 + 0.1 * self.normal(size)

    def matrix(self, outputs: int, columns: int, scheme: str) -> Weight:
        """A matrix [outputs, columns] that keeps the size of what it is multiplied with."""
        deviation, device = columns**-0.5, self.current.device
        if scheme == "":
            return self.normal(outputs, columns, deviation=deviation)
        if scheme in SPLIT_TYPES:
            return _random_blocks(scheme, outputs, columns, deviation, device)
        if scheme == "int8":  # evenly spread over 255 values, which deviate by 73.6
            values = torch.randint(-127, 128, (outputs, columns), dtype=torch.int8, device=device)
            return Int8Weight(values, torch.full((outputs,), deviation / 73.6, device=device))
        if scheme == "fp8":
            values = torch.empty(outputs, columns, dtype=self.current.dtype, device=device).normal_(0.0, 64.0)
            return Fp8Weight(values.to(FP8), torch.full((outputs,), deviation / 64, device=device))
        groups = -(-columns // GROUP)
        halves = torch.randint(0, 16, (outputs, groups * GROUP), dtype=torch.uint8, device=device)
        halves[:, columns:] = 8  # what fills up the last group stands for 0
        low, high = halves.view(outputs, groups, 2, GROUP // 2).unbind(2)
        scales = torch.full((outputs, groups), deviation / 4.6, device=device)
        return Int4Weight((low | high << 4).view(outputs, -1), scales, columns)


_MIDDLE = 8
"""The zero point of whole numbers of 4 bits."""
_OF_RANDOM_BITS = {"Q4_0": 4.64, "U4_128": 4.64, "Q4_K": 299.7, "Q6_K": 1365.7}
"""The root of the mean square of blocks of random bits, with scales and minima of blocks 1."""


def _random_blocks(
    type_name: str, outputs: int, columns: int, deviation: float, device: torch.device
) -> SplitBlockWeight:
    """Random codes, and scales within blocks; those of blocks make values deviate by `deviation`."""
    layout = BLOCK_FORMATS[type_name]
    size = (outputs, columns // layout.columns, layout.nbytes)
    blocks = torch.randint(0, 256, size, dtype=torch.uint8, device=device)
    is_whole = type_name in INTEGER_TYPES
    scale = torch.tensor(deviation / _OF_RANDOM_BITS[type_name], dtype=torch.float32 if is_whole else torch.float16)
    stored = scale.view(1).view(torch.uint8).clone()
    if is_whole:
        stored[0] = _MIDDLE  # in the place of the last bits of the scale
    for first in layout.halves or (0,):
        blocks[:, :, first : first + len(stored)] = stored.to(device)
    return split_blocks(BlockWeight(type_name, blocks.flatten(1), columns), device)


def copy_of(value: Weight) -> Weight:
    """The same in memory of its own."""
    if isinstance(value, Tensor):
        return value.clone()
    values, scales = (tensor.clone() for tensor in value.tensors)
    if isinstance(value, SplitBlockWeight):
        return replace(value, codes=values, scales=scales)
    return value.of(values, scales, value.shape[1])


def in_float64(value: Weight) -> Tensor:
    """What a value stands for in float64, in memory of its own; whole numbers stay what they are."""
    if isinstance(value, Tensor):
        return value.to(torch.float64 if value.is_floating_point() else value.dtype, copy=True)
    return value.dequantize(torch.float64)
