"""Output and down projection: a product added to the residual stream in place.

One launch; or two, where so few outputs would leave processors idle: then several programs share the columns of one
tile of outputs (see `product_rows.py`), and a second kernel adds their sums to the residual.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from d3engine.kernels.low_rank import RowMaps
from d3engine.kernels.matrices import Weight
from d3engine.kernels.triton.launches import ROW_COUNTS, Launch, ModelShape, meta, meta_weight, row_counts, strided
from d3engine.kernels.triton.low_rank import maps_launches
from d3engine.kernels.triton.matmul import add_matmul_steps, matmul_steps
from d3engine.kernels.triton.operations import Step, performed
from d3engine.kernels.triton.product_kernels import (
    NOT_SPECIALIZED,
    ProductConfig,
    live_rows,
    prologue,
    tile_product,
    wait_for_previous,
)
from d3engine.kernels.triton.product_rows import added, labelled, product_launches, sums_launches
from d3engine.kernels.triton.products import Tile, need_unit_stride, product_tile


@performed
def linear_residual(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    residual: Tensor,
    *,
    maps: RowMaps | None = None,
    num_rows: Tensor | None = None,
    batch_invariant: bool = False,
) -> tuple[None, Sequence[Step]]:
    """Add `x` [T, K] times `weight` [H, K] transposed (and `bias` [H], and `maps`) to `residual` [T, H], in place.

    All but a quantized weight of one dtype, last dimensions contiguous; sums are float32, rounded once with the
    residual. `num_rows` int32 [1]: rows at or beyond it keep their residual; None means all rows. `batch_invariant`: as
    for `product_tile`.
    """
    need_unit_stride(x=x, weight=weight, bias=bias, residual=residual)
    tile = product_tile(x.shape[0], weight, x.dtype, may_split=True, batch_invariant=batch_invariant)
    added = [] if maps is None else maps_launches(x, maps, residual, num_rows)
    if tile is not None:
        return None, [*residual_launches(tile, x, weight, bias, residual, num_rows), *added]
    if num_rows is None:
        return None, [*add_matmul_steps(residual, x, weight, bias), *added]
    product, steps = matmul_steps(x, weight)
    return None, [*steps, add_launch(product[None], bias, residual, num_rows), *added]


def residual_launches(
    tile: Tile, x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor, num_rows: Tensor | None
) -> list[Launch]:
    """Product and sum in one kernel, or in two if the tile has parts; and what its rows need before."""
    if tile.parts == 1:
        target: dict[str, Any] = {"bias_ptr": bias, **strided(residual=residual), "N": weight.shape[0]}
        return product_launches(_product_kernel, tile, x, weight, num_rows, **target)
    sums, launches = sums_launches(tile, x, weight, num_rows)
    return [*launches, add_launch(sums, bias, residual, num_rows)]


def add_launch(sums: Tensor, bias: Tensor | None, residual: Tensor, num_rows: Tensor | None) -> Launch:
    """Add up `sums` [parts, T, H], contiguous, and add them (and `bias`) to the rows that live."""
    parts, rows, outputs = sums.shape
    arguments = {
        "sums_ptr": sums,
        "bias_ptr": bias,
        **strided(residual=residual),
        **row_counts(num_rows, rows),
        "PARTS": parts,
        "N": outputs,
        "BLOCK_N": 512,
    }
    return Launch(_add_kernel, (rows, triton.cdiv(outputs, 512)), arguments)


def launches(
    shape: ModelShape, dtype: torch.dtype, weights: str, batch_invariant: bool = False
) -> Iterator[tuple[str, Launch]]:
    """What `kernels/inspect.py` compiles."""
    hidden = shape.hidden_size
    num_rows = meta(1, dtype=torch.int32)
    bias = meta(hidden, dtype=dtype) if shape.bias else None
    for rows in (*ROW_COUNTS, 512):
        residual = meta(rows, hidden, dtype=dtype)
        for label, columns in (("output", shape.num_heads * shape.head_dim), ("down", shape.intermediate_size)):
            x, weight = meta(rows, columns, dtype=dtype), meta_weight(hidden, columns, dtype=dtype, weights=weights)
            tile = product_tile(rows, weight, dtype, may_split=True, batch_invariant=batch_invariant)
            if tile is not None:
                yield from labelled(residual_launches(tile, x, weight, bias, residual, num_rows), label, rows)
    many = meta(512, hidden, dtype=dtype)
    yield "add rows=512", add_launch(many[None], bias, many, num_rows)


@triton.jit(**NOT_SPECIALIZED)
def _product_kernel(
    x_ptr,
    x_stride,
    weight_ptr,
    weight_stride,
    scales_ptr,
    SCALES_STRIDE: tl.constexpr,
    TYPE: tl.constexpr,
    bias_ptr,
    residual_ptr,
    residual_stride,
    num_rows_ptr,
    total_rows,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid_outputs = tl.minimum(outputs, N - 1)
    CONFIG: tl.constexpr = ProductConfig(K, BLOCK_T, BLOCK_N, BLOCK_K, WEIGHTS_FIRST, STAGES, PDL, SCALES_STRIDE, TYPE)
    first, count = prologue(weight_ptr, weight_stride, valid_outputs, 0, num_rows_ptr, total_rows, CONFIG)
    if tl.program_id(0) * BLOCK_T >= count:
        return
    rows, sums = tile_product(
        x_ptr, x_stride, count, None, 0.0, weight_ptr, weight_stride, scales_ptr, valid_outputs, CONFIG, first,
    )  # fmt: skip
    _add(sums, rows, outputs, count, bias_ptr, residual_ptr, residual_stride, N)


@triton.jit(**NOT_SPECIALIZED)
def _add_kernel(
    sums_ptr,
    bias_ptr,
    residual_ptr,
    residual_stride,
    num_rows_ptr,
    total_rows,
    PARTS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    count = live_rows(num_rows_ptr, total_rows)
    if tl.program_id(0) >= count:
        return
    rows = tl.program_id(0) + tl.arange(0, 1)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = added(sums_ptr, rows, outputs, total_rows, PARTS, N)
    _add(sums, rows, outputs, count, bias_ptr, residual_ptr, residual_stride, N)


@triton.jit
def _add(sums, rows, outputs, count, bias_ptr, residual_ptr, residual_stride, N: tl.constexpr):
    """Add `sums` [rows, outputs] and the bias to the residual, where both are valid."""
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + outputs, mask=outputs < N, other=0.0).to(tl.float32)[None, :]
    pointers = residual_ptr + rows.to(tl.int64)[:, None] * residual_stride + outputs[None, :]
    mask = (rows < count)[:, None] & (outputs < N)[None, :]
    sums += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    tl.store(pointers, sums.to(residual_ptr.dtype.element_ty), mask=mask)
