"""Every operation of the model on real shapes, as something any implementation can run: what is measured and tested.

A case is one operation on one set of inputs. Whoever measures it passes the implementation, a module with the
operations under the names of `reference.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.common import Round
from d3engine.kernels.quantized import GROUP, Int4Weight, Int8Weight, Weight

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
    must be read or written once.
    """

    operation: str
    inputs: Inputs
    call: Callable[[ModuleType, Any, Any], Tensor | tuple[Tensor, ...] | None]
    bytes_moved: int
    rotated: str | None = None
    written: Callable[[Any], Tensor] | None = None
    prepare: Callable[[ModuleType, Any], Any] = lambda kernels, inputs: None
    product: tuple[str, str] | None = None  # the names of rows and matrix, for cuBLAS alone

    def results(self, kernels: ModuleType, inputs: Inputs) -> list[Tensor]:
        """Everything the operation returns or writes; `inputs` are changed."""
        returned = self.call(kernels, inputs, self.prepare(kernels, inputs))
        found = [] if returned is None else list(returned) if isinstance(returned, tuple) else [returned]
        return found if self.written is None else [*found, self.written(inputs)]


def cases(shape: Shape, rows: int, current: Round) -> Iterator[Case]:
    """All operations of one layer and the head, for `rows` sequences that decode a token each."""
    draw = Draw(current)
    yield from _products(shape, rows, draw, "")
    width, kv_size, q_size = current.dtype.itemsize, shape.kv_heads * shape.channels, shape.heads * shape.channels
    yield Case(
        "rms_norm",
        {"x": draw.normal(rows, shape.hidden), "norm": draw.norm(shape.hidden)},
        lambda kernels, i, _: kernels.rms_norm(i["x"], i["norm"], EPS),
        (2 * rows + 1) * shape.hidden * width,
    )
    for context in shape.contexts:
        pool, tables = _cache(shape, rows, context, draw)
        yield Case(
            f"paged_attention {context}",
            {"queries": draw.normal(rows, shape.heads, shape.channels), "pool": pool, "tables": tables},
            lambda kernels, i, inputs: kernels.paged_attention(i["queries"], i["pool"], inputs, shape.channels**-0.5),
            rows * (2 * context * kv_size + 2 * q_size) * width,
            rotated="pool",
            prepare=lambda kernels, i, lengths=(context,) * rows: kernels.attention_inputs(  # type: ignore[misc]
                list(range(rows + 1)), list(lengths), i["tables"]
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


def quantized_cases(shape: Shape, rows: int, current: Round, scheme: str) -> Iterator[Case]:
    """The operations that read a matrix, with it in "int8" or "int4"."""
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
    yield Case(
        "lm_head" + suffix,
        {"x": x, "norm": norm, "weight": weight},
        lambda kernels, i, _: kernels.lm_head(i["x"], i["norm"], EPS, i["weight"]),
        weight.nbytes + rows * (row + 4 * shape.vocabulary),
        rotated="weight",
        product=("x", "weight"),
    )
    yield Case(
        "lm_head_argmax" + suffix,
        {"x": x, "norm": norm, "weight": weight},
        lambda kernels, i, _: kernels.lm_head_argmax(i["x"], i["norm"], EPS, i["weight"])[0],
        weight.nbytes + rows * (row + 12),
        rotated="weight",
        product=("x", "weight"),
    )


def _cache(shape: Shape, rows: int, context: int, draw: Draw) -> tuple[Tensor, Tensor]:
    """A pool that holds `context` entries a row, and the table [1, rows, blocks] of its blocks in random order."""
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
        if scheme == "int8":  # evenly spread over 255 values, which deviate by 73.6
            values = torch.randint(-127, 128, (outputs, columns), dtype=torch.int8, device=device)
            return Int8Weight(values, torch.full((outputs,), deviation / 73.6, device=device))
        groups = -(-columns // GROUP)
        halves = torch.randint(0, 16, (outputs, groups * GROUP), dtype=torch.uint8, device=device)
        halves[:, columns:] = 8  # what fills up the last group stands for 0
        low, high = halves.view(outputs, groups, 2, GROUP // 2).unbind(2)
        scales = torch.full((outputs, groups), deviation / 4.6, device=device)
        return Int4Weight((low | high << 4).view(outputs, -1), scales, columns)


def copy_of(value: Weight) -> Weight:
    """The same in memory of its own."""
    if isinstance(value, Int8Weight):
        return Int8Weight(value.values.clone(), value.scales.clone())
    if isinstance(value, Int4Weight):
        return replace(value, packed=value.packed.clone(), scales=value.scales.clone())
    return value.clone()


def in_float64(value: Weight) -> Tensor:
    """What a value stands for in float64; whole numbers stay."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    return value.dequantize(torch.float64)
