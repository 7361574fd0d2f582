"""Low-rank maps (LoRA) of rows: each row of a product gains what the maps of its adapter make of it.

A program takes neighbouring rows and goes through the adapters that are among them, the rows of one at a time: prompts
have one, and a decode step as many as its requests. A row's numbers depend on its own values alone. Where maps are is
read from a table on the device, so a captured graph serves any adapters.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from d3engine.kernels.low_rank import PADDED_TO, RowMaps
from d3engine.kernels.triton.launches import ROW_COUNTS, Launch, ModelShape, meta, row_counts, strided
from d3engine.kernels.triton.product_kernels import NOT_SPECIALIZED, live_rows, wait_for_previous

BLOCK_ROWS = 16
"""Rows of a program: what tensor cores take at least."""
BLOCK_COLUMNS, MOST_SPLITS = 64, 16
"""Columns of a round, and programs that share those of a row: one for each eight rounds. The ranks are few outputs, and
one program alone would take long over the columns."""

_PADDED_TO: tl.constexpr = tl.constexpr(PADDED_TO)
_INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


def maps_launches(x: Tensor, maps: RowMaps, target: Tensor, num_rows: Tensor | None) -> list[Launch]:
    """Add to `target` [T, N], contiguous along rows, what `maps` make of `x` [T, K].

    Maps have the dtype of `x`; sums are float32. `num_rows` int32 [1]: rows at or beyond it stay as they are.
    """
    rows, columns = x.shape
    adapters, table = maps.tensors
    ranks = max(16, triton.next_power_of_2(maps.most))
    splits = min(MOST_SPLITS, triton.cdiv(columns, 8 * BLOCK_COLUMNS))
    inner = torch.empty(splits, rows, len(maps.stops), ranks, dtype=torch.float32, device=x.device)
    common = {
        "adapters_ptr": adapters,
        **strided(table=table),
        "inner_ptr": inner,
        **row_counts(num_rows, rows),
        "PARTS": len(maps.stops),
        "RANKS": ranks,
        "SPLITS": splits,
        "BLOCK_T": BLOCK_ROWS,
    }
    row_tiles = triton.cdiv(rows, BLOCK_ROWS)
    first, second, *_ = (*maps.stops, maps.stops[-1], maps.stops[-1])
    down = {**common, **strided(x=x), "K": columns, "BLOCK_K": BLOCK_COLUMNS}
    up = {
        **common,
        "like_ptr": x,
        **strided(target=target),
        "FIRST": first,
        "SECOND": second,
        "N": maps.stops[-1],
        "BLOCK_N": 64,
    }
    return [
        Launch(_down_kernel, (row_tiles, len(maps.stops), splits), down),
        # Left alone, ptxas saves registers on Blackwell, and spills.
        Launch(_up_kernel, (row_tiles, triton.cdiv(maps.stops[-1], 64)), up, options={"maxnreg": 128}),
    ]


def launches(shape: ModelShape, dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
    """What `kernels/inspect.py` compiles."""
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    hidden, inner = shape.hidden_size, shape.intermediate_size
    sizes = {
        "qkv": (hidden, (q_size, q_size + kv_size, q_size + 2 * kv_size), torch.float32),
        "output": (q_size, (hidden,), dtype),
        "gate_up": (hidden, (inner, 2 * inner), torch.float32),
        "down": (inner, (hidden,), dtype),
    }
    num_rows = meta(1, dtype=torch.int32)
    for rows in ROW_COUNTS[:2]:
        for matrix, (columns, stops, target) in sizes.items():
            table = meta(8, len(stops), 3, dtype=torch.int64)
            maps = RowMaps(meta(rows, dtype=torch.int32), lambda number: None, stops, table, 16)
            x, sums = meta(rows, columns, dtype=dtype), meta(rows, stops[-1], dtype=target)
            for name, launch in zip(("down", "up"), maps_launches(x, maps, sums, num_rows), strict=True):
                yield f"{matrix}, {name} rows={rows}", launch


@triton.jit(**NOT_SPECIALIZED)
def _down_kernel(
    x_ptr,
    x_stride,
    adapters_ptr,
    table_ptr,
    table_stride,
    inner_ptr,
    num_rows_ptr,
    total_rows,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    count = live_rows(num_rows_ptr, total_rows)
    first = tl.program_id(0) * BLOCK_T
    if first >= count:
        return
    STRIDE: tl.constexpr = ((K + _PADDED_TO - 1) // _PADDED_TO + 1) * _PADDED_TO
    SPLIT_K: tl.constexpr = (K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    part, split = tl.program_id(1), tl.program_id(2)
    rows = first + tl.arange(0, BLOCK_T)
    ranks = tl.arange(0, RANKS)
    left = tl.load(adapters_ptr + rows, mask=rows < count, other=-1)
    found = tl.zeros((BLOCK_T, RANKS), tl.float32)
    number = tl.max(left, 0)
    while number >= 0:
        own = left == number
        entry = table_ptr + number.to(tl.int64) * table_stride + part * 3
        down = tl.load(entry).to(tl.pointer_type(x_ptr.dtype.element_ty))
        rank = tl.load(entry + 2)
        sums = tl.zeros((BLOCK_T, RANKS), tl.float32)
        for column in range(0, SPLIT_K, BLOCK_K):
            columns = split * SPLIT_K + column + tl.arange(0, BLOCK_K)
            inside = columns < K
            x = tl.load(
                x_ptr + rows.to(tl.int64)[:, None] * x_stride + columns[None, :],
                mask=own[:, None] & inside[None, :],
                other=0.0,
            )
            weights = tl.load(
                down + ranks.to(tl.int64)[:, None] * STRIDE + columns[None, :],
                mask=(ranks < rank)[:, None] & inside[None, :],
                other=0.0,
            )
            if _INTERPRETED:  # its products of bfloat16 are wrong
                x, weights = x.to(tl.float32), weights.to(tl.float32)
            sums = tl.dot(x, tl.trans(weights), sums, input_precision="ieee")
        found = tl.where(own[:, None], sums, found)
        left = tl.where(own, -1, left)
        number = tl.max(left, 0)
    places = ((split * total_rows + rows).to(tl.int64) * PARTS + part)[:, None] * RANKS + ranks[None, :]
    tl.store(inner_ptr + places, found, mask=(rows < count)[:, None])


@triton.jit(**NOT_SPECIALIZED)
def _up_kernel(
    like_ptr,  # its type is that of maps
    adapters_ptr,
    table_ptr,
    table_stride,
    inner_ptr,
    target_ptr,
    target_stride,
    num_rows_ptr,
    total_rows,
    FIRST: tl.constexpr,  # where the outputs of the first part end, and those of the second
    SECOND: tl.constexpr,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    count = live_rows(num_rows_ptr, total_rows)
    first = tl.program_id(0) * BLOCK_T
    if first >= count:
        return
    rows = first + tl.arange(0, BLOCK_T)
    ranks = tl.arange(0, RANKS)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    adapters = tl.load(adapters_ptr + rows, mask=rows < count, other=-1)
    left = adapters
    found = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    number = tl.max(left, 0)
    while number >= 0:
        own = left == number
        sums = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
        entry = table_ptr + number.to(tl.int64) * table_stride
        given = (entry, inner_ptr, like_ptr, total_rows, rows, own, ranks, outputs)
        sums = _part_sums(sums, given, 0, 0, FIRST, PARTS, RANKS, SPLITS, BLOCK_N)
        if PARTS > 1:
            sums = _part_sums(sums, given, 1, FIRST, SECOND, PARTS, RANKS, SPLITS, BLOCK_N)
        if PARTS > 2:
            sums = _part_sums(sums, given, 2, SECOND, N, PARTS, RANKS, SPLITS, BLOCK_N)
        found = tl.where(own[:, None], sums, found)
        left = tl.where(own, -1, left)
        number = tl.max(left, 0)
    pointers = target_ptr + rows.to(tl.int64)[:, None] * target_stride + outputs[None, :]
    mask = (adapters >= 0)[:, None] & (outputs < N)[None, :]
    found += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    tl.store(pointers, found.to(target_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _part_sums(
    sums,
    given,
    PART: tl.constexpr,
    BEGIN: tl.constexpr,  # its outputs
    END: tl.constexpr,
    PARTS: tl.constexpr,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """`sums` [rows, outputs] and what the map of one part adds to the rows of one adapter."""
    STRIDE: tl.constexpr = ((END - BEGIN + _PADDED_TO - 1) // _PADDED_TO + 1) * _PADDED_TO
    PARTS_OF_ROW: tl.constexpr = PARTS * RANKS
    entry, inner_ptr, like_ptr, total_rows, rows, own, ranks, outputs = given
    rank = tl.load(entry + PART * 3 + 2)
    first = tl.program_id(1) * BLOCK_N
    if (rank > 0) & (first < END) & (first + BLOCK_N > BEGIN):
        up = tl.load(entry + PART * 3 + 1).to(tl.pointer_type(like_ptr.dtype.element_ty))
        inside = (outputs >= BEGIN) & (outputs < END)
        weights = tl.load(
            up + ranks.to(tl.int64)[:, None] * STRIDE + (outputs - BEGIN)[None, :],
            mask=(ranks < rank)[:, None] & inside[None, :],
            other=0.0,
        )
        inner = tl.zeros((rows.shape[0], RANKS), tl.float32)
        for split in tl.static_range(SPLITS):
            places = (split * total_rows + rows).to(tl.int64)[:, None] * PARTS_OF_ROW + (PART * RANKS + ranks)[None, :]
            inner += tl.load(inner_ptr + places, mask=own[:, None], other=0.0)
        sums = tl.dot(inner, weights.to(tl.float32), sums, input_precision="ieee")
    return sums
