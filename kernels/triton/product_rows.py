"""What surrounds the loop of a product: rows normed and in order before it, and sums that another kernel takes from it.

A norm costs few rows nothing when it is carried along. More rows would be normed once by every program that reads them,
in between their copies and the tensor cores, which is most of what such a loop does beside its weights. Sums go to
memory in float32 where another kernel does the rest. Where outputs are few, programs share the columns of one tile of
them (split-K), and the other kernel adds their sums up, always in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from d3engine.kernels.matrices import Weight
from d3engine.kernels.triton.launches import Launch, arranged_columns
from d3engine.kernels.triton.product_kernels import NOT_SPECIALIZED, ProductConfig, prologue, tile_product
from d3engine.kernels.triton.products import Tile, parts_of, product_launch
from d3engine.kernels.triton.rms_norm import arrange_launch, norm_launch, normed_or_not


def product_launches(
    kernel: Any,
    tile: Tile,
    x: Tensor,
    weight: Weight,
    num_rows: Tensor | None,
    *,
    norm: tuple[Tensor | None, float] | None = None,
    **others: object,
) -> list[Launch]:
    """`product_launch` last, and before it what makes rows out of `x` [T, K] that its tile takes.

    Of a `norm` that was applied before, the kernel gets none; nor where it has no weight, which is no norm.
    """
    is_arranged = tile.is_arranged(weight, x.dtype)
    norm_weight, eps = norm or (None, 0.0)
    if norm is not None:
        others |= {"norm_ptr": norm_weight, "eps": 0.0 if norm_weight is None else eps}
    if not tile.is_normed or (norm_weight is None and not is_arranged):
        return [product_launch(kernel, tile, x, weight, num_rows, **others)]
    rows, columns = x.shape
    stored = torch.empty(rows, arranged_columns(columns) if is_arranged else columns, dtype=x.dtype, device=x.device)
    if norm_weight is None:
        before = arrange_launch(x, num_rows, stored)
    else:
        before = norm_launch(x, norm_weight, eps, None, num_rows, stored, arranged=is_arranged)
        others |= {"norm_ptr": None, "eps": 0.0}
    return [before, product_launch(kernel, tile, stored, weight, num_rows, **others)]


_BESIDE = {"_norm_kernel": "norm", "_arrange_kernel": "arranged", "_add_kernel": "add", "_finish_kernel": "finish"} | {
    "_norm_projections_kernel": "norms"
}


def labelled(launches: Iterable[Launch], label: str, rows: int) -> Iterator[tuple[str, Launch]]:
    """The launches of one operation with the labels that inspection prints; the product's is `label` alone."""
    for launch in launches:
        names = (label, _BESIDE.get(launch.kernel.fn.__name__, ""))
        yield f"{', '.join(name for name in names if name)} rows={rows}".strip(), launch


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
    CONFIG: tl.constexpr = ProductConfig(K, BLOCK_T, BLOCK_N, BLOCK_K, WEIGHTS_FIRST, STAGES, PDL, SCALES_STRIDE, TYPE)
    first, count = prologue(weight_ptr, weight_stride, valid_outputs, column, num_rows_ptr, total_rows, CONFIG)
    if tl.program_id(0) * BLOCK_T >= count:
        return
    rows, sums = tile_product(
        x_ptr, x_stride, count, norm_ptr, eps, weight_ptr, weight_stride, scales_ptr, valid_outputs, CONFIG,
        first, column, tl.minimum(column + PART_K, K),
    )  # fmt: skip
    pointers = sums_ptr + (part * total_rows + rows).to(tl.int64)[:, None] * WIDTH + (FIRST + outputs)[None, :]
    tl.store(pointers, sums, mask=(rows < count)[:, None] & (outputs < N)[None, :])
