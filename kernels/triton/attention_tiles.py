"""What attention reads of a tile of entries: its blocks, keys and values, and the scales of those that have 8 bits.

Letters are the reference's: M key/value heads, D channels per head; `pool` and `scales` point at one head in block 0.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_blocks(table, start, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr):
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
def load_tile(
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
    VALUES: tl.constexpr,
):
    """Keys [TILE, PADDED_CHANNELS] of entries [start, start + TILE) of a head, or VALUES; with MASKED, 0 from `end` on.

    `pool` points at channel 0 of the head in block 0, `blocks` are the tile's `tile_blocks`. Masked lanes are never
    read: what stands there may be NaN.
    """
    ENTRY: tl.constexpr = KV_HEADS * CHANNELS
    positions = start + tl.arange(0, TILE)
    channels = tl.arange(0, PADDED_CHANNELS)
    # 64 bits: a pool of 80 GB holds more than 2^31 elements.
    offsets = blocks.to(tl.int64) * (2 * BLOCK_SIZE * ENTRY) + (positions % BLOCK_SIZE) * ENTRY
    entries_at = pool + offsets[:, None] + channels[None, :]
    if VALUES:
        entries_at += BLOCK_SIZE * ENTRY
    if MASKED or PADDED_CHANNELS != CHANNELS:
        wanted = (positions < end)[:, None] & (channels < CHANNELS)[None, :]
        entries = tl.load(entries_at, mask=wanted, other=0.0)
    else:
        entries = tl.load(entries_at)
    return entries


@triton.jit
def load_scales(
    scales, blocks, start, end,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """What keys, or VALUES, of entries [start, start + TILE) in 8 bits are multiples of, [TILE].

    `scales` points at those of the head in block 0. (Whoever has none must not call this: Triton 3.6 returns no None.)
    """
    positions = start + tl.arange(0, TILE)
    scales_at = scales + blocks.to(tl.int64) * (2 * KV_HEADS * BLOCK_SIZE) + positions % BLOCK_SIZE
    if VALUES:
        scales_at += KV_HEADS * BLOCK_SIZE
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
