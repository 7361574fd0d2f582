"""RMSNorm, gate and up projections, and SwiGLU: one launch.

A tile takes rows of the gate and of the up projection in turns, so that a gate meets its up value in one program; the
weights themselves stay apart in memory, because a program reads every weight row as a stream of its own anyway.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from d3engine.kernels.triton.launches import ROW_COUNTS, Launch, ModelShape, meta
from d3engine.kernels.triton.products import NOT_SPECIALIZED, Tile, live_rows, need_unit_stride, product, product_tile
from d3engine.kernels.triton.rms_norm import rms_norm


def gate_up(
    hidden: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    *,
    num_rows: Tensor | None = None,
) -> Tensor:
    """RMSNorm, the gate and up projections, and SwiGLU: silu(gate) * up, [T, I].

    `hidden` [T, H]; `weight` [2 I, H] and `bias` [2 I] hold the gate's rows first, then the up projection's; all of one
    dtype. `num_rows` int32 [1]: rows at or beyond it are undefined in what is returned; None means all rows.

    Everything is float32 until the result is rounded; `reference.py` rounds gate, up and silu(gate) too.
    """
    need_unit_stride(hidden=hidden, norm_weight=norm_weight, weight=weight, bias=bias)
    rows, (outputs, columns) = hidden.shape[0], weight.shape
    out = torch.empty(rows, outputs // 2, dtype=hidden.dtype, device=hidden.device)
    tile = tuning(rows, columns, outputs, weight.dtype)
    if tile is not None:
        product_launch(tile, hidden, norm_weight, eps, weight, bias, out, num_rows).run()
    else:
        projected = F.linear(rms_norm(hidden, norm_weight, eps, num_rows=num_rows), weight, bias)
        swiglu_launch(projected, out, num_rows).run()
    return out


def tuning(rows: int, columns: int, outputs: int, dtype: torch.dtype) -> Tile | None:
    """The tile by shape, `outputs` = 2 I; None: torch.matmul."""
    return product_tile(rows, outputs, columns, dtype)


def product_launch(
    tile: Tile,
    hidden: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    num_rows: Tensor | None,
) -> Launch:
    """Everything in one kernel."""
    (rows, columns), gates = hidden.shape, out.shape[1]
    arguments = {
        "hidden_ptr": hidden,
        "hidden_stride": hidden.stride(0),
        "norm_ptr": norm_weight,
        "eps": eps,
        "weight_ptr": weight,
        "weight_stride": weight.stride(0),
        "bias_ptr": bias,
        "out_ptr": out,
        "num_rows_ptr": num_rows,
        "total_rows": rows,
        "K": columns,
        "GATES": gates,
        "BLOCK_T": tile.rows,
        "BLOCK_N": tile.outputs,
        "BLOCK_K": tile.columns,
        "WEIGHTS_FIRST": tile.weights_first,
    }
    grid = (triton.cdiv(rows, tile.rows), triton.cdiv(2 * gates, tile.outputs))
    return Launch(_product_kernel, grid, arguments, tile.warps, tile.stages)


def swiglu_launch(projected: Tensor, out: Tensor, num_rows: Tensor | None) -> Launch:
    """SwiGLU alone, after a product [T, 2 I] made elsewhere."""
    rows, gates = out.shape
    arguments = {
        "projected_ptr": projected,
        "projected_stride": projected.stride(0),
        "out_ptr": out,
        "num_rows_ptr": num_rows,
        "total_rows": rows,
        "GATES": gates,
        "BLOCK_N": 1024,
    }
    return Launch(_swiglu_kernel, (rows, triton.cdiv(gates, 1024)), arguments)


def launches(shape: ModelShape, dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
    """What `kernels/inspect.py` compiles."""
    hidden_size, gates = shape.hidden_size, shape.intermediate_size
    norm, weight = meta(hidden_size, dtype=dtype), meta(2 * gates, hidden_size, dtype=dtype)
    bias = meta(2 * gates, dtype=dtype) if shape.bias else None
    num_rows = meta(1, dtype=torch.int32)
    for rows in (*ROW_COUNTS, 512):
        out = meta(rows, gates, dtype=dtype)
        tile = tuning(rows, hidden_size, 2 * gates, dtype)
        if tile is None:
            yield f"swiglu rows={rows}", swiglu_launch(meta(rows, 2 * gates, dtype=dtype), out, num_rows)
        else:
            hidden = meta(rows, hidden_size, dtype=dtype)
            yield f"rows={rows}", product_launch(tile, hidden, norm, 1e-5, weight, bias, out, num_rows)


@triton.jit(**NOT_SPECIALIZED)
def _product_kernel(
    hidden_ptr,
    hidden_stride,
    norm_ptr,
    eps,
    weight_ptr,
    weight_stride,
    bias_ptr,
    out_ptr,
    num_rows_ptr,
    total_rows,
    K: tl.constexpr,
    GATES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
):
    count = live_rows(num_rows_ptr, total_rows)
    if tl.program_id(0) * BLOCK_T >= count:
        return
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    nth = tl.arange(0, BLOCK_N)
    first_gate = tl.program_id(1) * (BLOCK_N // 2)
    outputs = tl.minimum(first_gate + nth // 2, GATES - 1) + (nth % 2) * GATES  # gate, up, gate, up, ...
    sums = product(
        hidden_ptr,
        hidden_stride,
        tl.minimum(rows, count - 1),
        norm_ptr,
        eps,
        weight_ptr,
        weight_stride,
        outputs,
        K,
        BLOCK_T,
        BLOCK_N,
        BLOCK_K,
        WEIGHTS_FIRST,
    )
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + outputs).to(tl.float32)[None, :]
    gate, up = tl.split(tl.reshape(sums, (BLOCK_T, BLOCK_N // 2, 2)))
    out = gate * tl.sigmoid(gate) * up
    gates = first_gate + tl.arange(0, BLOCK_N // 2)
    pointers = out_ptr + rows.to(tl.int64)[:, None] * GATES + gates[None, :]
    tl.store(pointers, out.to(out_ptr.dtype.element_ty), mask=(rows < count)[:, None] & (gates < GATES)[None, :])


@triton.jit(**NOT_SPECIALIZED)
def _swiglu_kernel(
    projected_ptr,
    projected_stride,
    out_ptr,
    num_rows_ptr,
    total_rows,
    GATES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row >= live_rows(num_rows_ptr, total_rows):
        return
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = columns < GATES
    pointers = projected_ptr + row * projected_stride + columns
    gate = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(pointers + GATES, mask=mask, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * GATES + columns, out.to(out_ptr.dtype.element_ty), mask=mask)
