"""The last launch of a choice in which rows cut: of each row the border, and the best token that stays.

The draw has left the best of each tile among the tokens that surely stay, and a list of the few that may. One program a
row searches that list for the border (see `threshold.py`) and draws for those of it that stay, with the same noise.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from d3engine.kernels.sampling import SamplingRows
from d3engine.kernels.triton.candidates import (
    EVERYTHING,
    best_of_tiles,
    candidate,
    ordered,
    store_best,
    token_of,
    unordered,
)
from d3engine.kernels.triton.launches import Launch, row_counts
from d3engine.kernels.triton.product_kernels import NOT_SPECIALIZED, live_rows, wait_for_previous
from d3engine.kernels.triton.scores import UNFUSED, gumbel, token_words
from d3engine.kernels.triton.threshold import LISTED, NO_CANDIDATE, find_border
from d3engine.kernels.triton.tiles import LIMITS
from d3engine.kernels.triton.topk_topp import Search, cuts_row, row_ends

_WARPS = 8
_OPTIONS = UNFUSED | LIMITS["last launch of a choice with cuts"].options["options"]


def settle_launch(
    rows: SamplingRows,
    steps: Tensor,
    search: Search,
    candidates: Tensor,
    tokens: Tensor,
    scores: Tensor,
    num_rows: Tensor | None,
    first_token: int = 0,
) -> Launch:
    """One program a row, which searches its list; `tokens` int64 [T] and `scores` float32 [T] are written."""
    total, vocab = search.listed.shape
    arguments = {
        "candidates_ptr": candidates,
        "tokens_ptr": tokens,
        "scores_ptr": scores,
        "temperature_ptr": rows.temperature,
        "seeds_ptr": rows.seeds,
        "indices_ptr": rows.indices,
        "steps_ptr": steps,
        "listed_ptr": search.listed,
        "first_token": first_token,
        **row_counts(num_rows, total),
        "V": vocab,
        "LISTED": LISTED,
    }
    arguments |= search.arguments(rows) | search.bins()
    return Launch(_settle_kernel, (total,), arguments, _WARPS, options=_OPTIONS)


@triton.jit(**NOT_SPECIALIZED)
def _settle_kernel(
    candidates_ptr,
    tokens_ptr,
    scores_ptr,
    temperature_ptr,
    seeds_ptr,
    indices_ptr,
    steps_ptr,
    first_token,
    min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    ends_ptr,
    border_bins_ptr,
    num_listed_ptr,
    bin_counts_ptr,
    bin_weights_ptr,
    listed_ptr,
    num_rows_ptr,
    total_rows,
    V: tl.constexpr,
    LISTED: tl.constexpr,
    TILES: tl.constexpr,
    PADDED_TILES: tl.constexpr,
    BINS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    if row >= live_rows(num_rows_ptr, total_rows):
        return
    best = best_of_tiles(candidates_ptr + row * TILES, TILES, PADDED_TILES)
    if cuts_row(temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr, row):
        num_listed = tl.load(num_listed_ptr + row)
        if num_listed > 0:
            listed_ptr += row * V
            highest, lowest, _ = row_ends(ends_ptr, row, TILES, PADDED_TILES)
            border = find_border(
                listed_ptr, num_listed, bin_counts_ptr + row * BINS, bin_weights_ptr + row * BINS, highest, lowest,
                tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), V, BINS, LISTED,
            )  # fmt: skip
            seed, index, step = tl.load(seeds_ptr + row), tl.load(indices_ptr + row), tl.load(steps_ptr + row)
            for start in range(0, num_listed, LISTED):
                places = start + tl.arange(0, LISTED)
                found = tl.load(listed_ptr + places, mask=places < num_listed, other=NO_CANDIDATE)
                tokens = token_of(found)
                noise = gumbel(token_words(seed, index, step, first_token + tokens))
                noisy = candidate(ordered(unordered((found >> 32).to(tl.int32)) + noise), tokens)
                stays = (places < num_listed) & (found >= border)
                best = tl.maximum(best, tl.max(tl.where(stays, noisy, EVERYTHING), 0))
    store_best(best, tokens_ptr + row, scores_ptr + row)
