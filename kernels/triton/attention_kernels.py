"""The device code of `paged_attention.py`: three kernels, and the loop over entries that they share.

Chunks of one row ("single rows": decoded tokens) are a matter of bandwidth, so their entries are dealt out to several
programs (`single_rows_kernel`), whose partial results meet in `combine_kernel`; longer chunks go query tile by query
tile (`long_chunks_kernel`). All compute softmax online in float32 and base 2, so `scale` comes multiplied by log2(e).
Letters are the reference's: T rows, C chunks, N query heads, M key/value heads, D channels per head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from d3engine.kernels.triton.product_kernels import wait_for_previous

# Values that differ between steps, and views that begin anywhere, must not make a new variant of a kernel: it would
# compile in the middle of serving, or of a capture.
_NOT_SPECIALIZED = ["table_stride", "num_chunks"]
_NOT_ALIGNED = ["query_starts", "kv_lengths", "block_tables", "num_rows"]

# The running maximum begins at a finite floor: -inf would turn a row that has seen nothing into inf - inf.
_FLOOR = tl.constexpr(-1e38)


@triton.jit
def _tile_blocks(table, start, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr):
    """Ids of the blocks of entries [start, start + TILE): one id for all, or [TILE] one for each.

    `start` is a multiple of TILE, so a tile lies inside one block or covers several blocks whole. With MASKED nothing
    is read from `end` on, and `start` may lie there.
    """
    if BLOCK_SIZE >= TILE:
        if MASKED:
            blocks = tl.load(table + start // BLOCK_SIZE, mask=start < end, other=0)
        else:
            blocks = tl.load(table + start // BLOCK_SIZE)
    else:
        positions = start + tl.arange(0, TILE)
        if MASKED:
            blocks = tl.load(table + positions // BLOCK_SIZE, mask=positions < end, other=0)
        else:
            blocks = tl.load(table + positions // BLOCK_SIZE)
    return blocks


@triton.jit
def _load_tile(
    pool,
    blocks,
    start,
    end,
    KV_HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PADDED_CHANNELS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Keys and values [TILE, PADDED_CHANNELS] of entries [start, start + TILE) of a head; with MASKED, 0 from `end` on.

    `pool` points at channel 0 of the head in block 0, `blocks` are the tile's `_tile_blocks`. Masked lanes are never
    read: what stands there may be NaN.
    """
    ENTRY: tl.constexpr = KV_HEADS * CHANNELS
    positions = start + tl.arange(0, TILE)
    channels = tl.arange(0, PADDED_CHANNELS)
    # 64 bits: a pool of 80 GB holds more than 2^31 elements.
    offsets = blocks.to(tl.int64) * (2 * BLOCK_SIZE * ENTRY) + (positions % BLOCK_SIZE) * ENTRY
    keys_at = pool + offsets[:, None] + channels[None, :]
    values_at = keys_at + BLOCK_SIZE * ENTRY
    if MASKED or PADDED_CHANNELS != CHANNELS:
        wanted = (positions < end)[:, None] & (channels < CHANNELS)[None, :]
        keys = tl.load(keys_at, mask=wanted, other=0.0)
        values = tl.load(values_at, mask=wanted, other=0.0)
    else:
        keys = tl.load(keys_at)
        values = tl.load(values_at)
    if UPCAST:
        keys = keys.to(tl.float32)
        values = values.to(tl.float32)
    return keys, values


