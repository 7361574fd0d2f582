"""The device code of `paged_attention.py`: two kernels, and the loop over entries that they share.

Chunks of one row ("single rows": decoded tokens) are a matter of bandwidth, so their entries are dealt out to all
programs (`single_rows_kernel`, by a list that `list_splits_kernel` makes once a step); longer chunks go query tile by
query tile (`long_chunks_kernel`). Both compute softmax online in float32 and base 2, so `scale` comes multiplied by
log2(e).
Letters are the reference's: T rows, C chunks, N query heads, M key/value heads, D channels per head. The state of an
online softmax is called as in FlashAttention: the maximum `m_i`, the sum of weights `l_i`, the weighted values `acc`;
of a split `acc / l_i` is its partial result, and `m_i + log2(l_i)` its `lse`.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from d3engine.kernels.triton.attention_splits import (
    FLOOR,
    combine,
    entries_of_split,
    first_entry,
    listed_split,
)
from d3engine.kernels.triton.product_kernels import hyperbolic_tangent, wait_for_previous
from d3engine.kernels.triton.small_values import fp8_values


class AttentionConfig(NamedTuple):
    """Constants of the loop over entries, made and passed on as `ProductConfig` is."""

    KV_HEADS: int
    CHANNELS: int
    PADDED_CHANNELS: int
    BLOCK_SIZE: int
    TILE: int
    # Of single rows alone:
    GROUP: int | None = None
    PADDED_GROUP: int | None = None
    STAGES: int | None = None
    UPCAST: bool | None = None


@triton.jit
def tile_blocks(table, start, end, CONFIG: tl.constexpr, MASKED: tl.constexpr):
    """Ids of the blocks of entries [start, start + TILE): one id for all, or [TILE] one for each.

    `start` is a multiple of TILE, so a tile lies inside one block or covers several blocks whole. With MASKED nothing
    is read from `end` on, and `start` may lie there.
    """
    if CONFIG.BLOCK_SIZE >= CONFIG.TILE:
        if MASKED:
            blocks = tl.load(table + start // CONFIG.BLOCK_SIZE, mask=start < end, other=0)
        else:
            blocks = tl.load(table + start // CONFIG.BLOCK_SIZE)
    else:
        positions = start + tl.arange(0, CONFIG.TILE)
        if MASKED:
            blocks = tl.load(table + positions // CONFIG.BLOCK_SIZE, mask=positions < end, other=0)
        else:
            blocks = tl.load(table + positions // CONFIG.BLOCK_SIZE)
    return blocks


@triton.jit
def load_tile(pool, blocks, start, end, CONFIG: tl.constexpr, MASKED: tl.constexpr, VALUES: tl.constexpr):
    """Keys [TILE, PADDED_CHANNELS] of entries [start, start + TILE) of a head, or VALUES; with MASKED, 0 from `end` on.

    `pool` points at channel 0 of the head in block 0, `blocks` are the tile's `tile_blocks`. Masked lanes are never
    read: what stands there may be NaN.
    """
    ENTRY: tl.constexpr = CONFIG.KV_HEADS * CONFIG.CHANNELS
    positions = start + tl.arange(0, CONFIG.TILE)
    channels = tl.arange(0, CONFIG.PADDED_CHANNELS)
    # 64 bits: a pool of 80 GB holds more than 2^31 elements.
    offsets = blocks.to(tl.int64) * (2 * CONFIG.BLOCK_SIZE * ENTRY) + (positions % CONFIG.BLOCK_SIZE) * ENTRY
    entries_at = pool + offsets[:, None] + channels[None, :]
    if VALUES:
        entries_at += CONFIG.BLOCK_SIZE * ENTRY
    if MASKED or CONFIG.PADDED_CHANNELS != CONFIG.CHANNELS:
        wanted = (positions < end)[:, None] & (channels < CONFIG.CHANNELS)[None, :]
        entries = tl.load(entries_at, mask=wanted, other=0.0)
    else:
        entries = tl.load(entries_at)
    return entries


@triton.jit
def load_scales(scales, blocks, start, end, CONFIG: tl.constexpr, MASKED: tl.constexpr, VALUES: tl.constexpr):
    """What keys, or VALUES, of entries [start, start + TILE) in 8 bits are multiples of, [TILE].

    `scales` points at those of the head in block 0. (Not for pools without scales: Triton 3.6 returns no None.)
    """
    positions = start + tl.arange(0, CONFIG.TILE)
    scales_at = scales + blocks.to(tl.int64) * (2 * CONFIG.KV_HEADS * CONFIG.BLOCK_SIZE) + positions % CONFIG.BLOCK_SIZE
    if VALUES:
        scales_at += CONFIG.KV_HEADS * CONFIG.BLOCK_SIZE
    if MASKED:
        found = tl.load(scales_at, mask=positions < end, other=0.0)
    else:
        found = tl.load(scales_at)
    return found


@triton.jit
def normalized(queries):
    """Rows of `queries` over their largest magnitudes, and these, float32 [rows], for products with 8-bit values.

    Those become float16 in one instruction, and bfloat16 in several: so half precision is float16 here, into which
    every row fits that is not larger than 1.
    """
    wide = queries.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(wide), 1), 1e-30)
    normalized = wide / largest[:, None]
    if queries.dtype != tl.float32:
        normalized = normalized.to(tl.float16)
    return normalized, largest


# Values that differ between steps, and views that begin anywhere, must not make a new variant of a kernel: it would
# compile in the middle of serving, or of a capture.
_NOT_SPECIALIZED = ["table_stride", "num_chunks"]
_NOT_ALIGNED = ["query_starts", "kv_lengths", "block_tables", "num_rows"]

# Powers of two by which weights are larger that are multiplied with scales of 8-bit values, in half precision.
_LIFT = tl.constexpr(8.0)


@triton.jit
def _attend_tiles(
    acc,
    m_i,
    l_i,
    queries,
    limits,
    firsts,
    pool,
    scales,
    table,
    begin,
    end,
    scale,
    cap,
    CONFIG: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Online softmax of `queries` [rows, D] over entries [begin, end), a row only over those below its `limits`.

    Where `firsts` [rows] is not None a row looks at no entry before its own of these.

    Takes and returns the state: `acc` [rows, D], the maximum `m_i` [rows] and the sum of weights `l_i` [rows].
    `scale` [rows], above 0, is what a row's products are multiplied by. Without MASKED the caller promises whole
    tiles that every row may see. A `cap` that is not None softly caps scaled scores. Products are of the dtype of
    `queries`. Scales of values go to the weights, and so that float16 can tell these apart, `m_i` lies _LIFT below
    the maximum then.
    """
    LIFT: tl.constexpr = 0.0 if scales is None else _LIFT
    for start in tl.range(begin, end, CONFIG.TILE):
        blocks = tile_blocks(table, start, end, CONFIG, MASKED)
        keys = load_tile(pool, blocks, start, end, CONFIG, MASKED, False)
        if scales is not None:
            keys = fp8_values(keys, queries.dtype)
        scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee")
        if scales is not None:
            scores *= load_scales(scales, blocks, start, end, CONFIG, MASKED, False)[None, :]
        if cap is not None:  # the scale is in them then
            scores = cap * hyperbolic_tangent(scores * (scale / cap)[:, None])
        if MASKED:
            seen = (start + tl.arange(0, CONFIG.TILE))[None, :] < limits[:, None]
            if firsts is not None:
                seen &= (start + tl.arange(0, CONFIG.TILE))[None, :] >= firsts[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        # The largest score is scaled by itself: then a weight takes a multiply-add and a power.
        if cap is not None:
            m_new = tl.maximum(m_i, tl.max(scores, 1) - LIFT)
        else:
            m_new = tl.maximum(m_i, tl.max(scores, 1) * scale - LIFT)
        decay = tl.exp2(m_i - m_new)
        if cap is not None:
            weights = tl.exp2(scores - m_new[:, None])
        else:
            weights = tl.exp2(scores * scale[:, None] - m_new[:, None])
        l_i = l_i * decay + tl.sum(weights, 1)
        if scales is not None:
            weights *= load_scales(scales, blocks, start, end, CONFIG, MASKED, True)[None, :]
        values = load_tile(pool, blocks, start, end, CONFIG, MASKED, True)
        if scales is not None:
            values = fp8_values(values, queries.dtype)
        values = values.to(queries.dtype)
        acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision="ieee")
        m_i = m_new
    return acc, m_i, l_i


