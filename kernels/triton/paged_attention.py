"""Paged attention in Triton: a chunk's rows over the entries that its block table names.

Everything that changes from step to step (where chunks begin, how long they are, which blocks they name,
how many rows take part) is read from device memory, so a launch depends on upper bounds alone and may stand in a CUDA
graph. `attention_inputs` and `paged_attention` have the reference's shape.

Here are the inputs, the choice of tiles, and the launches; what runs on the device is in `attention_kernels.py`.
Letters are the reference's: T rows, C chunks, N query heads, M key/value heads, D channels per head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
import triton
from torch import Tensor

from d3engine.kernels.kv_pool import FP8_CAPABILITY, NO_WINDOW, Fp8Pool, KVPool, values_and_scales
from d3engine.kernels.target import processors_of
from d3engine.kernels.triton.attention_kernels import long_chunks_kernel, single_rows_kernel
from d3engine.kernels.triton.attention_splits import MOST_SPLITS, PARTS_TOGETHER, SPLIT, Room, list_splits_kernel
from d3engine.kernels.triton.launches import Launch, ModelShape, meta, meta_fp8_pool
from d3engine.kernels.triton.operations import Step, performed
from d3engine.kernels.triton.tiles import LIMITS

TABLE_DTYPE = torch.int32
"""Of the block tables of every step: with those of graphs, prompts run the kernels that graphs hold."""

ROWS_IN_TURN = 64
"""Rows of a replay that meet in the room of their splits at once; a batch of this number of rows needs as much."""

COMBINED = 512
"""Channels, of several heads, that the last program of a row puts together at once: 64 registers a thread hold 16 parts
of them."""

_LOG2_E = 1.4426950408889634
_INTERPRETED = triton.knobs.runtime.interpret


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What attention of one layer reads, and the bounds of its launches.

    The tensors live on the device and are int32 or int64; they may change between replays of a graph, within the
    bounds. A graph's inputs are made by hand, from buffers that stay: for decoding, `query_starts` counts
    0, 1, 2 .. C, `num_rows` is the layer's count of active rows, and the bounds are the longest sequence and 1.
    """

    query_starts: Tensor  # [C + 1] chunk c has rows [query_starts[c], query_starts[c + 1])
    kv_lengths: Tensor  # [C] entries of each chunk, its own rows included
    block_tables: Tensor  # [C, blocks] ids in the order of positions; what lies beyond a length is not read
    num_rows: Tensor  # [1] rows from here on are left as they are
    max_kv_length: int  # no chunk is longer; how many programs are launched depends on it, and where splits meet
    max_chunk_rows: int  # no chunk has more rows; above 1 the kernel of long chunks is launched
    single_rows: bool  # whether any chunk may have a single row
    room: Room = field(default_factory=Room)  # the layers of a step may share it
    # [C] the lengths of chunks that go query tile by query tile, 0 of the others, which `kv_lengths` has, 0 of these;
    # None: how many rows a chunk has decides, and how many the longest has which tile.
    tiled_lengths: Tensor | None = None


def attention_inputs(query_starts: list[int], kv_lengths: list[int], block_tables: Tensor) -> list[AttentionInputs]:
    """As `reference_attention.attention_inputs`; `block_tables` may be int32 too, and padded with anything."""
    count = len(kv_lengths)
    # One copy to the device for all layers.
    numbers = torch.tensor(query_starts + kv_lengths, dtype=torch.int32).to(block_tables.device, non_blocking=True)
    sizes = [stop - start for start, stop in pairwise(query_starts)]
    room = Room()
    return [
        AttentionInputs(
            query_starts=numbers[: count + 1],
            kv_lengths=numbers[count + 1 :],
            block_tables=layer,
            num_rows=numbers[count : count + 1],
            max_kv_length=max(kv_lengths, default=0),
            max_chunk_rows=max(sizes, default=0),
            single_rows=1 in sizes,
            room=room,
        )
        for layer in block_tables.unbind()
    ]


