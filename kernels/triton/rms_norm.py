"""RMS norm of whole rows, with the residual addition before it if wanted: one program a row.

Projections of few rows do not need it, as they carry the norm along. It serves where more rows are multiplied, and
stores them in the order of `places_of` if the product wants that; rows that need no norm are brought into it here too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from d3engine.kernels.triton.launches import Launch, ModelShape, arranged_columns, meta, places_of, row_counts, strided
from d3engine.kernels.triton.operations import Step, performed
from d3engine.kernels.triton.product_kernels import NOT_SPECIALIZED, live_rows, wait_for_previous
from d3engine.kernels.triton.products import need_unit_stride


def rms_norm(
    hidden: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    num_rows: Tensor | None = None,
) -> Tensor:
    """Root-mean-square norm of the rows of `hidden` [T, H] times `weight` [H]; returns [T, H], all of one dtype.

    With `residual` [T, H] (written): `hidden` is added to it, and the sum is normed. The statistics are float32, and
    the normed row is rounded before it meets the weight, as transformers does. `num_rows` int32 [1]: rows at or beyond
    it keep their residual and return undefined values; None means all rows.
    """
    need_unit_stride(residual=residual)
    out, launch = normed(hidden, weight, eps, num_rows, residual)
    launch.run()
    return out


@performed
def add_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor, *, num_rows: Tensor | None = None
) -> tuple[None, Sequence[Step]]:
    """Add the norm of the rows of `x` [T, H], times `weight` [H], to `residual` [T, H], in place; all of one dtype.

    The sum is rounded once, from float32. `num_rows` int32 [1]: rows at or beyond it keep their residual; None means
    all rows.
    """
    need_unit_stride(x=x, weight=weight, residual=residual)
    return None, [add_norm_launch(x, weight, eps, residual, num_rows)]


def add_norm_launch(x: Tensor, weight: Tensor, eps: float, residual: Tensor, num_rows: Tensor | None) -> Launch:
    """The launch of `add_norm`."""
    rows, columns = x.shape
    arguments = {
        **strided(x=x),
        "weight_ptr": weight,
        "eps": eps,
        **strided(residual=residual),
        **row_counts(num_rows, rows),
        "H": columns,
        "BLOCK_H": triton.next_power_of_2(columns),
    }
    return Launch(_add_norm_kernel, (rows,), arguments, tuning(columns))


def normed(
    hidden: Tensor, weight: Tensor, eps: float, num_rows: Tensor | None, residual: Tensor | None = None
) -> tuple[Tensor, Launch]:
    """The result of `rms_norm`, and what computes it."""
    need_unit_stride(hidden=hidden, weight=weight)
    out = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    return out, norm_launch(hidden, weight, eps, residual, num_rows, out)


def normed_or_not(
    hidden: Tensor, weight: Tensor | None, eps: float, num_rows: Tensor | None
) -> tuple[Tensor, list[Launch]]:
    """The same; without a weight `hidden` itself, and nothing."""
    if weight is None:
        return hidden, []
    out, launch = normed(hidden, weight, eps, num_rows)
    return out, [launch]


def tuning(columns: int) -> int:
    """Warps for one row: about 16 columns a thread."""
    if columns <= 1024:
        return 4
    return 8 if columns <= 8192 else 16


def norm_launch(
    hidden: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    num_rows: Tensor | None,
    out: Tensor,
    *,
    arranged: bool = False,
) -> Launch:
    """The launch of the one kernel; `out` is contiguous, and has `arranged_columns` if it is to be `arranged`."""
    rows, columns = hidden.shape
    arguments = {
        **strided(hidden=hidden),
        "weight_ptr": weight,
        "eps": eps,
        "residual_ptr": residual,
        "residual_stride": 0 if residual is None else residual.stride(0),
        "out_ptr": out,
        **row_counts(num_rows, rows),
        "H": columns,
        "WIDTH": out.shape[1],
        "ARRANGED": arranged,
        "BLOCK_H": triton.next_power_of_2(out.shape[1]),
    }
    return Launch(_norm_kernel, (rows,), arguments, tuning(columns))


def arrange_launch(x: Tensor, num_rows: Tensor | None, out: Tensor) -> Launch:
    """`out` [T, arranged columns], contiguous, is written: the rows of `x` [T, K] in the order of `places_of`."""
    arguments = {
        **strided(x=x),
        "out_ptr": out,
        **row_counts(num_rows, x.shape[0]),
        "K": x.shape[1],
        "WIDTH": out.shape[1],
        "BLOCK_K": 1024,
    }
    return Launch(_arrange_kernel, (x.shape[0], triton.cdiv(out.shape[1], 1024)), arguments)


def launches(shape: ModelShape, dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
    """What `kernels/inspect.py` compiles."""
    hidden, weight = meta(512, shape.hidden_size, dtype=dtype), meta(shape.hidden_size, dtype=dtype)
    num_rows = meta(1, dtype=torch.int32)
    yield "norm", norm_launch(hidden, weight, 1e-5, None, num_rows, hidden)
    yield "add, norm", norm_launch(hidden, weight, 1e-5, hidden, num_rows, hidden)
    arranged = meta(512, arranged_columns(shape.hidden_size), dtype=dtype)
    yield "norm, arranged", norm_launch(hidden, weight, 1e-5, None, num_rows, arranged, arranged=True)
    yield "arranged", arrange_launch(hidden, num_rows, arranged)
    if shape.post_norms:
        yield "norm, add", add_norm_launch(hidden, weight, 1e-5, hidden, num_rows)


@triton.jit(**NOT_SPECIALIZED)
def _norm_kernel(
    hidden_ptr,
    hidden_stride,
    weight_ptr,
    eps,
    residual_ptr,
    residual_stride,
    out_ptr,
    num_rows_ptr,
    total_rows,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    ARRANGED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    if row >= live_rows(num_rows_ptr, total_rows):
        return
    columns = tl.arange(0, BLOCK_H)
    mask = columns < H
    wide = tl.load(hidden_ptr + row * hidden_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        pointers = residual_ptr + row * residual_stride + columns
        total = (wide + tl.load(pointers, mask=mask, other=0.0).to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(pointers, total, mask=mask)
        wide = total.to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, 0) / H + eps)
    rounded = scaled.to(out_ptr.dtype.element_ty).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    out = (rounded * weight).to(out_ptr.dtype.element_ty)
    if ARRANGED:  # what fills up the row is zeros
        tl.store(out_ptr + row * WIDTH + places_of(columns), out, mask=columns < WIDTH)
    else:
        tl.store(out_ptr + row * H + columns, out, mask=mask)


@triton.jit(**NOT_SPECIALIZED)
def _add_norm_kernel(
    x_ptr,
    x_stride,
    weight_ptr,
    eps,
    residual_ptr,
    residual_stride,
    num_rows_ptr,
    total_rows,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    if row >= live_rows(num_rows_ptr, total_rows):
        return
    columns = tl.arange(0, BLOCK_H)
    mask = columns < H
    wide = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    pointers = residual_ptr + row * residual_stride + columns
    total = wide * tl.rsqrt(tl.sum(wide * wide, 0) / H + eps) * weight
    total += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    tl.store(pointers, total.to(residual_ptr.dtype.element_ty), mask=mask)


@triton.jit(**NOT_SPECIALIZED)
def _arrange_kernel(
    x_ptr,
    x_stride,
    out_ptr,
    num_rows_ptr,
    total_rows,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    if row >= live_rows(num_rows_ptr, total_rows):
        return
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    x = tl.load(x_ptr + row * x_stride + columns, mask=columns < K, other=0.0)
    tl.store(out_ptr + row * WIDTH + places_of(columns), x, mask=columns < WIDTH)
