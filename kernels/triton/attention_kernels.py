"""The device code of `paged_attention.py`: two kernels, and the loop over entries that they share.

Chunks of one row ("single rows": decoded tokens) are a matter of bandwidth, so their entries are dealt out to all
programs (`single_rows_kernel`; how, is in `attention_splits.py`); longer chunks go query tile by query tile
(`long_chunks_kernel`). Both compute softmax online in float32 and base 2, so `scale` comes multiplied by log2(e).
Letters are the reference's: T rows, C chunks, N query heads, M key/value heads, D channels per head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from d3engine.kernels.triton.attention_splits import combine_parts, entries_a_split, find_split
from d3engine.kernels.triton.attention_tiles import load_scales, load_tile, normalized, tile_blocks
from d3engine.kernels.triton.product_kernels import wait_for_previous
from d3engine.kernels.triton.small_values import fp8_values

# Values that differ between steps, and views that begin anywhere, must not make a new variant of a kernel: it would
# compile in the middle of serving, or of a capture.
_NOT_SPECIALIZED = ["table_stride", "num_chunks"]
_NOT_ALIGNED = ["query_starts", "kv_lengths", "block_tables", "num_rows"]

# The running maximum begins at a finite floor: -inf would turn a row that has seen nothing into inf - inf.
_FLOOR = tl.constexpr(-1e38)

# Powers of two by which weights are larger that are multiplied with scales of 8-bit values, in half precision.
_LIFT = tl.constexpr(8.0)


@triton.jit
def _attend_tiles(
    attended,
    peak,
    total,
    queries,
    limits,
    pool,
    scales,
    table,
    begin,
    end,
    scale,
    KV_HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PADDED_CHANNELS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Online softmax of `queries` [rows, D] over entries [begin, end), a row only over those below its `limits`.

    Takes and returns the state: `attended` [rows, D], the maximum `peak` [rows] and the sum of weights `total` [rows].
    `scale` [rows], above 0, is what a row's products are multiplied by. Without MASKED the caller promises whole tiles
    that every row may see. Products are of the dtype of `queries`. Scales of values go to the weights, and so that
    float16 can tell these apart, `peak` lies _LIFT below the maximum then.
    """
    LIFT: tl.constexpr = 0.0 if scales is None else _LIFT
    for start in tl.range(begin, end, TILE):
        blocks = tile_blocks(table, start, end, BLOCK_SIZE, TILE, MASKED)
        keys = load_tile(pool, blocks, start, end, KV_HEADS, CHANNELS, PADDED_CHANNELS, BLOCK_SIZE, TILE, MASKED, False)
        if scales is not None:
            keys = fp8_values(keys, queries.dtype)
        scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee")
        if scales is not None:
            scores *= load_scales(scales, blocks, start, end, KV_HEADS, BLOCK_SIZE, TILE, MASKED, False)[None, :]
        if MASKED:
            seen = (start + tl.arange(0, TILE))[None, :] < limits[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        # The largest score is scaled by itself: then a weight takes a multiply-add and a power.
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale - LIFT)
        decay = tl.exp2(peak - new_peak)
        weights = tl.exp2(scores * scale[:, None] - new_peak[:, None])
        total = total * decay + tl.sum(weights, 1)
        if scales is not None:
            weights *= load_scales(scales, blocks, start, end, KV_HEADS, BLOCK_SIZE, TILE, MASKED, True)[None, :]
        values = load_tile(
            pool, blocks, start, end, KV_HEADS, CHANNELS, PADDED_CHANNELS, BLOCK_SIZE, TILE, MASKED, True
        )
        if scales is not None:
            values = fp8_values(values, queries.dtype)
        values = values.to(queries.dtype)
        attended = tl.dot(weights.to(values.dtype), values, attended * decay[:, None], input_precision="ieee")
        peak = new_peak
    return attended, peak, total


