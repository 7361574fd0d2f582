"""What follows the query, key and value projections: norms of heads, RoPE, and the write into the cache.

`finish` is the end of a kernel whose tile of outputs is in registers. `finish_launch` is the same as a launch of its
own, after sums in memory: where a tile must hold whole heads, or where programs have shared columns.
"""

from __future__ import annotations

from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from d3engine.kernels.kv_pool import FP8_CAPABILITY, LARGEST, SMALLEST, KVPool, values_and_scales
from d3engine.kernels.triton.launches import Launch
from d3engine.kernels.triton.product_kernels import NOT_SPECIALIZED, live_rows, wait_for_previous
from d3engine.kernels.triton.product_sums import added

_LARGEST = tl.constexpr(LARGEST)
_SMALLEST = tl.constexpr(SMALLEST)


def finish_launch(
    projected: Tensor,
    bias: Tensor | None,
    targets: dict[str, object],
    num_rows: Tensor | None,
    head_norms: Tensor | None = None,
    eps: float | None = None,
) -> Launch:
    """What is left to do after a product made elsewhere: `projected` [parts, T, (N + 2 M) D], contiguous, is added up,
    and there follow bias, norms of heads, RoPE and the writes."""
    parts, rows, outputs = projected.shape
    channels = width = cast(int, targets["D"])
    block = 1024
    if head_norms is not None or targets["pool_scales_ptr"] is not None:
        # A program's tile holds whole heads, each in so many places.
        width = triton.next_power_of_2(channels)
        block = max(block, width)
    arguments = {
        "projected_ptr": projected,
        "bias_ptr": bias,
        "head_norms_ptr": head_norms,
        "eps": None if head_norms is None else eps,
        "num_rows_ptr": num_rows,
        "total_rows": rows,
        **targets,
        "PARTS": parts,
        "WIDTH": width,
        "BLOCK_N": block,
    }
    grid = (rows, triton.cdiv(outputs // channels * width, block))
    least = 0 if targets["pool_scales_ptr"] is None else FP8_CAPABILITY
    return Launch(_finish_kernel, grid, arguments, least_capability=least)


def finish_targets(
    rotations: Tensor, pool: KVPool, entries: Tensor, queries: Tensor, outputs: int
) -> dict[str, object]:
    """The arguments of `finish`, by name."""
    # Read as pairs of float32: Triton has no complex numbers.
    pairs = torch.view_as_real(rotations)
    values, scales = values_and_scales(pool)
    return {
        "rotations_ptr": pairs,
        "rotations_stride": pairs.stride(0),
        "pool_ptr": values,
        "pool_scales_ptr": scales,
        "entries_ptr": entries,
        "entries_stride": entries.stride(0),
        "values_stride": entries.stride(1),
        "queries_ptr": queries,
        "N": outputs,
        "Q": queries.shape[1] * queries.shape[2],
        "D": queries.shape[2],
        "BLOCK_SIZE": pool.shape[2],
    }


@triton.jit
def finish(
    sums,  # [BLOCK_T, BLOCK_N] float32
    rows,
    outputs,  # [BLOCK_N], those from N on are nobody's
    pairs,  # [BLOCK_N // 2], the even ones of them
    has_entries,  # whether a key or a value is among them
    count,
    rotations_ptr,
    rotations_stride,
    pool_ptr,
    pool_scales_ptr,
    entries_ptr,
    entries_stride,
    values_stride,
    queries_ptr,
    N: tl.constexpr,
    Q: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Rotate queries and keys; store queries, keys and values where they belong.

    Where a pool has scales, the tile is one row of whole heads of WIDTH places each, 0 where no output is.
    """
    KV: tl.constexpr = (N - Q) // 2  # channels of all key heads
    rows = rows.to(tl.int64)
    turned = (rows < count)[:, None] & (pairs < Q + KV)[None, :]
    rotations = rotations_ptr + rows[:, None] * rotations_stride + (pairs % D)[None, :]
    cos = tl.load(rotations, mask=turned, other=1.0)
    sin = tl.load(rotations + 1, mask=turned, other=0.0)
    even, odd = tl.split(tl.reshape(sums, (BLOCK_T, BLOCK_N // 2, 2)))
    turned_even, turned_odd = even * cos - odd * sin, even * sin + odd * cos
    out = tl.reshape(tl.join(turned_even, turned_odd), (BLOCK_T, BLOCK_N)).to(queries_ptr.dtype.element_ty)

    live = (rows < count)[:, None]
    is_query = (outputs < Q)[None, :]
    tl.store(queries_ptr + rows[:, None] * Q + outputs[None, :], out, mask=live & is_query)
    if has_entries:
        is_value = (outputs >= Q + KV)[None, :]
        entry_pointers = entries_ptr + rows[:, None] * entries_stride + tl.where(is_value, values_stride, 0)
        is_entry = live & (outputs >= Q)[None, :] & (outputs < N)[None, :]
        entries = tl.load(entry_pointers, mask=is_entry, other=0)
        channels = outputs[None, :] - tl.where(is_value, Q + KV, Q)
        if pool_scales_ptr is not None:
            HEADS: tl.constexpr = BLOCK_N // WIDTH
            heads = tl.reshape(out.to(tl.float32), (HEADS, WIDTH))
            scales = tl.maximum(tl.max(tl.abs(heads), 1), _SMALLEST) / _LARGEST
            # All places of a head have one entry and one head; where no output is stand 0 and KV.
            entry_of = tl.max(tl.reshape(tl.where(is_entry, entries, 0), (HEADS, WIDTH)), 1)
            head_of = tl.min(tl.reshape(tl.where(is_entry, channels // D, KV), (HEADS, WIDTH)), 1)
            first_scales = entry_of // BLOCK_SIZE * (KV // D) * BLOCK_SIZE + entry_of % BLOCK_SIZE
            tl.store(pool_scales_ptr + first_scales + head_of * BLOCK_SIZE, scales, mask=head_of < KV)
            kept = tl.reshape((heads / scales[:, None]).to(pool_ptr.dtype.element_ty), (1, BLOCK_N))
        else:
            kept = out
        tl.store(pool_ptr + entries * KV + channels, kept, mask=is_entry)


@triton.jit(**NOT_SPECIALIZED)
def _finish_kernel(
    projected_ptr,
    bias_ptr,
    head_norms_ptr,
    eps,
    rotations_ptr,
    rotations_stride,
    pool_ptr,
    pool_scales_ptr,
    entries_ptr,
    entries_stride,
    values_stride,
    queries_ptr,
    num_rows_ptr,
    total_rows,
    N: tl.constexpr,
    Q: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    count = live_rows(num_rows_ptr, total_rows)
    if tl.program_id(0) >= count:
        return
    rows = tl.program_id(0) + tl.arange(0, 1)
    first_place = tl.program_id(1) * BLOCK_N
    outputs = _outputs_at(first_place + tl.arange(0, BLOCK_N), N, D, WIDTH)
    sums = added(projected_ptr, rows, outputs, total_rows, PARTS, N)
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + outputs, mask=outputs < N, other=0.0).to(tl.float32)[None, :]
    if head_norms_ptr is not None:
        sums = _norm_heads(sums, outputs, head_norms_ptr, eps, N, Q, D, WIDTH, BLOCK_N)
    pairs = _outputs_at(first_place + 2 * tl.arange(0, BLOCK_N // 2), N, D, WIDTH)
    has_entries = _outputs_at(first_place + BLOCK_N - 1, N, D, WIDTH) >= Q
    finish(
        sums, rows, outputs, pairs, has_entries, count, rotations_ptr, rotations_stride,
        pool_ptr, pool_scales_ptr, entries_ptr, entries_stride, values_stride, queries_ptr,
        N, Q, D, BLOCK_SIZE, WIDTH, 1, BLOCK_N,
    )  # fmt: skip


@triton.jit
def _outputs_at(places, N: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """The output at each place of tiles in which a head has WIDTH >= D places; N where there is none."""
    if WIDTH == D:
        return places
    else:  # noqa: RET505
        return tl.where(places % WIDTH < D, places // WIDTH * D + places % WIDTH, N)


@triton.jit
def _norm_heads(
    sums, outputs, head_norms_ptr, eps,
    N: tl.constexpr, Q: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`sums` [1, BLOCK_N] of whole heads, which are 0 where no output is, with those of queries and keys normed."""
    heads = tl.reshape(sums, (BLOCK_N // WIDTH, WIDTH))
    scale = tl.rsqrt(tl.sum(heads * heads, 1) / D + eps)
    turned = outputs < (Q + N) // 2
    pointers = head_norms_ptr + tl.where(outputs < Q, 0, D) + outputs % D
    weights = tl.load(pointers, mask=turned, other=0.0).to(tl.float32)
    normed = tl.reshape(heads * scale[:, None], (1, BLOCK_N)) * weights[None, :]
    return tl.where(turned[None, :], normed, sums)
