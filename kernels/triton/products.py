"""The host's side of all projections: which tile a product gets, its launch, and what is left to torch.

The device's side, the loop itself, is in `product_kernels.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from d3engine.kernels.quantized import GROUP, Int4Weight, Int8Weight, Weight
from d3engine.kernels.triton.launches import Launch

MATMUL_ROWS = 64
"""Products of more rows go to torch.matmul (cuBLAS) with a kernel for the rest of the operation around it.

Not yet measured on a GPU.
"""

MIN_PROGRAMS = 128  # about the number of processors of an H100 (132): fewer programs leave some without work

MIN_STEPS = 4  # of a program that shares its outputs with others: below, filling its pipeline is most of its time


_REDUCED = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


@dataclass(frozen=True, slots=True)
class Tile:
    """How one launch cuts a product: rows x outputs per program, columns per step."""

    rows: int
    outputs: int
    columns: int
    warps: int
    stages: int
    weights_first: bool = False  # whether the weights are the left operand of the tensor cores
    parts: int = 1  # programs that share the columns of one tile of outputs (split-K)

    def part_columns(self, columns: int) -> int:
        """Columns of each part, in whole steps; the last may have fewer."""
        return int(triton.cdiv(triton.cdiv(columns, self.columns), self.parts)) * self.columns


def product_tile(rows: int, weight: Weight, dtype: torch.dtype, *, may_split: bool = False) -> Tile | None:
    """The tile for `rows` rows of `dtype` times `weight` [N, K] transposed; None: leave it to torch.matmul.

    What the operations share. With `may_split` a tile may have parts. The numbers are for Hopper, and fit Ampere's
    shared memory: the first path has two tiles in flight, the others 2 to 5 stages (see `inspect`).
    """
    outputs, columns = weight.shape
    if rows <= 1 and not isinstance(weight, Int4Weight):
        return _single_row_tile(outputs, columns, weight)
    if rows > MATMUL_ROWS:
        return None
    if rows <= 16:
        tile = _few_rows_tile(rows, weight, dtype, may_split)
        return _split(tile, weight) if may_split else tile
    quantized = not isinstance(weight, Tensor)
    block_rows = 32 if rows <= 32 else 64
    if dtype == torch.float32:  # runs without tensor cores, from registers: smaller steps
        step, stages = 32, 2
    else:
        # With more rows registers are short: on Blackwell 128 columns of int8 spilled.
        step, stages = (128 if quantized and rows <= 32 else 64), 4
    if isinstance(weight, Int4Weight):
        step, stages = GROUP, 4 if rows <= 32 else 3
    # Tensor cores want 16 or 64 left rows. Weights that become floats in registers can stay there as the left operand
    # alone.
    return Tile(block_rows, _enough_programs(64, outputs, least=32), step, 4, stages, weights_first=quantized)


def _few_rows_tile(rows: int, weight: Weight, dtype: torch.dtype, may_split: bool) -> Tile:
    """For up to 16 rows, which are the right operand: of the left one tensor cores take 16 or 64 rows, of this 8."""
    outputs, columns = weight.shape
    block_rows = 8 if rows <= 8 else 16
    many = outputs >= 2 * 64 * MIN_PROGRAMS
    block_outputs = _enough_programs(64 if many else 32, outputs, least=16)
    if dtype == torch.float32:  # runs without tensor cores, from registers: smaller steps
        return Tile(block_rows, block_outputs, GROUP if isinstance(weight, Int4Weight) else 32, 4, 2, True)
    if isinstance(weight, Tensor):
        return Tile(block_rows, block_outputs, 128, 4, 4, True)
    # Two warps, each with 32 outputs, or 16: then no value becomes a float twice, and the weights come to the tensor
    # cores 8 bytes at a time. Four warps with 64 outputs would get them from shared memory by twos.
    if isinstance(weight, Int8Weight):
        if rows > 8 and outputs >= 64 * MIN_PROGRAMS:
            block_outputs = 64
        return Tile(block_rows, block_outputs, 128, max(1, min(2, block_outputs // 16)), 6, True)
    step = 2 * GROUP if columns % (2 * GROUP) == 0 else GROUP
    warps = max(1, min(2, block_outputs // 16))
    if not (many or may_split) and outputs >= 64 * MIN_PROGRAMS:
        block_outputs, warps = 64, 4  # so few programs have too few loads under way with two warps
    return Tile(block_rows, block_outputs, step, warps, 3, True)


def _single_row_tile(outputs: int, columns: int, weight: Weight) -> Tile:
    # Exactly 16 bytes a thread along the columns: then row and weights get one layout. With any other step Triton
    # moves every weight through shared memory.
    each = 16 // weight.element_size() if isinstance(weight, Tensor) else 16
    padded = max(16, triton.next_power_of_2(columns))
    warps = min(4, max(1, padded // (32 * each)))
    return Tile(1, _enough_programs(8, outputs), min(warps * 32 * each, padded), warps, stages=3)


def _split(tile: Tile, weight: Weight) -> Tile:
    """`tile` with parts, if that gives every processor two programs (four of int4) where there were fewer.

    Then outputs are many a program, since each program reads the rows: these would be half of what it moves.
    """
    outputs, columns = weight.shape
    packed = isinstance(weight, Int4Weight)
    wide = replace(tile, outputs=32, columns=GROUP) if packed else replace(tile, outputs=64)
    if not isinstance(weight, Tensor) and tile.warps < 4:
        wide = replace(wide, warps=2)
    programs = triton.cdiv(outputs, wide.outputs)
    parts = min((4 if packed else 2) * MIN_PROGRAMS // programs, triton.cdiv(columns, wide.columns) // MIN_STEPS)
    if parts < 2:
        return tile
    parts = triton.cdiv(columns, replace(wide, parts=parts).part_columns(columns))  # none is empty
    return replace(wide, parts=parts, stages=5 if packed and tile.warps < 4 else tile.stages)


def _enough_programs(most: int, outputs: int, least: int = 2) -> int:
    """`most` outputs a program, or half as often as needed to keep `MIN_PROGRAMS` busy, but not below `least`."""
    each = most
    while each > least and outputs < each * MIN_PROGRAMS:
        each //= 2
    return each


def product_launch(
    kernel: Any,
    tile: Tile,
    x: Tensor,
    weight: Weight,
    num_rows: Tensor | None,
    *,
    norm: tuple[Tensor, float] | None = None,
    **others: object,
) -> Launch:
    """The launch of a kernel around `product`, in which program (i, j, k) has row tile i, output tile j and part k.

    `norm` is weight and epsilon; `others` are the arguments that this kernel alone has. Without `norm` the kernel is
    one that takes none.
    """
    rows = x.shape[0]
    arguments = {
        "x_ptr": x,
        "x_stride": x.stride(0),
        **weight_arguments(weight),
        "num_rows_ptr": num_rows,
        "total_rows": rows,
        "K": weight.shape[1],
        "BLOCK_T": tile.rows,
        "BLOCK_N": tile.outputs,
        "BLOCK_K": tile.columns,
        "WEIGHTS_FIRST": tile.weights_first,
        "STAGES": tile.stages,
        **others,
    }
    if norm is not None:
        arguments["norm_ptr"], arguments["eps"] = norm
    grid = (triton.cdiv(rows, tile.rows), triton.cdiv(weight.shape[0], tile.outputs), tile.parts)
    # Of 64 threads a processor has room for six programs even so; left alone, ptxas saves registers and spills one.
    options = {"maxnreg": 168} if tile.warps == 2 else {}
    return Launch(kernel, grid, arguments, tile.warps, tile.stages, options, streams=True)


def weight_arguments(weight: Weight) -> dict[str, object]:
    """The kernel arguments that say where a matrix is: what it holds follows from the pointer's type."""
    if isinstance(weight, Tensor):
        stored, scales = weight, None
    elif isinstance(weight, Int8Weight):
        stored, scales = weight.values, weight.scales
    else:
        stored, scales = weight.packed, weight.scales
    return {
        "weight_ptr": stored,
        "weight_stride": stored.stride(0),
        "scales_ptr": scales,
        "scales_stride": 0 if scales is None else scales.stride(0),
    }


