"""RMSNorm, the query, key and value projections, RoPE, and the write into the cache: one launch for few rows.

Channels of a pair stand side by side, so any even tile of outputs holds whole pairs, and a head size may be any even
number.

It is two launches where heads have norms of their own, or entries of 8 bits a scale a head: both need whole heads, and
products of few rows are cut finer, to keep all processors loading. It is two as well where queries, keys and values are
matrices of several formats, and where many rows meet so few outputs, of grouped heads, that programs share their
columns. The sums go through memory in float32 (`product_rows.py`), and the second launch takes whole heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from d3engine.kernels.kv_pool import FP8_CAPABILITY, LARGEST, SMALLEST, KVPool, values_and_scales
from d3engine.kernels.low_rank import RowMaps
from d3engine.kernels.matrices import Weight
from d3engine.kernels.triton.launches import (
    ROW_COUNTS,
    Launch,
    ModelShape,
    meta,
    meta_fp8_pool,
    meta_weight,
    row_counts,
    strided,
)
from d3engine.kernels.triton.low_rank import maps_launches
from d3engine.kernels.triton.matmul import matmul_steps
from d3engine.kernels.triton.operations import Step, performed
from d3engine.kernels.triton.product_kernels import (
    FEW_ROWS,
    NOT_SPECIALIZED,
    ProductConfig,
    live_rows,
    prologue,
    tile_product,
    wait_for_previous,
)
from d3engine.kernels.triton.product_rows import added, labelled, product_launches, sums_launches
from d3engine.kernels.triton.products import Tile, need_unit_stride, product_tile
from d3engine.kernels.triton.rms_norm import normed_or_not

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
        # A program's tile holds whole heads, each in `width` places.
        width = triton.next_power_of_2(channels)
        block = max(block, width)
    arguments = {
        "projected_ptr": projected,
        "bias_ptr": bias,
        "head_norms_ptr": head_norms,
        "eps": None if head_norms is None else eps,
        **row_counts(num_rows, rows),
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
    values, scales = values_and_scales(pool)
    return {
        **strided(rotations=torch.view_as_real(rotations)),  # pairs of float32: Triton has no complex numbers
        "pool_ptr": values,
        "pool_scales_ptr": scales,
        **strided(entries=entries),
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
    outputs,  # [BLOCK_N], those from N on belong to no row
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


@triton.jit(**NOT_SPECIALIZED)
def _norm_projections_kernel(
    projected_ptr,
    bias_ptr,
    norms_ptr,
    eps,
    summed_ptr,
    num_rows_ptr,
    total_rows,
    N: tl.constexpr,
    Q: tl.constexpr,
    KEYS_END: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """All queries of a row, all its keys, or all its values: added up, with the bias, and normed but for values."""
    wait_for_previous(PDL)
    if tl.program_id(0) >= live_rows(num_rows_ptr, total_rows):
        return
    kind = tl.program_id(1)
    begin = tl.where(kind == 0, 0, tl.where(kind == 1, Q, KEYS_END))
    end = tl.where(kind == 0, Q, tl.where(kind == 1, KEYS_END, N))
    outputs = begin + tl.arange(0, BLOCK_N)
    outputs = tl.where(outputs < end, outputs, N)
    rows = tl.program_id(0) + tl.arange(0, 1)
    sums = added(projected_ptr, rows, outputs, total_rows, PARTS, N)
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + outputs, mask=outputs < N, other=0.0).to(tl.float32)[None, :]
    if kind < 2:
        weights = tl.load(norms_ptr + outputs, mask=outputs < KEYS_END, other=0.0).to(tl.float32)
        sums *= tl.rsqrt(tl.sum(sums * sums, 1) / (end - begin) + eps)[:, None] * weights[None, :]
    pointers = summed_ptr + rows.to(tl.int64)[:, None] * N + outputs[None, :]
    tl.store(pointers, sums, mask=(outputs < N)[None, :])


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


@performed
def qkv(
    hidden: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Weight,
    bias: Tensor | None,
    rotations: Tensor,
    pool: KVPool,
    entries: Tensor,
    num_heads: int,
    *,
    head_norms: Tensor | None = None,
    projection_norms: Tensor | None = None,
    maps: RowMaps | None = None,
    num_rows: Tensor | None = None,
    batch_invariant: bool = False,
) -> tuple[Tensor, Sequence[Step]]:
    """RMSNorm, the three projections, RoPE, and the write of keys and values into the pool; see `reference.py`.

    The pool is contiguous, and so are `head_norms` and `projection_norms`, which are never given together. All but
    rotations, entries, a quantized weight and a pool in 8 bits are of one dtype. `num_rows` int32 [1]: rows at or
    beyond it write nothing, and their queries are undefined; None means all rows. `batch_invariant`: as for
    `product_tile`. Products, scale, bias and rotation are float32, and rounded once; `reference.py` rounds after each.
    """
    need_unit_stride(hidden=hidden, norm_weight=norm_weight, weight=weight, bias=bias, rotations=rotations)
    if not pool.is_contiguous():
        raise ValueError(f"pool has stride {values_and_scales(pool)[0].stride()}; it must be contiguous")
    rows = hidden.shape[0]
    queries = torch.empty(rows, num_heads, pool.shape[4], dtype=hidden.dtype, device=hidden.device)
    targets = finish_targets(rotations, pool, entries, queries, weight.shape[0])
    may_split = batch_invariant or rows > FEW_ROWS.value
    tile = product_tile(rows, weight, hidden.dtype, may_split=may_split, batch_invariant=batch_invariant)
    if tile is not None:
        return queries, qkv_launches(
            tile, hidden, norm_weight, eps, weight, bias, targets, num_rows, head_norms, projection_norms, maps
        )
    x, norm = normed_or_not(hidden, norm_weight, eps, num_rows)
    projected, steps = matmul_steps(x, weight, bias)
    added = [] if maps is None else maps_launches(x, maps, projected, num_rows)
    ends = finish_launches(projected[None], None, targets, num_rows, head_norms, projection_norms, eps)
    return queries, [*norm, *steps, *added, *ends]


def qkv_launches(
    tile: Tile,
    hidden: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Weight,
    bias: Tensor | None,
    targets: dict[str, object],
    num_rows: Tensor | None,
    head_norms: Tensor | None,
    projection_norms: Tensor | None,
    maps: RowMaps | None = None,
) -> list[Launch]:
    """Everything in one kernel, or in two if the tile has parts or heads have norms; and what its rows need before.

    Norms of whole projections take a kernel more, and maps two or three.
    """
    norm = norm_weight, eps
    has_norms = head_norms is not None or projection_norms is not None
    is_whole = tile.parts == 1 and not tile.stack
    if is_whole and not has_norms and maps is None and targets["pool_scales_ptr"] is None:
        return product_launches(
            _product_kernel, tile, hidden, weight, num_rows, norm=norm, bias_ptr=bias, **targets
        )  # fmt: skip
    sums, launches = sums_launches(tile, hidden, weight, num_rows, norm=norm)
    if maps is not None:
        x, before = normed_or_not(hidden, norm_weight, eps, num_rows)
        launches += [*before, *maps_launches(x, maps, sums[0], num_rows)]
    return [*launches, *finish_launches(sums, bias, targets, num_rows, head_norms, projection_norms, eps)]


def finish_launches(
    projected: Tensor,
    bias: Tensor | None,
    targets: dict[str, object],
    num_rows: Tensor | None,
    head_norms: Tensor | None,
    projection_norms: Tensor | None,
    eps: float,
) -> list[Launch]:
    """`finish_launch`, and before it norms of whole projections: a program of it does not see a whole row."""
    if projection_norms is None:
        return [finish_launch(projected, bias, targets, num_rows, head_norms, eps)]
    parts, rows, outputs = projected.shape
    summed = torch.empty(1, rows, outputs, dtype=torch.float32, device=projected.device)
    keys_end = projection_norms.shape[0]
    arguments = {
        "projected_ptr": projected,
        "bias_ptr": bias,
        "norms_ptr": projection_norms,
        "eps": eps,
        "summed_ptr": summed,
        **row_counts(num_rows, rows),
        "N": outputs,
        "Q": targets["Q"],
        "KEYS_END": keys_end,
        "PARTS": parts,
        "BLOCK_N": triton.next_power_of_2(max(cast(int, targets["Q"]), outputs - keys_end)),
    }
    norms = Launch(_norm_projections_kernel, (rows, 3), arguments, num_warps=8)
    return [norms, finish_launch(summed, None, targets, num_rows, None, eps)]


def launches(
    shape: ModelShape, dtype: torch.dtype, weights: str, batch_invariant: bool = False
) -> Iterator[tuple[str, Launch]]:
    """What `kernels/inspect.py` compiles."""
    head_dim, hidden_size = shape.head_dim, shape.hidden_size
    outputs = (shape.num_heads + 2 * shape.num_kv_heads) * head_dim
    norm, weight = meta(hidden_size, dtype=dtype), meta_weight(outputs, hidden_size, dtype=dtype, weights=weights)
    bias = meta(outputs, dtype=dtype) if shape.bias else None
    head_norms = meta(2, head_dim, dtype=dtype) if shape.head_norms else None
    normed_outputs = (shape.num_heads + shape.num_kv_heads) * head_dim
    projection_norms = meta(normed_outputs, dtype=dtype) if shape.projection_norms else None
    norms = head_norms, projection_norms
    pool = meta(1024, 2, shape.block_size, shape.num_kv_heads, head_dim, dtype=dtype)
    num_rows = meta(1, dtype=torch.int32)

    def targets_of(rows: int, pool: KVPool) -> dict[str, object]:
        rotations, entries = meta(rows, head_dim // 2, dtype=torch.complex64), meta(rows, 2, dtype=torch.int64)
        return finish_targets(rotations, pool, entries, meta(rows, shape.num_heads, head_dim, dtype=dtype), outputs)

    for rows in (*ROW_COUNTS, 512):
        targets = targets_of(rows, pool)
        may_split = batch_invariant or rows > FEW_ROWS.value
        tile = product_tile(rows, weight, dtype, may_split=may_split, batch_invariant=batch_invariant)
        if tile is None:
            projected = meta(1, rows, outputs, dtype=dtype)
            yield from labelled(finish_launches(projected, None, targets, num_rows, *norms, 1e-5), "", rows)
        else:
            hidden = meta(rows, hidden_size, dtype=dtype)
            found = qkv_launches(tile, hidden, norm, 1e-5, weight, bias, targets, num_rows, *norms)
            yield from labelled(found, "", rows)
    if dtype != torch.float32:
        targets = targets_of(64, meta_fp8_pool(shape, shape.block_size))
        sums = meta(1, 64, outputs, dtype=torch.float32)
        yield "finish, into 8 bits", finish_launch(sums, bias, targets, num_rows, head_norms, 1e-5)


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
    K: tl.constexpr,
    N: tl.constexpr,
    Q: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    first_output = tl.program_id(1) * BLOCK_N
    outputs = first_output + tl.arange(0, BLOCK_N)
    valid_outputs = tl.minimum(outputs, N - 1)
    CONFIG: tl.constexpr = ProductConfig(K, BLOCK_T, BLOCK_N, BLOCK_K, WEIGHTS_FIRST, STAGES, PDL, SCALES_STRIDE, TYPE)
    first, count = prologue(weight_ptr, weight_stride, valid_outputs, 0, num_rows_ptr, total_rows, CONFIG)
    if tl.program_id(0) * BLOCK_T >= count:
        return
    rows, sums = tile_product(
        x_ptr, x_stride, count, norm_ptr, eps, weight_ptr, weight_stride, scales_ptr, valid_outputs, CONFIG, first,
    )  # fmt: skip
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + outputs, mask=outputs < N, other=0.0).to(tl.float32)[None, :]
    pairs = first_output + 2 * tl.arange(0, BLOCK_N // 2)
    finish(
        sums, rows, outputs, pairs, first_output + BLOCK_N > Q, count, rotations_ptr, rotations_stride,
        pool_ptr, None, entries_ptr, entries_stride, values_stride, queries_ptr,
        N, Q, D, BLOCK_SIZE, D, BLOCK_T, BLOCK_N,
    )  # fmt: skip
