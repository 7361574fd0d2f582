"""Output and down projection: a product added to the residual stream in place, one launch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from d3engine.kernels.triton.launches import ROW_COUNTS, Launch, ModelShape, meta
from d3engine.kernels.triton.products import NOT_SPECIALIZED, Tile, live_rows, need_unit_stride, product, product_tile


def linear_residual(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, *, num_rows: Tensor | None = None
) -> None:
    """Add `x` [T, K] times `weight` [H, K] transposed (and `bias` [H]) to `residual` [T, H], in place.

    All of one dtype, last dimensions contiguous; sums are float32, rounded once with the residual. `num_rows` int32
    [1]: rows at or beyond it keep their residual; None means all rows.
    """
    need_unit_stride(x=x, weight=weight, bias=bias, residual=residual)
    tile = tuning(*x.shape, weight.shape[0], weight.dtype)
    if tile is not None:
        product_launch(tile, x, weight, bias, residual, num_rows).run()
    elif num_rows is not None:
        add_launch(F.linear(x, weight, bias), residual, num_rows).run()
    else:
        residual.addmm_(x, weight.t())
        if bias is not None:
            residual.add_(bias)


def tuning(rows: int, columns: int, outputs: int, dtype: torch.dtype) -> Tile | None:
    """The tile by shape; None: torch.matmul."""
    return product_tile(rows, outputs, columns, dtype)


def product_launch(
    tile: Tile, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, num_rows: Tensor | None
) -> Launch:
    """Product and sum in one kernel."""
    rows, outputs = x.shape[0], weight.shape[0]
    arguments = {
        "x_ptr": x,
        "x_stride": x.stride(0),
        "weight_ptr": weight,
        "weight_stride": weight.stride(0),
        "bias_ptr": bias,
        "residual_ptr": residual,
        "residual_stride": residual.stride(0),
        "num_rows_ptr": num_rows,
        "total_rows": rows,
        "K": x.shape[1],
        "N": outputs,
        "BLOCK_T": tile.rows,
        "BLOCK_N": tile.outputs,
        "BLOCK_K": tile.columns,
        "WEIGHTS_FIRST": tile.weights_first,
    }
    grid = (triton.cdiv(rows, tile.rows), triton.cdiv(outputs, tile.outputs))
    return Launch(_product_kernel, grid, arguments, tile.warps, tile.stages)


def add_launch(projected: Tensor, residual: Tensor, num_rows: Tensor | None) -> Launch:
    """Add the finished product [T, H] to the rows that live."""
    rows, outputs = projected.shape
    arguments = {
        "projected_ptr": projected,
        "projected_stride": projected.stride(0),
        "residual_ptr": residual,
        "residual_stride": residual.stride(0),
        "num_rows_ptr": num_rows,
        "total_rows": rows,
        "N": outputs,
        "BLOCK_N": 1024,
    }
    return Launch(_add_kernel, (rows, triton.cdiv(outputs, 1024)), arguments)


def launches(shape: ModelShape, dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
    """What `kernels/inspect.py` compiles."""
    hidden = shape.hidden_size
    num_rows = meta(1, dtype=torch.int32)
    bias = meta(hidden, dtype=dtype) if shape.bias else None
    for rows in ROW_COUNTS:
        residual = meta(rows, hidden, dtype=dtype)
        for label, columns in (("output", shape.num_heads * shape.head_dim), ("down", shape.intermediate_size)):
            x, weight = meta(rows, columns, dtype=dtype), meta(hidden, columns, dtype=dtype)
            tile = tuning(rows, columns, hidden, dtype)
            if tile is not None:
                yield f"{label} rows={rows}", product_launch(tile, x, weight, bias, residual, num_rows)
    many = meta(512, hidden, dtype=dtype)
    yield "add rows=512", add_launch(many, many, num_rows)


@triton.jit(**NOT_SPECIALIZED)
def _product_kernel(
    x_ptr,
    x_stride,
    weight_ptr,
    weight_stride,
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
):
    count = live_rows(num_rows_ptr, total_rows)
    if tl.program_id(0) * BLOCK_T >= count:
        return
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = product(
        x_ptr,
        x_stride,
        tl.minimum(rows, count - 1),
        None,
        0.0,
        weight_ptr,
        weight_stride,
        tl.minimum(outputs, N - 1),
        K,
        BLOCK_T,
        BLOCK_N,
        BLOCK_K,
        WEIGHTS_FIRST,
    )
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + outputs, mask=outputs < N, other=0.0).to(tl.float32)[None, :]
    pointers = residual_ptr + rows.to(tl.int64)[:, None] * residual_stride + outputs[None, :]
    mask = (rows < count)[:, None] & (outputs < N)[None, :]
    sums += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    tl.store(pointers, sums.to(residual_ptr.dtype.element_ty), mask=mask)


@triton.jit(**NOT_SPECIALIZED)
def _add_kernel(
    projected_ptr,
    projected_stride,
    residual_ptr,
    residual_stride,
    num_rows_ptr,
    total_rows,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row >= live_rows(num_rows_ptr, total_rows):
        return
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = columns < N
    projected = tl.load(projected_ptr + row * projected_stride + columns, mask=mask, other=0.0)
    pointers = residual_ptr + row * residual_stride + columns
    residual = tl.load(pointers, mask=mask, other=0.0)
    total = residual.to(tl.float32) + projected.to(tl.float32)
    tl.store(pointers, total.to(residual_ptr.dtype.element_ty), mask=mask)