@triton.jit
def _first_loads(
    queries, block_tables, row, chunk, kv_head, begin, end, query_stride, table_stride, CONFIG: tl.constexpr
):
    """What a split's first tile waits for, where no group shares it: the query [D], and the tile's `tile_blocks`.

    Nothing is read of a split without entries, nor of a group: its loop's own pipeline has the query and the ids of two
    tiles under way at once, and would have fewer stages of keys and values if it began with ids.
    """
    if CONFIG.GROUP == 1:
        channels = tl.arange(0, CONFIG.PADDED_CHANNELS)
        own = queries + row.to(tl.int64) * query_stride + kv_head * CONFIG.CHANNELS + channels
        query = tl.load(own, mask=channels < tl.where(begin < end, CONFIG.CHANNELS, 0), other=0.0)
        table = block_tables + chunk.to(tl.int64) * table_stride
        blocks = tile_blocks(table, begin, end, CONFIG, True)
    else:
        query = begin
        blocks = begin
    return query, blocks


@triton.jit
def _attend_entries(
    queries,
    query,
    blocks,
    pool,
    scales,
    table,
    begin,
    end,
    first,
    scale,
    cap,
    CONFIG: tl.constexpr,
):
    """One row's heads of a group over entries [begin, end): the state of the softmax, see `_result_of`.

    Where `first` is not None the row does not look at those before it. `queries` points at the group's first head,
    `query` and `blocks` are `_first_loads`.
    """
    if CONFIG.GROUP == 1:
        # No other head shares these entries, so a matrix product would fill one row of sixteen: multiply and sum.
        # Each lane of the tile keeps a softmax of its own over the entries it meets; the lanes meet once, at the end,
        # and the loop has no reduction that crosses warps.
        query = query.to(tl.float32) * scale
        m_i = tl.full([CONFIG.TILE], FLOOR, tl.float32)
        l_i = tl.zeros([CONFIG.TILE], tl.float32)
        acc = tl.zeros([CONFIG.TILE, CONFIG.PADDED_CHANNELS], tl.float32)
        # The launch's own stages leave out what no dot reads.
        for start in tl.range(begin, end, CONFIG.TILE, num_stages=CONFIG.STAGES):
            next_blocks = tile_blocks(table, start + CONFIG.TILE, end, CONFIG, True)  # a load less to wait for
            keys = load_tile(pool, blocks, start, end, CONFIG, True, False)
            values = load_tile(pool, blocks, start, end, CONFIG, True, True)
            if scales is not None:
                key_scales = load_scales(scales, blocks, start, end, CONFIG, True, False)
                value_scales = load_scales(scales, blocks, start, end, CONFIG, True, True)
            scores = tl.sum(keys.to(tl.float32) * query[None, :], 1)
            if scales is not None:
                scores *= key_scales
            if cap is not None:
                scores = cap * hyperbolic_tangent(scores / cap)
            seen = start + tl.arange(0, CONFIG.TILE) < end
            if first is not None:
                seen &= start + tl.arange(0, CONFIG.TILE) >= first
            scores = tl.where(seen, scores, float("-inf"))
            m_new = tl.maximum(m_i, scores)
            decay = tl.exp2(m_i - m_new)
            weights = tl.exp2(scores - m_new)
            l_i = l_i * decay + weights
            if scales is not None:
                weights *= value_scales
            acc = acc * decay[:, None] + weights[:, None] * values.to(tl.float32)
            m_i = m_new
            blocks = next_blocks
    else:
        heads = tl.arange(0, CONFIG.PADDED_GROUP)
        channels = tl.arange(0, CONFIG.PADDED_CHANNELS)
        valid = (heads < CONFIG.GROUP)[:, None] & (channels < CONFIG.CHANNELS)[None, :]
        packed = tl.load(queries + heads[:, None] * CONFIG.CHANNELS + channels[None, :], mask=valid, other=0.0)
        if CONFIG.UPCAST:
            packed = packed.to(tl.float32)
        row_scales = tl.zeros([CONFIG.PADDED_GROUP], tl.float32) + scale
        if scales is not None:
            packed, largest = normalized(packed)
            row_scales *= largest
        m_i = tl.full([CONFIG.PADDED_GROUP], FLOOR, tl.float32)
        l_i = tl.zeros([CONFIG.PADDED_GROUP], tl.float32)
        acc = tl.zeros([CONFIG.PADDED_GROUP, CONFIG.PADDED_CHANNELS], tl.float32)
        limits = tl.zeros([CONFIG.PADDED_GROUP], tl.int32) + end
        if first is None:
            firsts = None
        else:
            firsts = tl.zeros([CONFIG.PADDED_GROUP], tl.int32) + first
        acc, m_i, l_i = _attend_tiles(
            acc, m_i, l_i, packed, limits, firsts, pool, scales, table, begin, end, row_scales, cap, CONFIG, True,
        )  # fmt: skip
    return acc, m_i, l_i