@triton.jit
def _attend_tiles(
    attended,
    peak,
    total,
    queries,
    limits,
    pool,
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
    UPCAST: tl.constexpr,
):
    """Online softmax of `queries` [rows, D] over entries [begin, end), a row only over those below its `limits`.

    Takes and returns the state: `attended` [rows, D], the maximum `peak` [rows] and the sum of weights `total` [rows].
    Without MASKED the caller promises whole tiles that every row may see.
    """
    for start in tl.range(begin, end, TILE):
        blocks = _tile_blocks(table, start, end, BLOCK_SIZE, TILE, MASKED)
        keys, values = _load_tile(
            pool, blocks, start, end, KV_HEADS, CHANNELS, PADDED_CHANNELS, BLOCK_SIZE, TILE, MASKED, UPCAST
        )
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        if MASKED:
            seen = (start + tl.arange(0, TILE))[None, :] < limits[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        decay = tl.exp2(peak - new_peak)
        weights = tl.exp2(scores - new_peak[:, None])
        total = total * decay + tl.sum(weights, 1)
        attended = tl.dot(weights.to(values.dtype), values, attended * decay[:, None], input_precision="ieee")
        peak = new_peak
    return attended, peak, total


@triton.jit
def _entries_a_split(kv_length, splits, TILE: tl.constexpr):
    """Entries that each split takes, in whole tiles; the last splits may get fewer, or none."""
    return tl.cdiv(tl.cdiv(tl.maximum(kv_length, 1), TILE), splits) * TILE


@triton.jit(do_not_specialize=_NOT_SPECIALIZED, do_not_specialize_on_alignment=_NOT_ALIGNED)
def single_rows_kernel(
    queries,
    pool,
    out,
    log_totals,
    query_starts,
    kv_lengths,
    block_tables,
    num_rows,
    query_stride,
    table_stride,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PADDED_CHANNELS: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One chunk of one row, one key/value head, one split of the entries: program (chunk, kv head, split).

    With SPLIT, `out` is float32 [splits, C, N, D] and `log_totals` float32 [splits, C, N] takes each part's weight as
    the base-2 logarithm of its sum of exponentials; a split without entries writes nothing. Without, `out` is [T, N D].
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    wait_for_previous(PDL)
    chunk = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.load(query_starts + chunk)
    if (tl.load(query_starts + chunk + 1) - row != 1) | (row >= tl.load(num_rows)):
        return
    begin = 0
    end = tl.load(kv_lengths + chunk).to(tl.int32)
    if SPLIT:
        size = _entries_a_split(end, tl.num_programs(2), TILE)
        begin = split * size
        end = tl.minimum(end, begin + size)
        if begin >= end:
            return

    table = block_tables + chunk.to(tl.int64) * table_stride
    pool += kv_head * CHANNELS
    channels = tl.arange(0, PADDED_CHANNELS)
    queries += row.to(tl.int64) * query_stride + kv_head * GROUP * CHANNELS
    if SPLIT:
        state = (split * tl.num_programs(0) + chunk).to(tl.int64) * HEADS + kv_head * GROUP
    else:
        state = row.to(tl.int64) * HEADS + kv_head * GROUP

    if GROUP == 1:
        # No other head shares these entries, so a matrix product would fill one row of sixteen: multiply and sum.
        # Each lane of the tile keeps a softmax of its own over the entries it meets; the lanes meet once, at the end,
        # and the loop has no reduction that crosses warps.
        query = tl.load(queries + channels, mask=channels < CHANNELS, other=0.0).to(tl.float32) * scale
        peak = tl.full([TILE], _FLOOR, tl.float32)
        total = tl.zeros([TILE], tl.float32)
        attended = tl.zeros([TILE, PADDED_CHANNELS], tl.float32)
        blocks = _tile_blocks(table, begin, end, BLOCK_SIZE, TILE, True)
        for start in tl.range(begin, end, TILE, num_stages=STAGES):  # the launch's own leave out what no dot reads
            next_blocks = _tile_blocks(table, start + TILE, end, BLOCK_SIZE, TILE, True)  # a load less to wait for
            keys, values = _load_tile(
                pool, blocks, start, end, KV_HEADS, CHANNELS, PADDED_CHANNELS, BLOCK_SIZE, TILE, True, UPCAST
            )
            scores = tl.sum(keys.to(tl.float32) * query[None, :], 1)
            scores = tl.where(start + tl.arange(0, TILE) < end, scores, float("-inf"))
            new_peak = tl.maximum(peak, scores)
            decay = tl.exp2(peak - new_peak)
            weights = tl.exp2(scores - new_peak)
            total = total * decay + weights
            attended = attended * decay[:, None] + weights[:, None] * values.to(tl.float32)
            peak = new_peak
            blocks = next_blocks
        top = tl.max(peak, 0)
        share = tl.exp2(peak - top)
        mass = tl.sum(total * share, 0)
        result = tl.sum(attended * share[:, None], 0) / tl.where(mass > 0.0, mass, 1.0)
        tl.store(out + state * CHANNELS + channels, result.to(out.dtype.element_ty), mask=channels < CHANNELS)
        if SPLIT:
            tl.store(log_totals + state, top + tl.log2(mass))
    else:
        heads = tl.arange(0, PADDED_GROUP)
        valid = (heads < GROUP)[:, None] & (channels < CHANNELS)[None, :]
        cells = heads[:, None] * CHANNELS + channels[None, :]
        packed = tl.load(queries + cells, mask=valid, other=0.0)
        if UPCAST:
            packed = packed.to(tl.float32)
        peak = tl.full([PADDED_GROUP], _FLOOR, tl.float32)
        total = tl.zeros([PADDED_GROUP], tl.float32)
        attended = tl.zeros([PADDED_GROUP, PADDED_CHANNELS], tl.float32)
        limits = tl.zeros([PADDED_GROUP], tl.int32) + end
        attended, peak, total = _attend_tiles(
            attended, peak, total, packed, limits, pool, table, begin, end, scale,
            KV_HEADS, CHANNELS, PADDED_CHANNELS, BLOCK_SIZE, TILE, True, UPCAST,
        )  # fmt: skip
        result = attended / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(out + state * CHANNELS + cells, result.to(out.dtype.element_ty), mask=valid)
        if SPLIT:
            tl.store(log_totals + state + heads, peak + tl.log2(total), mask=heads < GROUP)


@triton.jit(do_not_specialize_on_alignment=_NOT_ALIGNED)
def combine_kernel(
    parts,
    log_totals,
    out,
    query_starts,
    kv_lengths,
    num_rows,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PADDED_CHANNELS: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Weigh the splits of one head of one chunk into `out` [T, N D]: program (chunk, head).

    `parts` [SPLITS, C, N, D] and `log_totals` [SPLITS, C, N] float32. Which splits had entries follows from the
    length, so what the others did not write is not read.
    """
    wait_for_previous(PDL)
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(query_starts + chunk)
    if (tl.load(query_starts + chunk + 1) - row != 1) | (row >= tl.load(num_rows)):
        return
    kv_length = tl.load(kv_lengths + chunk).to(tl.int32)
    splits = tl.arange(0, SPLITS)
    channels = tl.arange(0, PADDED_CHANNELS)
    written = splits * _entries_a_split(kv_length, SPLITS, TILE) < kv_length
    states = (splits * tl.num_programs(0) + chunk).to(tl.int64) * HEADS + head
    logs = tl.load(log_totals + states, mask=written, other=float("-inf"))
    shares = tl.exp2(logs - tl.maximum(tl.max(logs, 0), _FLOOR))
    total = tl.sum(shares, 0)
    valid = written[:, None] & (channels < CHANNELS)[None, :]
    values = tl.load(parts + states[:, None] * CHANNELS + channels[None, :], mask=valid, other=0.0)
    result = tl.sum(values * shares[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    target = out + (row.to(tl.int64) * HEADS + head) * CHANNELS + channels
    tl.store(target, result.to(out.dtype.element_ty), mask=channels < CHANNELS)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED, do_not_specialize_on_alignment=_NOT_ALIGNED)
def long_chunks_kernel(
    queries,
    pool,
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
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One query tile of a chunk of two rows or more, for one key/value head: program (tile, kv head).

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
    if (chunk_rows <= 1) | (first_row >= active):
        return

    packed = tl.arange(0, PACKED_ROWS)
    channels = tl.arange(0, PADDED_CHANNELS)
    rows = first_row + packed // GROUP
    heads = kv_head * GROUP + packed % GROUP
    valid = ((rows < active) & (packed < ROWS * GROUP))[:, None] & (channels < CHANNELS)[None, :]
    rows_of_all = (chunk_row + rows).to(tl.int64)
    queries_at = queries + (rows_of_all * query_stride + heads * CHANNELS)[:, None] + channels[None, :]
    tile_queries = tl.load(queries_at, mask=valid, other=0.0)
    if UPCAST:
        tile_queries = tile_queries.to(tl.float32)

    cached = tl.load(kv_lengths + chunk).to(tl.int32) - chunk_rows  # entries before the chunk's first row
    limits = cached + rows + 1
    end = cached + tl.minimum(first_row + ROWS, active)
    seen_by_all = (cached + first_row + 1) // TILE * TILE

    pool += kv_head * CHANNELS
    table = block_tables + chunk.to(tl.int64) * table_stride
    peak = tl.full([PACKED_ROWS], _FLOOR, tl.float32)
    total = tl.zeros([PACKED_ROWS], tl.float32)
    attended = tl.zeros([PACKED_ROWS, PADDED_CHANNELS], tl.float32)
    attended, peak, total = _attend_tiles(
        attended, peak, total, tile_queries, limits, pool, table, 0, seen_by_all, scale,
        KV_HEADS, CHANNELS, PADDED_CHANNELS, BLOCK_SIZE, TILE, False, UPCAST,
    )  # fmt: skip
    attended, peak, total = _attend_tiles(
        attended, peak, total, tile_queries, limits, pool, table, seen_by_all, end, scale,
        KV_HEADS, CHANNELS, PADDED_CHANNELS, BLOCK_SIZE, TILE, True, UPCAST,
    )  # fmt: skip
    result = attended / tl.where(total > 0.0, total, 1.0)[:, None]
    out_at = out + ((rows_of_all * HEADS + heads) * CHANNELS)[:, None] + channels[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=valid)
