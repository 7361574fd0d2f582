"""The one loop that all projections share: rows times weight tile, with the RMS norm folded in.

The sum of squares is gathered while the row passes by, and the scale is applied to the finished sums, so a norm costs
no launch of its own. A single row is multiplied and summed without tensor cores, whose tiles would stay empty; more
rows use `tl.dot`. Masks along rows and outputs are avoided: indices are clamped, and only what is valid is stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MATMUL_ROWS = 64
"""Products of more rows go to torch.matmul (cuBLAS) with a kernel for the rest of the operation around it.

Not yet measured on a GPU.
"""

MIN_PROGRAMS = 128  # about the number of processors of an H100 (132): fewer programs leave some without work

NOT_SPECIALIZED = {"do_not_specialize": ["total_rows"], "do_not_specialize_on_alignment": ["num_rows_ptr"]}
"""Options of `triton.jit` for every kernel: a new row count, or a view of another layer's count, compiles nothing."""

INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


@dataclass(frozen=True, slots=True)
class Tile:
    """How one launch cuts a product: rows x outputs a program, columns a step."""

    rows: int
    outputs: int
    columns: int
    warps: int
    stages: int

    @property
    def weights_first(self) -> bool:
        """Whether the weights are the left operand: tensor cores want 16 or 64 left rows, and few rows fill 8."""
        return self.rows <= 16