def as_matrix(weight: Weight, dtype: torch.dtype) -> Tensor:
    """`weight` [N, K] as torch.matmul takes it, beside activations of `dtype`: for more than `MATMUL_ROWS` rows.

    Quantized weights are unpacked on every call. Whether that beats a kernel of our own at these sizes was not
    measured; the memory it needs for a moment is that of the matrix in float32.
    """
    return weight if isinstance(weight, Tensor) else weight.dequantize(dtype)


def matmul(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """`x` [T, K] times `weight` [N, K] transposed, plus `bias` [N]: torch's product, for many rows."""
    with float32_sums():
        return F.linear(x, as_matrix(weight, x.dtype), bias)


def add_matmul_(target: Tensor, x: Tensor, weight: Weight) -> None:
    """Add `x` [T, K] times `weight` [N, K] transposed to `target` [T, N], in place."""
    with float32_sums():
        target.addmm_(x, as_matrix(weight, x.dtype).t())


@contextmanager
def float32_sums() -> Iterator[None]:
    """Within it the matrix library keeps the sums of half precision in float32 to the end, as all kernels here do.

    torch lets it add up parts of a long sum in half precision, if nobody says otherwise.
    """
    settings = torch.backends.cuda.matmul
    before = [(name, getattr(settings, name)) for name in _REDUCED]
    for name in _REDUCED:
        setattr(settings, name, False)
    try:
        yield
    finally:
        for name, value in before:
            setattr(settings, name, value)


def need_unit_stride(**tensors: Weight | None) -> None:
    """Raise `ValueError` for a tensor whose last dimension is not contiguous: kernels read 16 bytes at a time."""
    for name, tensor in tensors.items():
        if isinstance(tensor, Int8Weight):
            need_unit_stride(**{f"{name}.values": tensor.values, f"{name}.scales": tensor.scales})
        elif isinstance(tensor, Int4Weight):
            need_unit_stride(**{f"{name}.packed": tensor.packed, f"{name}.scales": tensor.scales})
        elif tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} has stride {tensor.stride()}; its last dimension must have stride 1")
