"""The small kernels at both ends of a decode step: what the layers read is derived, and the rows are advanced.

Two launches per step keep a run of steps on the device: no value comes from the host or goes there.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from d3engine.kernels.decode_rows import DecodeRows
from d3engine.kernels.triton.attention_splits import Room
from d3engine.kernels.triton.launches import Launch, ModelShape, strided
from d3engine.kernels.triton.paged_attention import AttentionInputs
from d3engine.kernels.triton.product_kernels import wait_for_previous


def begin_step(rows: DecodeRows, rotation_table: Tensor, block_size: int) -> None:
    """Derive `kv_lengths`, `active_rows`, `entries` and `rotations` of the rows that live, as `reference.py` says."""
    begin_launch(rows, rotation_table, block_size).run()


def end_step(rows: DecodeRows, tokens: Tensor, scores: Tensor) -> None:
    """Keep the chosen `tokens` int64 [B] and `scores` float32 [B] of the rows that live, and advance these by one."""
    end_launch(rows, tokens, scores).run()


def decode_attention_inputs(rows: DecodeRows, query_starts: Tensor, max_kv_length: int) -> list[AttentionInputs]:
    """As `reference_attention.decode_attention_inputs`; it may be captured."""
    room = Room()
    return [
        AttentionInputs(
            query_starts=query_starts,
            kv_lengths=rows.kv_lengths,
            block_tables=tables,
            num_rows=rows.active_rows[layer : layer + 1],
            max_kv_length=max_kv_length,
            max_chunk_rows=1,
            single_rows=True,
            room=room,
        )
        for layer, tables in enumerate(rows.block_tables.unbind())
    ]


def begin_launch(rows: DecodeRows, rotation_table: Tensor, block_size: int) -> Launch:
    """One program a layer, then one a row."""
    layers, count = rows.cutoffs.shape[1], rows.tokens.shape[0]
    channels = 2 * rotation_table.shape[1]
    arguments = {
        "num_rows_ptr": rows.num_rows,
        "positions_ptr": rows.positions,
        "steps_ptr": rows.steps,
        "cutoffs_ptr": rows.cutoffs,
        "tables_ptr": rows.block_tables,
        "table_layer_stride": rows.block_tables.stride(0),
        "table_row_stride": rows.block_tables.stride(1),
        "kv_lengths_ptr": rows.kv_lengths,
        "active_rows_ptr": rows.active_rows,
        **strided(entries=rows.entries),
        "rotation_table_ptr": torch.view_as_real(rotation_table),
        "rotations_ptr": torch.view_as_real(rows.rotations),
        "LAYERS": layers,
        "BLOCK_SIZE": block_size,
        "CHANNELS": channels,
        "BLOCK_ROWS": triton.next_power_of_2(count),
        "BLOCK_CHANNELS": triton.next_power_of_2(channels),
    }
    return Launch(_begin_kernel, (layers + count,), arguments)


def end_launch(rows: DecodeRows, tokens: Tensor, scores: Tensor) -> Launch:
    """A single program: all rows meet in it, so the count of steps can be advanced with them."""
    arguments = {
        "num_rows_ptr": rows.num_rows,
        "tokens_ptr": rows.tokens,
        "positions_ptr": rows.positions,
        "steps_ptr": rows.steps,
        "taken_ptr": rows.taken,
        "chosen_ptr": rows.chosen,
        "scores_ptr": rows.scores,
        "chosen_stride": rows.chosen.stride(0),
        "scores_stride": rows.scores.stride(0),
        "new_tokens_ptr": tokens,
        "new_scores_ptr": scores,
        "MAX_STEPS": rows.chosen.shape[0],
        "BLOCK_ROWS": triton.next_power_of_2(tokens.shape[0]),
    }
    return Launch(_end_kernel, (1,), arguments)


def launches(shape: ModelShape, dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
    """What `kernels/inspect.py` compiles."""
    table = torch.empty(4096, shape.head_dim // 2, dtype=torch.complex64, device="meta")
    for count in (1, 64):
        rows = DecodeRows.empty(count, 32, 256, shape.head_dim, 16, "meta")
        yield f"begin rows={count}", begin_launch(rows, table, shape.block_size)
        yield f"end rows={count}", end_launch(rows, rows.tokens, rows.scores[0])


@triton.jit
def _begin_kernel(
    num_rows_ptr,
    positions_ptr,
    steps_ptr,
    cutoffs_ptr,
    tables_ptr,
    table_layer_stride,
    table_row_stride,
    kv_lengths_ptr,
    active_rows_ptr,
    entries_ptr,
    entries_stride,
    rotation_table_ptr,
    rotations_ptr,
    LAYERS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    count = tl.load(num_rows_ptr)
    layer = tl.program_id(0)
    if layer < LAYERS:
        rows = tl.arange(0, BLOCK_ROWS)
        live = rows < count
        step = tl.load(steps_ptr + rows, mask=live, other=0)
        active = live & (step < tl.load(cutoffs_ptr + rows * LAYERS + layer, mask=live, other=0))
        tl.store(active_rows_ptr + layer, tl.sum(active.to(tl.int32), 0))
        position = tl.load(positions_ptr + rows, mask=active, other=0)
        table = tables_ptr + layer.to(tl.int64) * table_layer_stride + rows.to(tl.int64) * table_row_stride
        block = tl.load(table + position // BLOCK_SIZE, mask=active, other=0).to(tl.int64)
        key = block * (2 * BLOCK_SIZE) + position % BLOCK_SIZE
        entry = entries_ptr + layer.to(tl.int64) * entries_stride + rows * 2
        tl.store(entry, key, mask=active)
        tl.store(entry + 1, key + BLOCK_SIZE, mask=active)
    elif layer - LAYERS < count:
        row = layer - LAYERS
        position = tl.load(positions_ptr + row)
        tl.store(kv_lengths_ptr + row, (position + 1).to(tl.int32))
        channels = tl.arange(0, BLOCK_CHANNELS)
        mask = channels < CHANNELS
        rotation = tl.load(rotation_table_ptr + position * CHANNELS + channels, mask=mask)
        tl.store(rotations_ptr + row.to(tl.int64) * CHANNELS + channels, rotation, mask=mask)


@triton.jit
def _end_kernel(
    num_rows_ptr,
    tokens_ptr,
    positions_ptr,
    steps_ptr,
    taken_ptr,
    chosen_ptr,
    scores_ptr,
    chosen_stride,
    scores_stride,
    new_tokens_ptr,
    new_scores_ptr,
    MAX_STEPS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    rows = tl.arange(0, BLOCK_ROWS)
    taken = tl.load(taken_ptr)
    live = rows < tl.load(num_rows_ptr)
    token = tl.load(new_tokens_ptr + rows, mask=live, other=0)
    score = tl.load(new_scores_ptr + rows, mask=live, other=0.0)
    place = taken % MAX_STEPS  # of a run that has become longer the first steps are with the host
    tl.store(chosen_ptr + place * chosen_stride + rows, token, mask=live)
    tl.store(scores_ptr + place * scores_stride + rows, score, mask=live)
    tl.store(tokens_ptr + rows, token, mask=live)
    tl.store(positions_ptr + rows, tl.load(positions_ptr + rows, mask=live, other=0) + 1, mask=live)
    tl.store(steps_ptr + rows, tl.load(steps_ptr + rows, mask=live, other=0) + 1, mask=live)
    tl.debug_barrier()  # each warp has loaded `taken` for itself: none may find it advanced
    tl.store(taken_ptr, taken + 1)
