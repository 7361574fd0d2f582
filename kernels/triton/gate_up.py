"""RMSNorm, gate and up projections, and SwiGLU or GeGLU: one launch, or two where many rows are normed before.

A tile takes rows of the gate and of the up projection in turns, so that a gate meets its up value in one program; the
weights themselves stay apart in memory, because a program reads every weight row as a stream of its own anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from d3engine.kernels.low_rank import RowMaps
from d3engine.kernels.matrices import Weight
from d3engine.kernels.triton.launches import ROW_COUNTS, Launch, ModelShape, meta, meta_weight, row_counts, strided
from d3engine.kernels.triton.low_rank import maps_launches
from d3engine.kernels.triton.matmul import matmul_steps
from d3engine.kernels.triton.operations import Step, performed
from d3engine.kernels.triton.product_kernels import (
    NOT_SPECIALIZED,
    ProductConfig,
    live_rows,
    prologue,
    tile_product,
    wait_for_previous,
)
from d3engine.kernels.triton.product_rows import labelled, product_launches, sums_launches
from d3engine.kernels.triton.products import Tile, need_unit_stride, product_tile
from d3engine.kernels.triton.rms_norm import normed_or_not


@performed
def gate_up(
    hidden: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Weight,
    bias: Tensor | None,
    *,
    activation: str = "silu",
    maps: RowMaps | None = None,
    num_rows: Tensor | None = None,
    batch_invariant: bool = False,
) -> tuple[Tensor, Sequence[Step]]:
    """RMSNorm, the gate and up projections, and the gates: activation(gate) * up, [T, I]; see `reference.py`.

    All but a quantized weight are of one dtype. `num_rows` int32 [1]: rows at or beyond it are undefined in what is
    returned; None means all rows. `batch_invariant`: as for `product_tile`. Everything is float32 until the result is
    rounded; `reference.py` rounds gate, up and silu(gate) too.
    """
    need_unit_stride(hidden=hidden, norm_weight=norm_weight, weight=weight, bias=bias)
    rows, outputs = hidden.shape[0], weight.shape[0]
    out = torch.empty(rows, outputs // 2, dtype=hidden.dtype, device=hidden.device)
    tile = product_tile(rows, weight, hidden.dtype, batch_invariant=batch_invariant)
    if tile is not None and maps is None:
        return out, gate_up_launches(tile, hidden, norm_weight, eps, weight, bias, out, num_rows, activation)
    x, norm = normed_or_not(hidden, norm_weight, eps, num_rows)
    steps: list[Step]
    if tile is None:
        projected, steps = matmul_steps(x, weight, bias)
    else:
        sums, product = sums_launches(tile, hidden, weight, num_rows, norm=(norm_weight, eps))
        projected, steps = sums[0], [*product]
    added = [] if maps is None else maps_launches(x, maps, projected, num_rows)
    gates = gates_launch(projected, out, num_rows, activation, None if tile is None else bias)
    return out, [*norm, *steps, *added, gates]


def gate_up_launches(
    tile: Tile,
    hidden: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Weight,
    bias: Tensor | None,
    out: Tensor,
    num_rows: Tensor | None,
    activation: str,
) -> list[Launch]:
    """Everything in one kernel; and what its rows need before."""
    target = {"bias_ptr": bias, "out_ptr": out, "GATES": out.shape[1], "GELU": activation == "gelu_tanh"}
    return product_launches(_product_kernel, tile, hidden, weight, num_rows, norm=(norm_weight, eps), **target)


def gates_launch(
    projected: Tensor, out: Tensor, num_rows: Tensor | None, activation: str, bias: Tensor | None = None
) -> Launch:
    """The gates alone, after a product [T, 2 I] made elsewhere, to which `bias` is added."""
    rows, gates = out.shape
    arguments = {
        **strided(projected=projected),
        "bias_ptr": bias,
        "out_ptr": out,
        **row_counts(num_rows, rows),
        "GATES": gates,
        "GELU": activation == "gelu_tanh",
        "BLOCK_N": 1024,
    }
    return Launch(_swiglu_kernel, (rows, triton.cdiv(gates, 1024)), arguments)


def launches(
    shape: ModelShape, dtype: torch.dtype, weights: str, batch_invariant: bool = False
) -> Iterator[tuple[str, Launch]]:
    """What `kernels/inspect.py` compiles."""
    hidden_size, gates = shape.hidden_size, shape.intermediate_size
    norm, weight = meta(hidden_size, dtype=dtype), meta_weight(2 * gates, hidden_size, dtype=dtype, weights=weights)
    bias = meta(2 * gates, dtype=dtype) if shape.bias else None
    num_rows = meta(1, dtype=torch.int32)
    for rows in (*ROW_COUNTS, 512):
        out = meta(rows, gates, dtype=dtype)
        tile = product_tile(rows, weight, dtype, batch_invariant=batch_invariant)
        if tile is None:
            projected = meta(rows, 2 * gates, dtype=dtype)
            yield f"swiglu rows={rows}", gates_launch(projected, out, num_rows, shape.activation)
        else:
            hidden = meta(rows, hidden_size, dtype=dtype)
            found = gate_up_launches(tile, hidden, norm, 1e-5, weight, bias, out, num_rows, shape.activation)
            yield from labelled(found, "", rows)


@triton.jit
def _activated(gate, GELU: tl.constexpr):
    """SiLU; or GELU by its approximation with tanh, whose half of 1 + tanh(u) is the sigmoid of 2 u."""
    if GELU:
        return gate * tl.sigmoid(gate * (1.5957691216057308 + 0.07135481282052 * gate * gate))
    else:  # noqa: RET505
        return gate * tl.sigmoid(gate)


@triton.jit(**NOT_SPECIALIZED)
def _product_kernel(
    x_ptr,
    x_stride,
    norm_ptr,
    eps,
    weight_ptr,
    weight_stride,
    scales_ptr,
    SCALES_STRIDE: tl.constexpr,
    TYPE: tl.constexpr,
    bias_ptr,
    out_ptr,
    num_rows_ptr,
    total_rows,
    K: tl.constexpr,
    GATES: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    nth = tl.arange(0, BLOCK_N)
    first_gate = tl.program_id(1) * (BLOCK_N // 2)
    outputs = tl.minimum(first_gate + nth // 2, GATES - 1) + (nth % 2) * GATES  # gate, up, gate, up, ...
    CONFIG: tl.constexpr = ProductConfig(K, BLOCK_T, BLOCK_N, BLOCK_K, WEIGHTS_FIRST, STAGES, PDL, SCALES_STRIDE, TYPE)
    first, count = prologue(weight_ptr, weight_stride, outputs, 0, num_rows_ptr, total_rows, CONFIG)
    if tl.program_id(0) * BLOCK_T >= count:
        return
    rows, sums = tile_product(
        x_ptr, x_stride, count, norm_ptr, eps, weight_ptr, weight_stride, scales_ptr, outputs, CONFIG, first,
    )  # fmt: skip
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + outputs).to(tl.float32)[None, :]
    gate, up = tl.split(tl.reshape(sums, (BLOCK_T, BLOCK_N // 2, 2)))
    out = _activated(gate, GELU) * up
    gates = first_gate + tl.arange(0, BLOCK_N // 2)
    pointers = out_ptr + rows.to(tl.int64)[:, None] * GATES + gates[None, :]
    tl.store(pointers, out.to(out_ptr.dtype.element_ty), mask=(rows < count)[:, None] & (gates < GATES)[None, :])


@triton.jit(**NOT_SPECIALIZED)
def _swiglu_kernel(
    projected_ptr,
    projected_stride,
    bias_ptr,
    out_ptr,
    num_rows_ptr,
    total_rows,
    GATES: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    if row >= live_rows(num_rows_ptr, total_rows):
        return
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = columns < GATES
    pointers = projected_ptr + row * projected_stride + columns
    gate = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(pointers + GATES, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        gate += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
        up += tl.load(bias_ptr + GATES + columns, mask=mask, other=0.0).to(tl.float32)
    out = _activated(gate, GELU) * up
    tl.store(out_ptr + row * GATES + columns, out.to(out_ptr.dtype.element_ty), mask=mask)