def product_tile(rows: int, outputs: int, columns: int, dtype: torch.dtype) -> Tile | None:
    """The tile for `rows` x `columns` times `outputs` x `columns` transposed; None: leave it to torch.matmul.

    What the operations' `tuning` functions share. The numbers are for Hopper: the first path has 8 loads of
    16 bytes in flight a thread, and the others 2 to 3 stages of weights.
    """
    if rows <= 1:
        # Exactly 16 bytes a thread along the columns: then row and weights get one layout. With any other step Triton
        # moves every weight through shared memory.
        per_warp = 32 * 16 // dtype.itemsize
        padded = max(16, triton.next_power_of_2(columns))
        warps = min(4, max(1, padded // per_warp))
        return Tile(1, _enough_programs(8, outputs), min(warps * per_warp, padded), warps, stages=1)
    if rows > MATMUL_ROWS:
        return None
    if rows <= 16:
        block_rows, step = 16, 128
        block_outputs = _enough_programs(64 if outputs >= 2 * 64 * MIN_PROGRAMS else 32, outputs, least=16)
    else:
        block_rows, step = (32 if rows <= 32 else 64), 64
        block_outputs = _enough_programs(64, outputs, least=32)
    if dtype == torch.float32:  # runs without tensor cores, from registers: smaller steps
        return Tile(block_rows, block_outputs, 32, warps=4, stages=2)
    return Tile(block_rows, block_outputs, step, warps=4, stages=4)


def _enough_programs(most: int, outputs: int, least: int = 2) -> int:
    """`most` outputs a program, or half as often as needed to keep `MIN_PROGRAMS` busy, but not below `least`."""
    each = most
    while each > least and outputs < each * MIN_PROGRAMS:
        each //= 2
    return each


def need_unit_stride(**tensors: Tensor | None) -> None:
    """Raise `ValueError` for a tensor whose last dimension is not contiguous: kernels read 16 bytes at a time."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} has stride {tensor.stride()}; its last dimension must have stride 1")


@triton.jit
def live_rows(num_rows_ptr, total_rows):
    """Rows to compute: all, or fewer if the device says so."""
    if num_rows_ptr is None:
        return total_rows
    else:  # noqa: RET505 (Triton's frontend needs the other branch of a constexpr condition)
        return tl.minimum(tl.load(num_rows_ptr), total_rows)


@triton.jit
def product(
    x_ptr,
    x_stride,
    rows,  # [BLOCK_T] valid row indices
    norm_ptr,  # [K] norm weight, or None for no norm
    eps,
    weight_ptr,
    weight_stride,
    outputs,  # [BLOCK_N] valid weight rows, in any order
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
):
    """[BLOCK_T, BLOCK_N] float32: (normed) rows of x times rows of weight."""
    weight_rows = weight_ptr + outputs.to(tl.int64) * weight_stride
    x_rows = x_ptr + rows.to(tl.int64) * x_stride
    if BLOCK_T == 1:
        return _sum_product(x_rows, norm_ptr, eps, weight_rows, K, BLOCK_N, BLOCK_K)
    else:  # noqa: RET505
        return _dot_product(x_rows, norm_ptr, eps, weight_rows, K, BLOCK_T, BLOCK_N, BLOCK_K, WEIGHTS_FIRST)


@triton.jit
def _sum_product(x_row, norm_ptr, eps, weight_rows, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """[1, BLOCK_N]: one row, on the ordinary cores; sums are taken across threads only once, at the end."""
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((1, BLOCK_K), tl.float32)
    for start in range(0, K, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)[None, :]
        # Weights are read once a token: they need not push the activations out of the L2 cache.
        weight = _load_columns(weight_rows[:, None] + columns, columns, K, BLOCK_K, "evict_first").to(tl.float32)
        x = _load_columns(x_row[:, None] + columns, columns, K, BLOCK_K, "evict_last").to(tl.float32)
        if norm_ptr is not None:
            squares += x * x
            x *= _load_columns(norm_ptr + columns, columns, K, BLOCK_K, "evict_last").to(tl.float32)
        sums += weight * x
    total = tl.sum(sums, 1)[None, :]
    if norm_ptr is not None:
        total *= tl.rsqrt(tl.sum(squares, 1) / K + eps)[:, None]
    return total


@triton.jit
def _dot_product(
    x_rows,
    norm_ptr,
    eps,
    weight_rows,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
):
    """[BLOCK_T, BLOCK_N]: several rows, on tensor cores."""
    # The row times the norm weight, not yet scaled, can leave the range of float16. There the scale comes first, at the
    # price of reading the rows twice (they are in L2). bfloat16 has the range of float32.
    SCALE_FIRST: tl.constexpr = (norm_ptr is not None) and (weight_rows.dtype.element_ty == tl.float16)
    squares = tl.zeros((BLOCK_T,), tl.float32)
    scale = tl.full((BLOCK_T,), 1.0, tl.float32)
    if SCALE_FIRST:
        for start in range(0, K, BLOCK_K):
            columns = start + tl.arange(0, BLOCK_K)[None, :]
            x = _load_columns(x_rows[:, None] + columns, columns, K, BLOCK_K, "evict_last").to(tl.float32)
            squares += tl.sum(x * x, 1)
        scale = tl.rsqrt(squares / K + eps)

    if WEIGHTS_FIRST:
        sums = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    else:
        sums = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)[None, :]
        weight = _load_columns(weight_rows[:, None] + columns, columns, K, BLOCK_K, "evict_first")
        x = _load_columns(x_rows[:, None] + columns, columns, K, BLOCK_K, "evict_last")
        if norm_ptr is not None:
            wide = x.to(tl.float32)
            if SCALE_FIRST:
                wide *= scale[:, None]
            else:
                squares += tl.sum(wide * wide, 1)
            wide *= _load_columns(norm_ptr + columns, columns, K, BLOCK_K, "evict_last").to(tl.float32)
            x = wide.to(weight.dtype)
        if INTERPRETED:  # its products of bfloat16 are wrong; rounded operands stay as they are
            weight, x = weight.to(tl.float32), x.to(tl.float32)
        if WEIGHTS_FIRST:
            sums = tl.dot(weight, tl.trans(x), sums, input_precision="ieee")
        else:
            sums = tl.dot(x, tl.trans(weight), sums, input_precision="ieee")
    if WEIGHTS_FIRST:
        sums = tl.trans(sums)
    if (norm_ptr is not None) and (not SCALE_FIRST):
        sums *= tl.rsqrt(squares / K + eps)[:, None]
    return sums


@triton.jit
def _load_columns(pointers, columns, K: tl.constexpr, BLOCK_K: tl.constexpr, EVICTION: tl.constexpr):
    """Load with zeros beyond column K; no mask at all where the step divides K."""
    if K % BLOCK_K == 0:
        return tl.load(pointers, eviction_policy=EVICTION)
    else:  # noqa: RET505
        return tl.load(pointers, mask=columns < K, other=0.0, eviction_policy=EVICTION)
