"""The final norm and the projection to the vocabulary: float32 logits, or only the best token of each row.

For greedy decoding the logits need not exist: each program keeps the best of its tile, and a small second kernel
picks the best of those.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from d3engine.kernels.quantized import Weight
from d3engine.kernels.triton.launches import ROW_COUNTS, Launch, ModelShape, meta, meta_weight
from d3engine.kernels.triton.product_kernels import NOT_SPECIALIZED, live_rows, product
from d3engine.kernels.triton.products import Tile, matmul, need_unit_stride, product_tile, weight_arguments
from d3engine.kernels.triton.rms_norm import rms_norm


def lm_head(
    hidden: Tensor, norm_weight: Tensor, eps: float, weight: Weight, *, num_rows: Tensor | None = None
) -> Tensor:
    """Final norm and projection of `hidden` [T, H] by `weight` [V, H]: float32 logits [T, V].

    The logits are the float32 sums; `reference.py`, and the path of many rows, round them to the weights' dtype first.
    `num_rows` int32 [1]: rows at or beyond it are undefined in what is returned; None means all rows.
    """
    need_unit_stride(hidden=hidden, norm_weight=norm_weight, weight=weight)
    rows, vocab = hidden.shape[0], weight.shape[0]
    tile = product_tile(rows, weight, hidden.dtype)
    if tile is None:
        return matmul(rms_norm(hidden, norm_weight, eps, num_rows=num_rows), weight).float()
    logits = torch.empty(rows, vocab, dtype=torch.float32, device=hidden.device)
    logits_launch(tile, hidden, norm_weight, eps, weight, logits, num_rows).run()
    return logits


def lm_head_argmax(
    hidden: Tensor, norm_weight: Tensor, eps: float, weight: Weight, *, num_rows: Tensor | None = None
) -> Tensor:
    """The token of the largest logit of each row, int64 [T]; of equal ones the lowest. Arguments as for `lm_head`.

    A row with NaN logits gives some token of the vocabulary: look for NaN elsewhere.
    """
    need_unit_stride(hidden=hidden, norm_weight=norm_weight, weight=weight)
    rows, vocab = hidden.shape[0], weight.shape[0]
    tile = product_tile(rows, weight, hidden.dtype)
    if tile is None:
        return lm_head(hidden, norm_weight, eps, weight, num_rows=num_rows).argmax(dim=-1)
    tiles = triton.cdiv(vocab, tile.outputs)
    values = torch.empty(rows, tiles, dtype=torch.float32, device=hidden.device)
    indices = torch.empty(rows, tiles, dtype=torch.int32, device=hidden.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=hidden.device)
    best_launch(tile, hidden, norm_weight, eps, weight, values, indices, num_rows).run()
    reduce_launch(values, indices, tokens, vocab, num_rows).run()
    return tokens


def logits_launch(
    tile: Tile,
    hidden: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Weight,
    logits: Tensor,
    num_rows: Tensor | None,
) -> Launch:
    """Norm, product and store in one kernel."""
    arguments = _arguments(tile, hidden, norm_weight, eps, weight, num_rows) | {"logits_ptr": logits}
    return Launch(_logits_kernel, _grid(tile, hidden, weight), arguments, tile.warps, tile.stages)


def best_launch(
    tile: Tile,
    hidden: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Weight,
    values: Tensor,
    indices: Tensor,
    num_rows: Tensor | None,
) -> Launch:
    """The largest logit of every tile and its token: `values` float32 and `indices` int32 [T, tiles], both written."""
    best = {"values_ptr": values, "indices_ptr": indices, "TILES": values.shape[1]}
    arguments = _arguments(tile, hidden, norm_weight, eps, weight, num_rows) | best
    return Launch(_best_kernel, _grid(tile, hidden, weight), arguments, tile.warps, tile.stages)


def reduce_launch(values: Tensor, indices: Tensor, tokens: Tensor, vocab: int, num_rows: Tensor | None) -> Launch:
    """The best of all tiles; `tokens` int64 [T] is written."""
    rows, tiles = values.shape
    arguments = {
        "values_ptr": values,
        "indices_ptr": indices,
        "tokens_ptr": tokens,
        "num_rows_ptr": num_rows,
        "total_rows": rows,
        "TILES": tiles,
        "V": vocab,
        "BLOCK": 1024,
    }
    return Launch(_reduce_kernel, (rows,), arguments)


def launches(shape: ModelShape, dtype: torch.dtype, weights: str) -> Iterator[tuple[str, Launch]]:
    """What `kernels/inspect.py` compiles."""
    vocab, columns = shape.vocab_size, shape.hidden_size
    norm, num_rows = meta(columns, dtype=dtype), meta(1, dtype=torch.int32)
    weight = meta_weight(vocab, columns, dtype=dtype, weights=weights)
    for rows in ROW_COUNTS:
        tile = product_tile(rows, weight, dtype)
        if tile is None:
            continue
        hidden, logits = meta(rows, columns, dtype=dtype), meta(rows, vocab, dtype=torch.float32)
        yield f"logits rows={rows}", logits_launch(tile, hidden, norm, 1e-5, weight, logits, num_rows)
        values = meta(rows, triton.cdiv(vocab, tile.outputs), dtype=torch.float32)
        indices = meta(*values.shape, dtype=torch.int32)
        yield f"best rows={rows}", best_launch(tile, hidden, norm, 1e-5, weight, values, indices, num_rows)
    yield "reduce", reduce_launch(values, indices, meta(rows, dtype=torch.int64), vocab, num_rows)


def _arguments(
    tile: Tile, hidden: Tensor, norm_weight: Tensor, eps: float, weight: Weight, num_rows: Tensor | None
) -> dict[str, object]:
    return {
        "hidden_ptr": hidden,
        "hidden_stride": hidden.stride(0),
        "norm_ptr": norm_weight,
        "eps": eps,
        **weight_arguments(weight),
        "num_rows_ptr": num_rows,
        "total_rows": hidden.shape[0],
        "K": weight.shape[1],
        "V": weight.shape[0],
        "BLOCK_T": tile.rows,
        "BLOCK_N": tile.outputs,
        "BLOCK_K": tile.columns,
        "WEIGHTS_FIRST": tile.weights_first,
    }


def _grid(tile: Tile, hidden: Tensor, weight: Weight) -> tuple[int, int]:
    return (triton.cdiv(hidden.shape[0], tile.rows), triton.cdiv(weight.shape[0], tile.outputs))


@triton.jit(**NOT_SPECIALIZED)
def _logits_kernel(
    hidden_ptr,
    hidden_stride,
    norm_ptr,
    eps,
    weight_ptr,
    weight_stride,
    scales_ptr,
    scales_stride,
    logits_ptr,
    num_rows_ptr,
    total_rows,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
):
    count = live_rows(num_rows_ptr, total_rows)
    if tl.program_id(0) * BLOCK_T >= count:
        return
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    tokens = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = product(
        hidden_ptr,
        hidden_stride,
        tl.minimum(rows, count - 1),
        norm_ptr,
        eps,
        weight_ptr,
        weight_stride,
        scales_ptr,
        scales_stride,
        tl.minimum(tokens, V - 1),
        K,
        BLOCK_T,
        BLOCK_N,
        BLOCK_K,
        WEIGHTS_FIRST,
    )
    pointers = logits_ptr + rows.to(tl.int64)[:, None] * V + tokens[None, :]
    tl.store(pointers, sums, mask=(rows < count)[:, None] & (tokens < V)[None, :])


@triton.jit(**NOT_SPECIALIZED)
def _best_kernel(
    hidden_ptr,
    hidden_stride,
    norm_ptr,
    eps,
    weight_ptr,
    weight_stride,
    scales_ptr,
    scales_stride,
    values_ptr,
    indices_ptr,
    num_rows_ptr,
    total_rows,
    K: tl.constexpr,
    V: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
):
    count = live_rows(num_rows_ptr, total_rows)
    if tl.program_id(0) * BLOCK_T >= count:
        return
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    tokens = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = product(
        hidden_ptr,
        hidden_stride,
        tl.minimum(rows, count - 1),
        norm_ptr,
        eps,
        weight_ptr,
        weight_stride,
        scales_ptr,
        scales_stride,
        tl.minimum(tokens, V - 1),
        K,
        BLOCK_T,
        BLOCK_N,
        BLOCK_K,
        WEIGHTS_FIRST,
    )
    # Clamped outputs beyond V repeat the last logit, which cannot beat it.
    best = tl.max(sums, 1)
    index = tl.min(tl.where(sums == best[:, None], tl.minimum(tokens, V - 1)[None, :], V - 1), 1)
    offsets = rows.to(tl.int64) * TILES + tl.program_id(1)
    tl.store(values_ptr + offsets, best, mask=rows < count)
    tl.store(indices_ptr + offsets, index, mask=rows < count)


@triton.jit(**NOT_SPECIALIZED)
def _reduce_kernel(
    values_ptr,
    indices_ptr,
    tokens_ptr,
    num_rows_ptr,
    total_rows,
    V: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row >= live_rows(num_rows_ptr, total_rows):
        return
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    index = tl.full((BLOCK,), V - 1, tl.int32)
    for start in range(0, TILES, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(values_ptr + row * TILES + columns, mask=columns < TILES, other=float("-inf"))
        indices = tl.load(indices_ptr + row * TILES + columns, mask=columns < TILES, other=V - 1)
        better = values > best  # of equal values the first stays: tiles come in the order of tokens
        best = tl.where(better, values, best)
        index = tl.where(better, indices, index)
    # No lane equals the maximum if that is NaN: then the last token of the vocabulary, never an invalid one.
    token = tl.min(tl.where(best == tl.max(best, 0), index, V - 1), 0)
    tl.store(tokens_ptr + row, token.to(tl.int64))