@triton.jit
def _result_of(acc, m_i, l_i, GROUP: tl.constexpr):
    """The result [PADDED_GROUP, D] of a split, and its weight [PADDED_GROUP]: the base-2 logarithm of the sum of
    exponentials."""
    if GROUP == 1:
        top = tl.max(m_i, 0)
        share = tl.exp2(m_i - top)
        mass = tl.sum(l_i * share, 0)
        result = (tl.sum(acc * share[:, None], 0) / tl.where(mass > 0.0, mass, 1.0))[None, :]
        weight = tl.zeros([1], tl.float32) + top + tl.log2(mass)
    else:
        result = acc / tl.where(l_i > 0.0, l_i, 1.0)[:, None]
        weight = m_i + tl.log2(l_i)
    return result, weight


@triton.jit(do_not_specialize=_NOT_SPECIALIZED, do_not_specialize_on_alignment=_NOT_ALIGNED)
def single_rows_kernel(
    queries,
    pool,
    scales,
    out,
    partial,
    lse,
    counters,
    listed,
    block_tables,
    num_rows,
    query_stride,
    table_stride,
    window,
    scale,
    cap,
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
    HEADS_TOGETHER: tl.constexpr,
    WINDOWED: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Every chunk of one row: the `listed` splits of all of them, by key/value head, are dealt out to the programs.

    Rows are listed in order, so those below `num_rows` come first. A row of one split goes to `out` [T, N D] at once.
    Of others each split leaves its part and its weight, in `partial` float32 [splits, N, D] and `lse` float32 [splits,
    N], and counts itself in `counters` int32 [C, M]: who comes last puts the parts together, and leaves a zero there.
    What is known of a split, and the first ids of blocks where no group shares it, are loaded during the split before.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    CONFIG: tl.constexpr = AttentionConfig(
        KV_HEADS, CHANNELS, PADDED_CHANNELS, BLOCK_SIZE, TILE, GROUP, PADDED_GROUP, STAGES, UPCAST
    )
    wait_for_previous(PDL)
    active = tl.load(num_rows).to(tl.int32)
    all_work = tl.load(listed) * KV_HEADS
    heads = tl.arange(0, PADDED_GROUP)
    channels = tl.arange(0, PADDED_CHANNELS)
    cells = heads[:, None] * CHANNELS + channels[None, :]
    valid = (heads < GROUP)[:, None] & (channels < CHANNELS)[None, :]
    work = tl.program_id(0)
    # There are no more programs than places in the list: this loads what the number of splits may then refute.
    chunk, row, kv_length, split = listed_split(listed, work // KV_HEADS, work >= 0)
    is_there = (work < all_work) & (row < active)
    kv_length, split = tl.where(is_there, kv_length, 0), tl.where(is_there, split, 0)
    begin, end, splits = entries_of_split(kv_length, split, window, SPLIT, MOST_SPLITS, WINDOWED)
    query, blocks = _first_loads(
        queries, block_tables, row, chunk, work % KV_HEADS, begin, end, query_stride, table_stride, CONFIG,
    )  # fmt: skip
    while kv_length > 0:
        nth = work // KV_HEADS
        kv_head = work % KV_HEADS
        next_work = work + tl.num_programs(0)
        next_chunk, next_row, next_length, next_split = listed_split(
            listed, next_work // KV_HEADS, next_work < all_work
        )
        if WINDOWED:
            seen_first = kv_length - window
        else:
            seen_first = None
        acc, m_i, l_i = _attend_entries(
            queries + row.to(tl.int64) * query_stride + kv_head * GROUP * CHANNELS, query, blocks,
            pool + kv_head * CHANNELS,
            None if scales is None else scales + kv_head * BLOCK_SIZE,
            block_tables + chunk.to(tl.int64) * table_stride, begin, end, seen_first, scale, cap, CONFIG,
        )  # fmt: skip
        next_is_there = next_row < active
        next_length, next_split = tl.where(next_is_there, next_length, 0), tl.where(next_is_there, next_split, 0)
        begin, end, next_splits = entries_of_split(next_length, next_split, window, SPLIT, MOST_SPLITS, WINDOWED)
        query, blocks = _first_loads(
            queries, block_tables, next_row, next_chunk, next_work % KV_HEADS, begin, end, query_stride, table_stride,
            CONFIG,
        )  # fmt: skip
        result, weight = _result_of(acc, m_i, l_i, GROUP)
        target = out + (row.to(tl.int64) * HEADS + kv_head * GROUP) * CHANNELS
        if splits == 1:
            tl.store(target + cells, result.to(out.dtype.element_ty), mask=valid)
        else:
            states = nth.to(tl.int64) * HEADS + kv_head * GROUP
            tl.store(partial + states * CHANNELS + cells, result, mask=valid)
            tl.store(lse + states + heads, weight, mask=heads < GROUP)
            tl.debug_barrier()  # all warps have stored, before one thread says so
            counter = counters + chunk * KV_HEADS + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1:
                first = (nth - split).to(tl.int64) * HEADS + kv_head * GROUP
                combine(
                    target, partial + first * CHANNELS, lse + first, splits,
                    GROUP, HEADS, CHANNELS, PADDED_CHANNELS, HEADS_TOGETHER,
                )  # fmt: skip
                tl.store(counter, 0)
        work, chunk, row, kv_length = next_work, next_chunk, next_row, next_length
        split, splits = next_split, next_splits


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
    window,
    scale,
    cap,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PADDED_CHANNELS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PACKED_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BATCH_INVARIANT: tl.constexpr,
    WINDOWED: tl.constexpr,
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
    CONFIG: tl.constexpr = AttentionConfig(KV_HEADS, CHANNELS, PADDED_CHANNELS, BLOCK_SIZE, TILE)
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
    begin = first_entry(cached + first_row + 1, window, TILE, WINDOWED)
    if WINDOWED:
        firsts = limits - window
    else:
        firsts = None
    seen_by_all = begin if BATCH_INVARIANT or WINDOWED else (cached + first_row + 1) // TILE * TILE

    pool += kv_head * CHANNELS
    if scales is not None:
        scales += kv_head * BLOCK_SIZE
    table = block_tables + chunk.to(tl.int64) * table_stride
    m_i = tl.full([PACKED_ROWS], FLOOR, tl.float32)
    l_i = tl.zeros([PACKED_ROWS], tl.float32)
    acc = tl.zeros([PACKED_ROWS, PADDED_CHANNELS], tl.float32)
    if not (BATCH_INVARIANT or WINDOWED):
        acc, m_i, l_i = _attend_tiles(
            acc, m_i, l_i, tile_queries, limits, None, pool, scales, table, 0, seen_by_all, row_scales, cap,
            CONFIG, False,
        )  # fmt: skip
    acc, m_i, l_i = _attend_tiles(
        acc, m_i, l_i, tile_queries, limits, firsts, pool, scales, table, seen_by_all, end, row_scales, cap,
        CONFIG, True,
    )  # fmt: skip
    result = acc / tl.where(l_i > 0.0, l_i, 1.0)[:, None]
    out_at = out + ((rows * HEADS + heads) * CHANNELS)[:, None] + channels[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=valid)
