"""Copies entries within the KV pool: what copy-on-skip leaves to be moved. One program an entry."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from d3engine.kernels.kv_pool import KVPool, values_and_scales
from d3engine.kernels.triton.launches import Launch, ModelShape, meta, meta_fp8_pool, row_counts, strided
from d3engine.kernels.triton.product_kernels import NOT_SPECIALIZED, live_rows, wait_for_previous


def copy_entries(pool: KVPool, source: Tensor, target: Tensor, *, num_rows: Tensor | None = None) -> None:
    """Copy entries of `pool` from `source` to `target`, both int64 [n] of flat entries, in place.

    `pool` [num_blocks, 2, block_size, M, D] is contiguous; scales go along. One source may have many targets, but no
    target may be the source of another copy of the call: programs run in any order. `num_rows` int32 [1]: copies at or
    beyond it are left out; None means all.
    """
    if not pool.is_contiguous():
        raise ValueError(f"pool has stride {values_and_scales(pool)[0].stride()}; it must be contiguous")
    copy_launch(pool, source, target, num_rows).run()


def copy_launch(pool: KVPool, source: Tensor, target: Tensor, num_rows: Tensor | None) -> Launch:
    """The launch of the one kernel."""
    channels = pool.shape[3] * pool.shape[4]
    block = min(1024, triton.next_power_of_2(channels))
    values, scales = values_and_scales(pool)
    arguments = {
        "pool_ptr": values if scales is None else values.view(torch.uint8),
        "scales_ptr": scales,
        **strided(source=source, target=target),
        **row_counts(num_rows, source.shape[0]),
        "C": channels,
        "M": pool.shape[3],
        "PADDED_M": triton.next_power_of_2(pool.shape[3]),
        "BLOCK_SIZE": pool.shape[2],
        "BLOCK_C": block,
    }
    return Launch(_copy_kernel, (source.shape[0], triton.cdiv(channels, block)), arguments)


def launches(shape: ModelShape, dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
    """What `kernels/inspect.py` compiles."""
    pool = meta(1024, 2, shape.block_size, shape.num_kv_heads, shape.head_dim, dtype=dtype)
    entries = meta(64, dtype=torch.int64)
    for label, one in (("copy", pool), ("copy of 8 bits", meta_fp8_pool(shape, shape.block_size))):
        yield label, copy_launch(one, entries, entries, meta(1, dtype=torch.int32))


@triton.jit(**NOT_SPECIALIZED)
def _copy_kernel(
    pool_ptr,
    scales_ptr,
    source_ptr,
    source_stride,
    target_ptr,
    target_stride,
    num_rows_ptr,
    total_rows,
    C: tl.constexpr,
    M: tl.constexpr,
    PADDED_M: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    nth = tl.program_id(0)
    if nth >= live_rows(num_rows_ptr, total_rows):
        return
    source = tl.load(source_ptr + nth * source_stride)
    target = tl.load(target_ptr + nth * target_stride)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = channels < C
    tl.store(pool_ptr + target * C + channels, tl.load(pool_ptr + source * C + channels, mask=mask), mask=mask)
    if scales_ptr is not None and tl.program_id(1) == 0:
        heads = tl.arange(0, PADDED_M)
        from_scales = scales_ptr + source // BLOCK_SIZE * M * BLOCK_SIZE + source % BLOCK_SIZE
        to_scales = scales_ptr + target // BLOCK_SIZE * M * BLOCK_SIZE + target % BLOCK_SIZE
        moved = tl.load(from_scales + heads * BLOCK_SIZE, mask=heads < M)
        tl.store(to_scales + heads * BLOCK_SIZE, moved, mask=heads < M)
