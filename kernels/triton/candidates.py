"""The best token of a row, found in two launches: the best of each tile, then the best of those.

A candidate is a score and its token in one int64, made so that the larger integer is the better candidate: one integer
maximum settles equal scores (the lower token wins) and NaN (which beats everything, so that it is never overlooked).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from d3engine.kernels.triton.launches import Launch, row_counts
from d3engine.kernels.triton.product_kernels import NOT_SPECIALIZED, live_rows, wait_for_previous

EVERYTHING: tl.constexpr = tl.constexpr(-(2**63))
"""No candidate is below this."""

_LOW_BITS: tl.constexpr = tl.constexpr(0x7FFFFFFF)


def best_of(candidates: Tensor, num_rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """The best of `candidates` int64 [T, tiles] in each row: its token, int64 [T], and its score, float32 [T]."""
    tokens = torch.empty(candidates.shape[0], dtype=torch.int64, device=candidates.device)
    scores = torch.empty(candidates.shape[0], dtype=torch.float32, device=candidates.device)
    best_launch(candidates, tokens, scores, num_rows).run()
    return tokens, scores


def best_launch(candidates: Tensor, tokens: Tensor, scores: Tensor, num_rows: Tensor | None) -> Launch:
    """One program a row; `tokens` and `scores` are written."""
    rows, tiles = candidates.shape
    arguments = {
        "candidates_ptr": candidates,
        "tokens_ptr": tokens,
        "scores_ptr": scores,
        **row_counts(num_rows, rows),
        "TILES": tiles,
        "BLOCK": min(1024, triton.next_power_of_2(max(tiles, 32))),
    }
    return Launch(_best_kernel, (rows,), arguments)


@triton.jit
def ordered(scores):
    """int32 keys that compare as the float32 `scores` do: -0 equals 0, and NaN is above inf."""
    bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ _LOW_BITS, bits)
    return tl.where(scores != scores, _LOW_BITS, keys)


@triton.jit
def unordered(keys):
    """The float32 scores of their `ordered` keys."""
    return tl.where(keys < 0, keys ^ _LOW_BITS, keys).to(tl.float32, bitcast=True)


@triton.jit
def candidate(keys, tokens):
    """int64 candidates of scores, given by their `ordered` keys, and tokens."""
    return (keys.to(tl.int64) << 32) | (tokens ^ _LOW_BITS).to(tl.int64)


@triton.jit
def token_of(candidates):
    """int64: the tokens of candidates."""
    return (candidates & _LOW_BITS) ^ _LOW_BITS


@triton.jit
def best_of_tiles(candidates_ptr, TILES: tl.constexpr, BLOCK: tl.constexpr):
    """The best candidate of one row's tiles."""
    best = tl.full((BLOCK,), EVERYTHING, tl.int64)
    for start in range(0, TILES, BLOCK):
        tiles = start + tl.arange(0, BLOCK)
        found = tl.load(candidates_ptr + tiles, mask=tiles < TILES, other=EVERYTHING)
        best = tl.maximum(best, found)
    return tl.max(best, 0)


@triton.jit
def store_best(best, token_ptr, score_ptr):
    """Store a candidate's token, int64, and its score, float32."""
    tl.store(token_ptr, token_of(best))
    tl.store(score_ptr, unordered((best >> 32).to(tl.int32)))


@triton.jit(**NOT_SPECIALIZED)
def _best_kernel(
    candidates_ptr,
    tokens_ptr,
    scores_ptr,
    num_rows_ptr,
    total_rows,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    if row >= live_rows(num_rows_ptr, total_rows):
        return
    store_best(best_of_tiles(candidates_ptr + row * TILES, TILES, BLOCK), tokens_ptr + row, scores_ptr + row)
