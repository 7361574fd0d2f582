"""A product whose sums go to memory in float32, for another kernel to do the rest: in parts, where outputs are few.

Then several programs share the columns of one tile of outputs (split-K), and the other kernel adds their sums up,
always in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from d3engine.kernels.matrices import Weight
from d3engine.kernels.triton.launches import Launch
from d3engine.kernels.triton.product_kernels import NOT_SPECIALIZED, prologue, tile_product
from d3engine.kernels.triton.product_rows import product_launches
from d3engine.kernels.triton.products import Tile, parts_of
from d3engine.kernels.triton.rms_norm import normed_or_not


def sums_launches(
    tile: Tile, x: Tensor, weight: Weight, num_rows: Tensor | None, *, norm: tuple[Tensor | None, float] = (None, 0.0)
) -> tuple[Tensor, list[Launch]]:
    """The sums float32 [parts, T, N] of `x` [T, K] times `weight` [N, K] transposed, and what writes them.

    A norm that a tile carries along needs whole rows: such a tile has one part. The matrices of a stack are multiplied
    one after the other.
    """
    rows, (outputs, columns) = x.shape[0], weight.shape
    sums = torch.empty(tile.parts, rows, outputs, dtype=torch.float32, device=x.device)
    launches: list[Launch] = []
    if tile.stack and tile.is_normed:  # once for all its matrices
        x, launches = normed_or_not(x, *norm, num_rows)
        norm = None, 0.0
    for (first, part), own in zip(parts_of(weight), tile.stack or (tile,), strict=True):
        place = {"N": part.shape[0], "WIDTH": outputs, "FIRST": first, "PART_K": own.part_columns(columns)}
        launches += product_launches(_sums_kernel, own, x, part, num_rows, norm=norm, sums_ptr=sums, **place)
    return sums, launches


@triton.jit
def added(sums_ptr, rows, outputs, total_rows, PARTS: tl.constexpr, N: tl.constexpr):
    """[rows, outputs] float32: the sums of all parts; 0 from output N on."""
    sums = tl.zeros((rows.shape[0], outputs.shape[0]), tl.float32)
    for part in tl.static_range(PARTS):
        pointers = sums_ptr + (part * total_rows + rows).to(tl.int64)[:, None] * N + outputs[None, :]
        sums += tl.load(pointers, mask=(outputs < N)[None, :], other=0.0).to(tl.float32)
    return sums


@triton.jit(**NOT_SPECIALIZED)
def _sums_kernel(
    x_ptr,
    x_stride,
    norm_ptr,
    eps,
    weight_ptr,
    weight_stride,
    scales_ptr,
    SCALES_STRIDE: tl.constexpr,
    TYPE: tl.constexpr,
    sums_ptr,
    num_rows_ptr,
    total_rows,
    K: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    PART_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid_outputs = tl.minimum(outputs, N - 1)
    part = tl.program_id(2)
    column = part * PART_K
    first, count = prologue(
        weight_ptr, weight_stride, valid_outputs, column, num_rows_ptr, total_rows, K, BLOCK_K, TYPE, PDL
    )  # fmt: skip
    if tl.program_id(0) * BLOCK_T >= count:
        return
    rows, sums = tile_product(
        x_ptr, x_stride, count, norm_ptr, eps,
        weight_ptr, weight_stride, scales_ptr, SCALES_STRIDE, TYPE, valid_outputs,
        K, BLOCK_T, BLOCK_N, BLOCK_K, WEIGHTS_FIRST, STAGES, PDL, first, column, tl.minimum(column + PART_K, K),
    )  # fmt: skip
    pointers = sums_ptr + (part * total_rows + rows).to(tl.int64)[:, None] * WIDTH + (FIRST + outputs)[None, :]
    tl.store(pointers, sums, mask=(rows < count)[:, None] & (outputs < N)[None, :])
