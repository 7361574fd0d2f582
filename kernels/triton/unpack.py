"""Quantized matrices as the floats that they stand for: for torch's product, and rows of an embedding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from d3engine.kernels.matrices import Table, Weight, looked_up
from d3engine.kernels.quantized import GROUP
from d3engine.kernels.split_blocks import SplitBlockWeight
from d3engine.kernels.triton.block_values import BLOCK, load_codes, run_column, run_values, runs_of, tiles_of
from d3engine.kernels.triton.launches import BLOCKS, QUANTIZED, Launch, ModelShape, meta, meta_weight
from d3engine.kernels.triton.operations import Step, TorchCall, performed
from d3engine.kernels.triton.product_kernels import is_of_bytes, is_of_groups, wait_for_previous
from d3engine.kernels.triton.products import least_capability, need_unit_stride, parts_of, weight_arguments
from d3engine.kernels.triton.small_values import byte_values, int4_values

_GROUP: tl.constexpr = tl.constexpr(GROUP)


def unpack_steps(weight: Weight, dtype: torch.dtype) -> tuple[Tensor, list[Step]]:
    """`weight` [N, K] as a matrix of `dtype`, which a float matrix must be already; `dequantize`, on the device."""
    if isinstance(weight, Tensor):
        return weight, []
    need_unit_stride(weight=weight)
    out = torch.empty(weight.shape, dtype=dtype, device=weight.tensors[0].device)
    steps: list[Step] = []
    for first, part in parts_of(weight):
        if isinstance(part, Tensor):
            steps.append(TorchCall(partial(_put, first), (out, part)))
        elif isinstance(part, SplitBlockWeight):
            steps.append(blocks_launch(part, out, first=first))
        else:
            steps.append(unpack_launch(part, out))
    return out, steps


def _put(first: int, out: Tensor, part: Tensor) -> None:
    out[first : first + part.shape[0]].copy_(part)


def unpack_launch(weight: Weight, out: Tensor) -> Launch:
    """`out` [N, K], contiguous, is written; 16 stored bytes a thread."""
    outputs, columns = weight.shape
    arguments = {**weight_arguments(weight), "out_ptr": out, "K": columns, "BLOCK_G": 16}
    del arguments["TYPE"]
    grid = (outputs, triton.cdiv(columns, 16 * GROUP))
    return Launch(_unpack_kernel, grid, arguments, least_capability=least_capability(weight))


def embed(table: Table, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [T, K] of a table at int64 `token_ids` [T], in `dtype`: those of other formats are rounded once."""
    if isinstance(table, SplitBlockWeight):
        return _embed_blocks(table, token_ids, dtype)
    return looked_up(table, token_ids, dtype)


@performed
def _embed_blocks(table: SplitBlockWeight, token_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Sequence[Step]]:
    out = torch.empty(token_ids.shape[0], table.shape[1], dtype=dtype, device=token_ids.device)
    return out, [blocks_launch(table, out, token_ids)]


def blocks_launch(weight: SplitBlockWeight, out: Tensor, places: Tensor | None = None, first: int = 0) -> Launch:
    """`out` [T, K], contiguous, is written from row `first` on: with the rows at int64 `places`, or with all."""
    rows, columns = weight.shape if places is None else (places.shape[0], weight.shape[1])
    arguments = {
        **weight_arguments(weight),
        "places_ptr": places,
        "out_ptr": out,
        "total_rows": rows,
        "FIRST": first,
        "K": columns,
        "BLOCK_N": 16,
        "BLOCK_K": BLOCK,
    }
    return Launch(_unpack_blocks_kernel, (triton.cdiv(rows, 16), triton.cdiv(columns, BLOCK)), arguments)


def launches(shape: ModelShape, dtype: torch.dtype, weights: str) -> Iterator[tuple[str, Launch]]:
    """What `kernels/inspect.py` compiles."""
    if weights in (*QUANTIZED, *BLOCKS):
        weight = meta_weight(shape.hidden_size, shape.intermediate_size, dtype=dtype, weights=weights)
        out = meta(shape.hidden_size, shape.intermediate_size, dtype=dtype)
        if isinstance(weight, SplitBlockWeight):
            yield "unpack", blocks_launch(weight, out)
            tokens = meta(16, dtype=torch.int64)
            yield "embed", blocks_launch(weight, meta(16, shape.intermediate_size, dtype=dtype), tokens)
        else:
            yield "unpack", unpack_launch(weight, out)


@triton.jit
def _unpack_kernel(
    weight_ptr,
    weight_stride,
    scales_ptr,
    SCALES_STRIDE: tl.constexpr,
    out_ptr,
    K: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    output = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)[:, None]
    weight_ptr += output * weight_stride
    scales_ptr += output * SCALES_STRIDE
    out_ptr += output * K
    if is_of_bytes(weight_ptr.dtype.element_ty):
        columns = groups * _GROUP + tl.arange(0, _GROUP)[None, :]
        stored = tl.load(weight_ptr + columns, mask=columns < K, other=0.0, eviction_policy="evict_first")
        scales = tl.load(scales_ptr)
        if is_of_groups(weight_ptr.dtype.element_ty, SCALES_STRIDE):
            scales = tl.load(scales_ptr + groups, mask=groups * _GROUP < K, other=0.0)
        values = byte_values(stored, tl.float32) * scales
        tl.store(out_ptr + columns, values.to(out_ptr.dtype.element_ty), mask=columns < K)
    else:
        nth = tl.arange(0, _GROUP // 2)[None, :]
        columns = groups * _GROUP + nth
        places = groups * (_GROUP // 2) + nth
        stored = tl.load(weight_ptr + places, mask=groups * _GROUP < K, other=0, eviction_policy="evict_first")
        scales = tl.load(scales_ptr + groups, mask=groups * _GROUP < K, other=0.0)
        low, high = int4_values(stored, tl.float32)
        tl.store(out_ptr + columns, (low * scales).to(out_ptr.dtype.element_ty), mask=columns < K)
        columns += _GROUP // 2
        tl.store(out_ptr + columns, (high * scales).to(out_ptr.dtype.element_ty), mask=columns < K)


@triton.jit(do_not_specialize=["total_rows"])
def _unpack_blocks_kernel(
    weight_ptr,
    weight_stride,
    scales_ptr,
    SCALES_STRIDE: tl.constexpr,
    TYPE: tl.constexpr,
    places_ptr,
    out_ptr,
    total_rows,
    FIRST: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    nth_row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(nth_row, total_rows - 1).to(tl.int64)
    if places_ptr is not None:
        rows = tl.load(places_ptr + rows)
    code_rows, scale_rows = weight_ptr + rows * weight_stride, scales_ptr + rows * SCALES_STRIDE
    out_rows = out_ptr + (FIRST + nth_row).to(tl.int64) * K
    start = tl.program_id(1) * BLOCK_K
    TILES: tl.constexpr = tiles_of(TYPE, BLOCK_K)
    RUNS: tl.constexpr = runs_of(TYPE)
    for tile in tl.static_range(TILES):
        codes = load_codes(code_rows, TYPE, start, tile, K, BLOCK_K)
        for nth in tl.static_range(RUNS):
            values = run_values(codes, code_rows, scale_rows, TYPE, start, tile, nth, K, BLOCK_K)
            columns = start + run_column(TYPE, tile, nth) + tl.arange(0, 32)
            mask = (nth_row < total_rows)[:, None] & (columns < K)[None, :]
            tl.store(out_rows[:, None] + columns[None, :], values.to(out_ptr.dtype.element_ty), mask=mask)