def paged_attention(
    queries: Tensor,
    pool: KVPool,
    inputs: AttentionInputs,
    scale: float,
    *,
    window: int = NO_WINDOW,
    cap: float | None = None,
    num_rows: Tensor | None = None,
) -> Tensor:
    """Causal attention of `queries` [T, N, D] over the entries of their chunks in `pool`; see `reference_attention.py`.

    `pool` is contiguous, of the dtype of `queries` or in 8 bits, with a block size that is a power of two; the rows of
    `queries` may be strided. `scale` is above 0. `num_rows` [1] on the device takes the place of `inputs.num_rows`;
    rows from there on are undefined in the result.

    Nothing beyond a row's own chunk is read, so NaN there is harmless. Within a chunk a non-finite value of a later
    row's entry may reach an earlier row of the same query tile, as in the reference.
    """
    if window < NO_WINDOW:  # no more splits than the entries of a window fill
        inputs = replace(inputs, max_kv_length=min(inputs.max_kv_length, window + SPLIT))
    splits, chunks = _meeting(inputs)
    heads, channels = queries.shape[1:]
    numbers = splits * chunks * heads * (channels + 1)
    partial, counters = inputs.room.take(numbers, chunks * pool.shape[3], queries.device)
    listed = inputs.room.listed.get(window)
    if listed is None and inputs.single_rows and queries.shape[0]:
        listed = inputs.room.listed[window] = _listed_splits(
            inputs.query_starts, inputs.kv_lengths, counters, _turn(inputs), _splits(inputs.max_kv_length),
            pool.shape[3], window,
        )  # fmt: skip
    return _attention(
        queries,
        pool,
        inputs.query_starts,
        inputs.kv_lengths,
        inputs.block_tables,
        inputs.num_rows if num_rows is None else num_rows,
        inputs.tiled_lengths,
        listed,
        partial,
        counters,
        _splits(inputs.max_kv_length) * SPLIT,
        _rows_alike(inputs.max_chunk_rows, heads // pool.shape[3]),
        inputs.single_rows,
        window,
        scale,
        cap,
    )


@performed
def _attention(
    queries: Tensor,
    pool: KVPool,
    query_starts: Tensor,
    kv_lengths: Tensor,
    block_tables: Tensor,
    num_rows: Tensor,
    tiled_lengths: Tensor | None,
    listed: Tensor | None,
    partial: Tensor,
    counters: Tensor,
    max_kv_length: int,
    max_chunk_rows: int,
    single_rows: bool,
    window: int,
    scale: float,
    cap: float | None,
) -> tuple[Tensor, Sequence[Step]]:
    bounds = max_kv_length, max_chunk_rows, single_rows
    room = Room(partial, counters, {} if listed is None else {window: listed})
    inputs = AttentionInputs(query_starts, kv_lengths, block_tables, num_rows, *bounds, room, tiled_lengths)
    out = torch.empty(queries.shape[0], queries.shape[1] * queries.shape[2], dtype=queries.dtype, device=queries.device)
    return out, attention_launches(out, queries, pool, inputs, scale, window, cap)


def attention_launches(
    out: Tensor,
    queries: Tensor,
    pool: KVPool,
    inputs: AttentionInputs,
    scale: float,
    window: int = NO_WINDOW,
    cap: float | None = None,
) -> list[Launch]:
    """What computes `paged_attention` into `out` [T, N D], in order; rows below `num_rows` alone are written.

    The first lists the splits of single rows, where the inputs' `room` has no list: of a step, the first layer's alone.
    """
    if not (pool.is_contiguous() and queries.stride()[1:] == (queries.shape[2], 1) and out.is_contiguous()):
        raise ValueError("pool and out must be contiguous, and so must each row of queries")
    if inputs.block_tables.stride(1) != 1 and inputs.block_tables.shape[1] > 1:
        raise ValueError("the ids in a row of block_tables must be neighbours in memory")
    block_size = pool.shape[2]
    if block_size & (block_size - 1):
        raise ValueError(f"block_size must be a power of two; got {block_size}")
    launches: list[Launch] = []
    if queries.shape[0] == 0 or inputs.kv_lengths.shape[0] == 0:
        return launches
    if inputs.single_rows:
        listed = inputs.room.listed.get(window)
        if listed is None:
            most, kv_heads = _splits(inputs.max_kv_length), pool.shape[3]
            counters = inputs.room.take(0, _meeting(inputs)[1] * kv_heads, queries.device)[1]
            listed, launch = list_launch(
                inputs.query_starts, inputs.kv_lengths, counters, _turn(inputs), most, kv_heads, window
            )
            launches.append(launch)
        launches += [
            _single_rows_launch(out, queries, pool, some, own, scale, window, cap)
            for some, own in zip(_in_turn(inputs), listed, strict=True)
        ]
    if inputs.max_chunk_rows > (1 if inputs.tiled_lengths is None else 0):
        launches.append(_long_chunks_launch(out, queries, pool, inputs, scale, window, cap))
    return launches


@performed
def _listed_splits(
    query_starts: Tensor, kv_lengths: Tensor, counters: Tensor, turn: int, most: int, kv_heads: int, window: int
) -> tuple[Tensor, Sequence[Step]]:
    listed, launch = list_launch(query_starts, kv_lengths, counters, turn, most, kv_heads, window)
    return listed, [launch]


def list_launch(
    query_starts: Tensor, kv_lengths: Tensor, counters: Tensor, turn: int, most: int, kv_heads: int, window: int
) -> tuple[Tensor, Launch]:
    """The list of all splits of single rows, int32 [turns, 1 + turn * most, 4], and what writes it; see the kernel."""
    count = kv_lengths.shape[0]
    listed = torch.empty(-(-count // turn), 1 + turn * most, 4, dtype=torch.int32, device=kv_lengths.device)
    arguments = {
        "listed": listed,
        "counters": counters,
        "query_starts": query_starts,
        "kv_lengths": kv_lengths,
        "turn": turn,
        "most": most,
        "window": window,
        "KV_HEADS": kv_heads,
        "PADDED_KV_HEADS": triton.next_power_of_2(kv_heads),
        "SPLIT": SPLIT,
        "MOST_SPLITS": MOST_SPLITS,
        "PADDED_SPLITS": triton.next_power_of_2(MOST_SPLITS),
        "WINDOWED": window < NO_WINDOW,
    }
    return listed, Launch(list_splits_kernel, (count,), arguments, num_warps=1)


def _turn(inputs: AttentionInputs) -> int:
    """Chunks that have room to meet at once: all, but of replays."""
    count = inputs.kv_lengths.shape[0]
    return count if inputs.tiled_lengths is None else min(count, ROWS_IN_TURN)


def _splits(max_kv_length: int) -> int:
    """Of a row of `max_kv_length` entries."""
    return min(MOST_SPLITS, -(-max_kv_length // SPLIT))


def _meeting(inputs: AttentionInputs) -> tuple[int, int]:
    """How many splits meet for each of how many chunks at once: none of one split, which is the result itself."""
    splits = _splits(inputs.max_kv_length)
    return (splits, _turn(inputs)) if inputs.single_rows and splits > 1 else (0, 0)


def _in_turn(inputs: AttentionInputs) -> list[AttentionInputs]:
    """The chunks for each launch of single rows: their lengths and block tables."""
    count, turn = inputs.kv_lengths.shape[0], _turn(inputs)
    return [
        replace(
            inputs,
            kv_lengths=inputs.kv_lengths[first : first + turn],
            block_tables=inputs.block_tables[first : first + turn],
        )
        for first in range(0, count, turn)
    ]


def _single_rows_launch(
    out: Tensor,
    queries: Tensor,
    pool: KVPool,
    inputs: AttentionInputs,
    listed: Tensor,
    scale: float,
    window: int,
    cap: float | None,
) -> Launch:
    chunks, heads, kv_heads, channels = inputs.kv_lengths.shape[0], queries.shape[1], pool.shape[3], pool.shape[4]
    tuning = tune_single_rows(channels, heads // kv_heads, _element_size(queries, pool))
    splits = _splits(inputs.max_kv_length)
    meeting = chunks if splits > 1 else 0
    states = meeting * splits * heads
    partial, counters = inputs.room.take(states * (channels + 1), meeting * kv_heads, queries.device)
    together = COMBINED // 2 if tuning.programs == 3 else COMBINED  # Triton 3.6 would spill
    programs = min(chunks * kv_heads * splits, tuning.programs * processors_of(pool.device))
    return Launch(
        single_rows_kernel,
        (programs,),
        {
            **_common_arguments(queries, pool, inputs, scale, window, cap),
            "out": out,
            "listed": listed,
            "partial": partial[: states * channels],
            "lse": partial[states * channels :],
            "counters": counters,
            "PADDED_GROUP": tuning.packed_rows,
            "TILE": tuning.tile,
            "STAGES": tuning.num_stages,
            "SPLIT": SPLIT,
            "MOST_SPLITS": MOST_SPLITS,
            "HEADS_TOGETHER": min(triton.next_power_of_2(heads // kv_heads), max(1, together // _padded(channels))),
        },
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **LIMITS["attention of single rows, " + ("three programs" if tuning.programs == 3 else "two programs")].options,
        least_capability=_least_capability(pool),
        turns=-(-MOST_SPLITS // PARTS_TOGETHER),
        rounds=max(1, SPLIT // tuning.tile),
        loads_before=1,  # the first ids of blocks: the split itself is known from the one before
        streams=True,
    )


def _long_chunks_launch(
    out: Tensor,
    queries: Tensor,
    pool: KVPool,
    inputs: AttentionInputs,
    scale: float,
    window: int,
    cap: float | None,
) -> Launch:
    chunks, heads, kv_heads = inputs.kv_lengths.shape[0], queries.shape[1], pool.shape[3]
    group = heads // kv_heads
    fixed = inputs.tiled_lengths is not None
    tuning = tune_long_chunks(
        pool.shape[4], group, _element_size(queries, pool), None if fixed else inputs.max_chunk_rows
    )
    num_tiles = queries.shape[0] // (tuning.packed_rows // group) + chunks
    return Launch(
        long_chunks_kernel,
        (num_tiles, kv_heads),
        {
            **_common_arguments(queries, pool, inputs, scale, window, cap),
            "out": out,
            "query_starts": inputs.query_starts,
            "kv_lengths": inputs.kv_lengths if inputs.tiled_lengths is None else inputs.tiled_lengths,
            "num_chunks": chunks,
            "PACKED_ROWS": tuning.packed_rows,
            "TILE": tuning.tile,
            "BATCH_INVARIANT": fixed,
        },
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        options=LIMITS["attention of chunks, four warps"].options["options"] if tuning.num_warps == 4 else {},
        least_capability=_least_capability(pool),
    )


def _common_arguments(
    queries: Tensor, pool: KVPool, inputs: AttentionInputs, scale: float, window: int, cap: float | None
) -> dict[str, Any]:
    values, scales = values_and_scales(pool)
    return {
        "queries": queries,
        "pool": values,
        "scales": scales,
        "block_tables": inputs.block_tables,
        "num_rows": inputs.num_rows,
        "query_stride": queries.stride(0),
        "table_stride": inputs.block_tables.stride(0),
        "window": window,
        "scale": scale * _LOG2_E,  # the kernels take powers of two
        "cap": None if cap is None else cap * _LOG2_E,
        "HEADS": queries.shape[1],
        "KV_HEADS": pool.shape[3],
        "CHANNELS": pool.shape[4],
        "PADDED_CHANNELS": _padded(pool.shape[4]),
        "BLOCK_SIZE": pool.shape[2],
        # The interpreter computes bfloat16 wrongly, without a word; tensor cores want it as it is.
        "WINDOWED": window < NO_WINDOW,
        "UPCAST": _INTERPRETED and queries.dtype == torch.bfloat16,
    }


def _element_size(queries: Tensor, pool: KVPool) -> int:
    """Bytes of a value as it is read; 4 where products are of float32, which decides more than reading does."""
    return 4 if queries.dtype == torch.float32 else pool.dtype.itemsize


def _least_capability(pool: KVPool) -> int:
    return FP8_CAPABILITY if isinstance(pool, Fp8Pool) else 0


@dataclass(frozen=True, slots=True)
class Tuning:
    """Shape of one launch: entries per KV tile, query rows times heads per program, warps, and pipeline stages.

    Of the stages, two go to the block ids, whose loads come before those of keys and values: 5 leave two KV tiles.
    Where programs go from one split to the next, each processor gets as many as have a place on it at once.
    """

    tile: int
    packed_rows: int
    num_warps: int
    num_stages: int
    programs: int = 2  # a processor


def tune_single_rows(channels: int, group: int, element_size: int) -> Tuning:
    """Tiles of 8 KB of keys where lanes sum, of 16 KB where heads are packed; several programs share a processor.

    A tile is part of a split, and packed heads have a score for each of its entries in registers: 128 entries at most,
    and 64 of heads of 16 channels, which would spill on Blackwell. In registers values of 8 bits are as wide as others,
    so their tiles have half of the bytes.
    """
    width = _padded(channels) * max(2, element_size)
    if group == 1:
        return Tuning(tile=max(16, min(128, 8192 // width)), packed_rows=1, num_warps=4, num_stages=3, programs=3)
    packed_rows = max(16, triton.next_power_of_2(group))
    if element_size == 4:
        is_small = packed_rows == 16 and channels <= 128
        return Tuning(tile=16, packed_rows=packed_rows, num_warps=4 if is_small else 8, num_stages=5)
    tile = max(16, min(64 if element_size == 1 or channels <= 16 else 128, 16384 // width))
    programs = 3 if element_size == 1 or tile * width < 16384 else 2  # by shared memory, of an A100 too
    return Tuning(tile=tile, packed_rows=packed_rows, num_warps=4, num_stages=5, programs=programs)


def tune_long_chunks(channels: int, group: int, element_size: int, max_chunk_rows: int | None) -> Tuning:
    """Query tiles no larger than the longest chunk fills, if that is to count; float32 has no tensor cores and would
    spill. Of heads of more than 128 channels larger tiles would not fit into shared memory."""
    fewest, is_wide = triton.next_power_of_2(group), channels > 128
    if element_size == 4:
        return Tuning(tile=16, packed_rows=max(32, fewest), num_warps=8, num_stages=2)
    is_narrow = element_size == 1  # what was loaded and what becomes of it stand in registers side by side
    few, more = _FEW_PACKED_ROWS
    longest = math.inf if max_chunk_rows is None else max_chunk_rows * group
    if longest <= few:
        # Of heads of 16 channels a tile of 64 entries is so small that the newest Triton keeps some of it in memory.
        tile = 32 if is_narrow or is_wide else 64 if channels > 16 else 128
        return Tuning(tile=tile, packed_rows=16, num_warps=4, num_stages=5)
    if longest <= more or is_wide:
        # More entries a tile would spill on Ampere, and more stages on Blackwell.
        return Tuning(tile=32, packed_rows=max(64, fewest), num_warps=8 if is_narrow or is_wide else 4, num_stages=4)
    return Tuning(tile=64, packed_rows=max(128, fewest), num_warps=8, num_stages=5)


_FEW_PACKED_ROWS = (16, 256)
"""Up to this number of rows times heads of the longest chunk there are smaller query tiles."""


def _rows_alike(max_chunk_rows: int, group: int) -> int:
    """The most rows that the longest chunk may have for the same launches."""
    if max_chunk_rows <= 1:
        return max_chunk_rows
    return next((most // group for most in _FEW_PACKED_ROWS if max_chunk_rows * group <= most), 2**30)


def _padded(channels: int) -> int:
    """Channels of a tile: a power of two, and no fewer than a tensor core takes."""
    return max(16, int(triton.next_power_of_2(channels)))


def launches(shape: ModelShape, dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
    """Launches to compile ahead of time: decoding, short and long chunks, at two block sizes."""
    heads, channels, cap = shape.num_heads, shape.head_dim, 50.0 if shape.soft_caps else None
    for block_size in sorted({shape.block_size, 64}):
        pool = meta(1024, 2, block_size, shape.num_kv_heads, channels, dtype=dtype)
        for label, chunks, rows, length in (
            ("decode", 64, 1, 4096),
            ("chunk of 4", 1, 4, 2048),
            ("chunk of 32", 1, 32, 2048),
            ("chunk of 512", 2, 512, 2048),
        ):
            queries = meta(chunks * rows, heads, channels, dtype=dtype)
            inputs = AttentionInputs(
                query_starts=meta(chunks + 1, dtype=torch.int32),
                kv_lengths=meta(chunks, dtype=torch.int32),
                block_tables=meta(chunks, length // block_size, dtype=TABLE_DTYPE),
                num_rows=meta(1, dtype=torch.int32),
                max_kv_length=length,
                max_chunk_rows=rows,
                single_rows=rows == 1,
            )
            out = meta(chunks * rows, heads * channels, dtype=dtype)
            found = {"": attention_launches(out, queries, pool, inputs, channels**-0.5, cap=cap)}
            found[" in a window"] = attention_launches(out, queries, pool, inputs, channels**-0.5, 1000, cap)
            for name, launches in found.items():
                for launch in launches:
                    is_list = launch.kernel is list_splits_kernel
                    yield f"{'splits of ' if is_list else ''}{label}{name}, blocks of {block_size}", launch
            if dtype != torch.float32 and channels >= 64:  # smaller heads starve, and are of toys
                narrow = meta_fp8_pool(shape, block_size)
                *_, launch = attention_launches(out, queries, narrow, inputs, channels**-0.5, cap=cap)
                yield f"{label}, blocks of {block_size} in 8 bits", launch
        if block_size == shape.block_size:  # the last of these, where no bit may depend on how a prompt is cut
            fixed = replace(inputs, tiled_lengths=inputs.kv_lengths, single_rows=False)
            for launch in attention_launches(out, queries, pool, fixed, channels**-0.5, cap=cap):
                yield "batch-invariant chunk", launch
