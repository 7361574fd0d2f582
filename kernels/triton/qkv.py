"""RMSNorm, the query, key and value projections, RoPE, and the write into the cache: one launch for few rows.

Channels of a pair stand side by side, so any even tile of outputs holds whole pairs: a tile needs to know nothing of
heads, and a head size may be any even number.

Where heads have norms of their own it is two: a norm needs a whole head, and products of few rows are cut finer than
that, to keep all processors loading. So does the scale of a head whose entries have 8 bits. The sums go through memory
in float32 (`product_sums.py`), and the second launch takes whole heads. So it is where many rows meet so few outputs,
of grouped heads, that programs share their columns. What follows the products is in `qkv_finish.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from d3engine.kernels.kv_pool import KVPool, values_and_scales
from d3engine.kernels.matrices import Weight
from d3engine.kernels.triton.launches import ROW_COUNTS, Launch, ModelShape, meta, meta_fp8_pool, meta_weight
from d3engine.kernels.triton.matmul import matmul_steps
from d3engine.kernels.triton.operations import Step, performed
from d3engine.kernels.triton.product_kernels import FEW_ROWS, NOT_SPECIALIZED, prologue, tile_product
from d3engine.kernels.triton.product_rows import labelled, product_launches
from d3engine.kernels.triton.product_sums import sums_launches
from d3engine.kernels.triton.products import Tile, need_unit_stride, product_tile
from d3engine.kernels.triton.qkv_finish import finish, finish_launch, finish_targets
from d3engine.kernels.triton.rms_norm import normed


@performed
def qkv(
    hidden: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Weight,
    bias: Tensor | None,
    rotations: Tensor,
    pool: KVPool,
    entries: Tensor,
    num_heads: int,
    *,
    head_norms: Tensor | None = None,
    num_rows: Tensor | None = None,
    batch_invariant: bool = False,
) -> tuple[Tensor, Sequence[Step]]:
    """RMSNorm, the three projections, RoPE, and the write of keys and values into the pool.

    `hidden` [T, H], `weight` [(N + 2 M) D, H], `bias` [(N + 2 M) D] or None, `rotations` [T, D / 2] complex64,
    `pool` [num_blocks, 2, block_size, M, D] (written, contiguous; maybe in 8 bits), `entries` [T, 2] int64: where each
    row's key and value go. `head_norms` [2, D] contiguous: weights of an RMSNorm with the same `eps` over each head
    before RoPE, the first for queries, the second for keys; None means none. Returns the queries [T, N, D]. All but
    rotations, entries, a quantized weight and a pool in 8 bits are of one dtype.
    `num_rows` int32 [1]: rows at or beyond it write nothing, and their queries are undefined; None means all rows.
    `batch_invariant`: as for `product_tile`.

    Products, scale, bias and rotation are float32, and rounded once; `reference.py` rounds after each.
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
        return queries, qkv_launches(tile, hidden, norm_weight, eps, weight, bias, targets, num_rows, head_norms)
    x, norm = normed(hidden, norm_weight, eps, num_rows)
    projected, steps = matmul_steps(x, weight, bias)
    return queries, [norm, *steps, finish_launch(projected[None], None, targets, num_rows, head_norms, eps)]


def qkv_launches(
    tile: Tile,
    hidden: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Weight,
    bias: Tensor | None,
    targets: dict[str, object],
    num_rows: Tensor | None,
    head_norms: Tensor | None,
) -> list[Launch]:
    """Everything in one kernel, or in two if the tile has parts or heads have norms; and what its rows need before."""
    norm = norm_weight, eps
    if tile.parts == 1 and head_norms is None and targets["pool_scales_ptr"] is None:
        return product_launches(
            _product_kernel, tile, hidden, weight, num_rows, norm=norm, bias_ptr=bias, **targets
        )  # fmt: skip
    sums, launches = sums_launches(tile, hidden, weight, num_rows, norm=norm)
    return [*launches, finish_launch(sums, bias, targets, num_rows, head_norms, eps)]


def launches(
    shape: ModelShape, dtype: torch.dtype, weights: str, batch_invariant: bool = False
) -> Iterator[tuple[str, Launch]]:
    """What `kernels/inspect.py` compiles."""
    head_dim, hidden_size = shape.head_dim, shape.hidden_size
    outputs = (shape.num_heads + 2 * shape.num_kv_heads) * head_dim
    norm, weight = meta(hidden_size, dtype=dtype), meta_weight(outputs, hidden_size, dtype=dtype, weights=weights)
    bias = meta(outputs, dtype=dtype) if shape.bias else None
    head_norms = meta(2, head_dim, dtype=dtype) if shape.head_norms else None
    pool = meta(1024, 2, shape.block_size, shape.num_kv_heads, head_dim, dtype=dtype)
    num_rows = meta(1, dtype=torch.int32)
    for rows in (*ROW_COUNTS, 512):
        targets = finish_targets(
            meta(rows, head_dim // 2, dtype=torch.complex64),
            pool,
            meta(rows, 2, dtype=torch.int64),
            meta(rows, shape.num_heads, head_dim, dtype=dtype),
            outputs,
        )
        may_split = batch_invariant or rows > FEW_ROWS.value
        tile = product_tile(rows, weight, dtype, may_split=may_split, batch_invariant=batch_invariant)
        if tile is None:
            projected = meta(1, rows, outputs, dtype=dtype)
            yield f"finish rows={rows}", finish_launch(projected, None, targets, num_rows, head_norms, 1e-5)
        else:
            hidden = meta(rows, hidden_size, dtype=dtype)
            found = qkv_launches(tile, hidden, norm, 1e-5, weight, bias, targets, num_rows, head_norms)
            yield from labelled(found, "", rows)
    if dtype != torch.float32:
        targets = finish_targets(
            meta(64, head_dim // 2, dtype=torch.complex64),
            meta_fp8_pool(shape, shape.block_size),
            meta(64, 2, dtype=torch.int64),
            meta(64, shape.num_heads, head_dim, dtype=dtype),
            outputs,
        )
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
    first, count = prologue(weight_ptr, weight_stride, valid_outputs, 0, num_rows_ptr, total_rows, K, BLOCK_K, PDL)
    if tl.program_id(0) * BLOCK_T >= count:
        return
    rows, sums = tile_product(
        x_ptr, x_stride, count, norm_ptr, eps,
        weight_ptr, weight_stride, scales_ptr, SCALES_STRIDE, valid_outputs,
        K, BLOCK_T, BLOCK_N, BLOCK_K, WEIGHTS_FIRST, STAGES, PDL, first,
    )  # fmt: skip
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + outputs, mask=outputs < N, other=0.0).to(tl.float32)[None, :]
    pairs = first_output + 2 * tl.arange(0, BLOCK_N // 2)
    finish(
        sums, rows, outputs, pairs, first_output + BLOCK_N > Q, count, rotations_ptr, rotations_stride,
        pool_ptr, None, entries_ptr, entries_stride, values_stride, queries_ptr,
        N, Q, D, BLOCK_SIZE, D, BLOCK_T, BLOCK_N,
    )  # fmt: skip