@triton.jit
def _attend_entries(
    queries,
    pool,
    scales,
    table,
    begin,
    end,
    scale,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PADDED_CHANNELS: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One row's heads of a group over entries [begin, end): the result [PADDED_GROUP, D], and its weight.

    `queries` points at the group's first head. The weight [PADDED_GROUP] is the base-2 logarithm of the sum of
    exponentials.
    """
    channels = tl.arange(0, PADDED_CHANNELS)
    if GROUP == 1:
        # No other head shares these entries, so a matrix product would fill one row of sixteen: multiply and sum.
        # Each lane of the tile keeps a softmax of its own over the entries it meets; the lanes meet once, at the end,
        # and the loop has no reduction that crosses warps.
        query = tl.load(queries + channels, mask=channels < CHANNELS, other=0.0).to(tl.float32) * scale
        peak = tl.full([TILE], _FLOOR, tl.float32)
        total = tl.zeros([TILE], tl.float32)
        attended = tl.zeros([TILE, PADDED_CHANNELS], tl.float32)
        blocks = tile_blocks(table, begin, end, BLOCK_SIZE, TILE, True)
        for start in tl.range(begin, end, TILE, num_stages=STAGES):  # the launch's own leave out what no dot reads
            next_blocks = tile_blocks(table, start + TILE, end, BLOCK_SIZE, TILE, True)  # a load less to wait for
            keys = load_tile(
                pool, blocks, start, end, KV_HEADS, CHANNELS, PADDED_CHANNELS, BLOCK_SIZE, TILE, True, False
            )
            values = load_tile(
                pool, blocks, start, end, KV_HEADS, CHANNELS, PADDED_CHANNELS, BLOCK_SIZE, TILE, True, True
            )
            if scales is not None:
                key_scales = load_scales(scales, blocks, start, end, KV_HEADS, BLOCK_SIZE, TILE, True, False)
                value_scales = load_scales(scales, blocks, start, end, KV_HEADS, BLOCK_SIZE, TILE, True, True)
            scores = tl.sum(keys.to(tl.float32) * query[None, :], 1)
            if scales is not None:
                scores *= key_scales
            scores = tl.where(start + tl.arange(0, TILE) < end, scores, float("-inf"))
            new_peak = tl.maximum(peak, scores)
            decay = tl.exp2(peak - new_peak)
            weights = tl.exp2(scores - new_peak)
            total = total * decay + weights
            if scales is not None:
                weights *= value_scales
            attended = attended * decay[:, None] + weights[:, None] * values.to(tl.float32)
            peak = new_peak
            blocks = next_blocks
        top = tl.max(peak, 0)
        share = tl.exp2(peak - top)
        mass = tl.sum(total * share, 0)
        result = (tl.sum(attended * share[:, None], 0) / tl.where(mass > 0.0, mass, 1.0))[None, :]
        weight = tl.zeros([1], tl.float32) + top + tl.log2(mass)
    else:
        heads = tl.arange(0, PADDED_GROUP)
        valid = (heads < GROUP)[:, None] & (channels < CHANNELS)[None, :]
        packed = tl.load(queries + heads[:, None] * CHANNELS + channels[None, :], mask=valid, other=0.0)
        if UPCAST:
            packed = packed.to(tl.float32)
        row_scales = tl.zeros([PADDED_GROUP], tl.float32) + scale
        if scales is not None:
            packed, largest = normalized(packed)
            row_scales *= largest
        peak = tl.full([PADDED_GROUP], _FLOOR, tl.float32)
        total = tl.zeros([PADDED_GROUP], tl.float32)
        attended = tl.zeros([PADDED_GROUP, PADDED_CHANNELS], tl.float32)
        limits = tl.zeros([PADDED_GROUP], tl.int32) + end
        attended, peak, total = _attend_tiles(
            attended, peak, total, packed, limits, pool, scales, table, begin, end, row_scales,
            KV_HEADS, CHANNELS, PADDED_CHANNELS, BLOCK_SIZE, TILE, True,
        )  # fmt: skip
        result = attended / tl.where(total > 0.0, total, 1.0)[:, None]
        weight = peak + tl.log2(total)
    return result, weight


@triton.jit(do_not_specialize=_NOT_SPECIALIZED, do_not_specialize_on_alignment=_NOT_ALIGNED)
def single_rows_kernel(
    queries,
    pool,
    scales,
    out,
    parts,
    log_totals,
    arrived,
    query_starts,
    kv_lengths,
    block_tables,
    num_rows,
    query_stride,
    table_stride,
    num_chunks,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PADDED_CHANNELS: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Every chunk of one row: the splits of all of them, by key/value head, are dealt out to the programs there are.

    A row of one split goes to `out` [T, N D] at once. Of others each split leaves its part and its weight, in `parts`
    float32 [splits, N, D] and `log_totals` float32 [splits, N], and counts itself in `arrived` int32 [C, M]: who comes
    last puts the parts together, and leaves a zero there.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    wait_for_previous(PDL)
    active = tl.load(num_rows).to(tl.int32)
    heads = tl.arange(0, PADDED_GROUP)
    channels = tl.arange(0, PADDED_CHANNELS)
    cells = heads[:, None] * CHANNELS + channels[None, :]
    valid = (heads < GROUP)[:, None] & (channels < CHANNELS)[None, :]
    work = tl.program_id(0)
    all_work = work + 1  # at least; the first look tells
    while work < all_work:
        nth = work // KV_HEADS
        first_head = (work % KV_HEADS) * GROUP
        chunk, split, all_splits = find_split(nth, query_starts, kv_lengths, num_chunks, active, SPLIT, MOST_SPLITS)
        all_work = all_splits * KV_HEADS
        if work < all_work:
            row = tl.load(query_starts + chunk).to(tl.int64)
            kv_length = tl.load(kv_lengths + chunk).to(tl.int32)
            size = entries_a_split(kv_length, SPLIT, MOST_SPLITS)
            result, weight = _attend_entries(
                queries + row * query_stride + first_head * CHANNELS,
                pool + (work % KV_HEADS) * CHANNELS,
                None if scales is None else scales + (work % KV_HEADS) * BLOCK_SIZE,
                block_tables + chunk.to(tl.int64) * table_stride,
                split * size, tl.minimum((split + 1) * size, kv_length), scale,
                GROUP, KV_HEADS, CHANNELS, PADDED_CHANNELS, PADDED_GROUP, BLOCK_SIZE, TILE, STAGES, UPCAST,
            )  # fmt: skip
            target = out + (row * HEADS + first_head) * CHANNELS
            if size >= kv_length:
                tl.store(target + cells, result.to(out.dtype.element_ty), mask=valid)
            else:
                states = nth.to(tl.int64) * HEADS + first_head
                tl.store(parts + states * CHANNELS + cells, result, mask=valid)
                tl.store(log_totals + states + heads, weight, mask=heads < GROUP)
                tl.debug_barrier()  # all warps have stored, before one thread says so
                splits = tl.cdiv(kv_length, size)
                counter = arrived + chunk * KV_HEADS + work % KV_HEADS
                if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1:
                    first = (nth - split).to(tl.int64) * HEADS + first_head
                    for head in range(GROUP):
                        combine_parts(
                            target + head * CHANNELS, parts + (first + head) * CHANNELS, log_totals + first + head,
                            splits, HEADS, CHANNELS, PADDED_CHANNELS,
                        )  # fmt: skip
                    tl.store(counter, 0)
        work += tl.num_programs(0)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED, do_not_specialize_on_alignment=_NOT_ALIGNED)
def long_chunks_kernel(
    queries,
    pool,
    scales,
    out,
    query_starts,
    kv_lengths,
    block_tables,
    num_rows,
    query_stride,
    table_stride,
    num_chunks,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PADDED_CHANNELS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PACKED_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BATCH_INVARIANT: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One query tile of a chunk of two rows or more, for one key/value head: program (tile, kv head).

    With BATCH_INVARIANT it is that of a chunk of any number of rows, unless its length is 0.

    The heads of a group share entries, so a tile packs them: PACKED_ROWS // GROUP rows times GROUP heads. Chunk c owns
    the tiles from starts[c] // rows + c on: enough for every chunk, at most one too many each, and whose tile this is
    can be found on the device, without a list from the host.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    ROWS: tl.constexpr = PACKED_ROWS // GROUP
    SEARCH: tl.constexpr = 128
    wait_for_previous(PDL)
    # The last tiles of a chunk see most entries: begin with them, and the short ones fill the gaps at the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)

    chunk = -1  # the last chunk whose first tile is not behind this one
    for first in range(0, num_chunks, SEARCH):
        candidates = first + tl.arange(0, SEARCH)
        exists = candidates < num_chunks
        first_tiles = tl.load(query_starts + candidates, mask=exists, other=0).to(tl.int32) // ROWS + candidates
        chunk += tl.sum((exists & (first_tiles <= tile)).to(tl.int32), 0)

    chunk_row = tl.load(query_starts + chunk).to(tl.int32)
    chunk_rows = tl.load(query_starts + chunk + 1).to(tl.int32) - chunk_row
    active = tl.minimum(chunk_rows, tl.load(num_rows).to(tl.int32) - chunk_row)
    first_row = (tile - (chunk_row // ROWS + chunk)) * ROWS
    kv_length = tl.load(kv_lengths + chunk).to(tl.int32)
    if BATCH_INVARIANT:
        is_other = kv_length == 0
    else:
        is_other = chunk_rows <= 1
    if is_other | (first_row >= active):
        return

    # What the loops pass by must be cheap to find again behind them, so that they have the registers.
    packed = tl.arange(0, PACKED_ROWS)
    rows = packed // GROUP  # of the tile
    heads = packed % GROUP  # of the group
    channels = tl.arange(0, PADDED_CHANNELS)
    rows_there = tl.minimum(active - first_row, ROWS)
    valid = (rows < rows_there)[:, None] & (channels < CHANNELS)[None, :]
    row_of_all = (chunk_row + first_row).to(tl.int64)
    queries += row_of_all * query_stride + kv_head * GROUP * CHANNELS
    out += (row_of_all * HEADS + kv_head * GROUP) * CHANNELS
    queries_at = queries + (rows * query_stride + heads * CHANNELS)[:, None] + channels[None, :]
    tile_queries = tl.load(queries_at, mask=valid, other=0.0)
    if UPCAST:
        tile_queries = tile_queries.to(tl.float32)
    row_scales = tl.zeros([PACKED_ROWS], tl.float32) + scale
    if scales is not None:
        tile_queries, largest = normalized(tile_queries)
        row_scales *= largest

    cached = kv_length - chunk_rows  # entries before the chunk's first row
    limits = cached + first_row + rows + 1
    end = cached + first_row + rows_there
    # Which tiles the whole query tile sees depends on where it begins, and the compiler need not round a score that no
    # mask is between in the same way.
    seen_by_all = 0 if BATCH_INVARIANT else (cached + first_row + 1) // TILE * TILE

    pool += kv_head * CHANNELS
    if scales is not None:
        scales += kv_head * BLOCK_SIZE
    table = block_tables + chunk.to(tl.int64) * table_stride
    peak = tl.full([PACKED_ROWS], _FLOOR, tl.float32)
    total = tl.zeros([PACKED_ROWS], tl.float32)
    attended = tl.zeros([PACKED_ROWS, PADDED_CHANNELS], tl.float32)
    if not BATCH_INVARIANT:
        attended, peak, total = _attend_tiles(
            attended, peak, total, tile_queries, limits, pool, scales, table, 0, seen_by_all, row_scales,
            KV_HEADS, CHANNELS, PADDED_CHANNELS, BLOCK_SIZE, TILE, False,
        )  # fmt: skip
    attended, peak, total = _attend_tiles(
        attended, peak, total, tile_queries, limits, pool, scales, table, seen_by_all, end, row_scales,
        KV_HEADS, CHANNELS, PADDED_CHANNELS, BLOCK_SIZE, TILE, True,
    )  # fmt: skip
    result = attended / tl.where(total > 0.0, total, 1.0)[:, None]
    out_at = out + ((rows * HEADS + heads) * CHANNELS)[:, None] + channels[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=valid)
