"""Min-p, top-k and top-p without sorting: where each row's order of tokens is cut off.

Likelier tokens come before others, of equal ones the lower first. All three cuts keep a beginning of that order, so
whatever a row asks for, the outcome is one candidate (see `candidates.py`): the last one to stay, the row's *border*.

Many programs look at a row, and none waits for another. First, each tile leaves its highest and its lowest score. Then
tokens are counted and weighed in bins, by their distance from the likeliest: top-k adds up counts, top-p
probabilities. The bins say of nearly every token whether it stays, at the draw; those few that share a
bin with a border are put on a list. Who picks the best of the row then searches that list for the border itself.

All of it is exact. The probabilities are integers in units of 2**-40 of the likeliest: their sums depend on no order,
and so on no neighbour. What is farther from the likeliest than bins reach weighs nothing in these units, and no noise
lifts it above the likeliest (`gumbel` lies between -2.9 and 16.7): so a cut by bins cuts all of that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
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
from d3engine.kernels.triton.scores import UNFUSED, gumbel, scores_launch, tile_scores, tiles_of, token_words
from d3engine.kernels.triton.threshold import LISTED, NO_CANDIDATE, bins_of, border_bins, find_border, weights_of
from d3engine.kernels.triton.tiles import LIMITS

BINS = 512
"""Bins of a row: of a hundred thousand normally distributed logits some 700 share the fullest."""

MINUS_INFINITY: tl.constexpr = tl.constexpr(-0x7F800001)
"""The key of -inf."""

_LOWEST: tl.constexpr = tl.constexpr(-(2**31))  # below the key of every score
_HIGHEST: tl.constexpr = tl.constexpr(2**31 - 1)
_INFINITY: tl.constexpr = tl.constexpr(0x7F800000)  # the key of inf


@dataclass(frozen=True, slots=True, eq=False)
class Search:
    """What the launches of one choice leave for the next ones. Nothing needs to be written before the first."""

    ends: Tensor  # int32 [T, 2, tiles]: the highest key of each tile, and the lowest of a finite score
    counts: Tensor  # int32 [T, BINS]: tokens, where the row has a top-k
    weights: Tensor  # int64 [T, BINS]: their probabilities, where it has a top-p
    border_bins: Tensor  # int32 [T, 3]: see `border_bins`
    arrived: Tensor  # int32 [T]: tiles that are counted and weighed
    num_listed: Tensor  # int32 [T]
    listed: Tensor  # int64 [T, V]: candidates that share a bin with a border, in any order

    @classmethod
    def empty(cls, logits: Tensor) -> Search:
        """Memory for the rows of `logits` [T, V]."""
        (rows, vocab), device = logits.shape, logits.device

        def integers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            integers(rows, 2, tiles_of(vocab)),
            integers(rows, BINS),
            integers(rows, BINS, dtype=torch.int64),
            integers(rows, 3),
            integers(rows),
            integers(rows),
            integers(rows, vocab, dtype=torch.int64),
        )

    def arguments(self, rows: SamplingRows) -> dict[str, object]:
        """What the kernels before the draw are given, and the draw; `rows.cuts` must be there."""
        assert rows.cuts is not None
        cuts = {"min_p_ptr": rows.cuts.min_p, "top_k_ptr": rows.cuts.top_k, "top_p_ptr": rows.cuts.top_p}
        return cuts | {
            "ends_ptr": self.ends,
            "border_bins_ptr": self.border_bins,
            "num_listed_ptr": self.num_listed,
            **_tiles(self.ends.shape[2]),
        }

    def bins(self) -> dict[str, object]:
        """What those are given that know the bins."""
        return {"bin_counts_ptr": self.counts, "bin_weights_ptr": self.weights}


def no_search(tiles: int) -> dict[str, object]:
    """In place of `Search.arguments` where no row cuts."""
    names = ("min_p_ptr", "top_k_ptr", "top_p_ptr", "ends_ptr", "border_bins_ptr", "num_listed_ptr")
    return dict.fromkeys(names) | _tiles(tiles)


def _tiles(tiles: int) -> dict[str, object]:
    return {"TILES": tiles, "PADDED_TILES": triton.next_power_of_2(tiles), "BINS": BINS}


def search_launches(logits: Tensor, rows: SamplingRows, search: Search, num_rows: Tensor | None) -> dict[str, Launch]:
    """What goes before the draw, in this order: ends and bins of each row that cuts, and an empty list."""
    given = search.arguments(rows) | search.bins() | {"arrived_ptr": search.arrived}
    return {
        name: scores_launch(_search_kernel, logits, rows, num_rows, given | {"FILLS_BINS": name == "bins"})
        for name in ("ends", "bins")
    }


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
    """The last launch of a choice: of each row that cuts the border, and the best token that stays.

    The draw has left the best of each tile among the tokens that surely stay, and a list of the few that may. One
    program a row searches that list, and draws for those of it that stay, with the same noise. `tokens` int64 [T] and
    `scores` float32 [T] are written.
    """
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
    options = UNFUSED | LIMITS["last launch of a choice with cuts"].options["options"]
    return Launch(_settle_kernel, (total,), arguments, num_warps=8, options=options)


@triton.jit
def cuts_row(temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr, row):
    """Whether a row cuts anything."""
    cuts = (tl.load(min_p_ptr + row) > 0) | (tl.load(top_k_ptr + row) > 0) | (tl.load(top_p_ptr + row) < 1)
    return cuts & (tl.load(temperature_ptr + row) != 0)


@triton.jit
def searches(top_k, top_p, V: tl.constexpr):
    """Whether a border is to be searched, which that of min-p need not be."""
    return ((top_k > 0) & (top_k < V)) | (top_p < 1)


@triton.jit
def row_ends(ends_ptr, row, TILES: tl.constexpr, PADDED_TILES: tl.constexpr):
    """The highest key of a row, the lowest of a finite score, and whether there is anything to cut.

    There is not where the best score is not finite.
    """
    tiles = tl.arange(0, PADDED_TILES)
    ends_ptr += row * (2 * TILES)
    highest = tl.max(tl.load(ends_ptr + tiles, mask=tiles < TILES, other=_LOWEST), 0)
    lowest = tl.min(tl.load(ends_ptr + TILES + tiles, mask=tiles < TILES, other=_HIGHEST), 0)
    return highest, lowest, (highest < _INFINITY) & (highest > MINUS_INFINITY)


@triton.jit
def _raised(floor, ends_ptr, row, top_k, TILES: tl.constexpr, PADDED_TILES: tl.constexpr):
    """A key at or above `floor` which all reach that top-k keeps, so that few others need to be counted.

    Of GROUPS groups of tiles each has a token that reaches the lowest of the groups' highest keys. So do all of the
    GROUPS likeliest.
    """
    GROUPS: tl.constexpr = PADDED_TILES // 2 if PADDED_TILES > TILES else TILES
    if (top_k > 0) & (top_k <= GROUPS):
        tiles = tl.arange(0, PADDED_TILES)
        highest = tl.load(ends_ptr + row * (2 * TILES) + tiles, mask=tiles < TILES, other=_LOWEST)
        of_groups = tl.max(tl.reshape(highest, (PADDED_TILES // GROUPS, GROUPS)), 0)
        floor = tl.maximum(floor, tl.min(of_groups, 0))
    return floor


@triton.jit
def floor_of(highest, min_p):
    """The lowest key that min-p keeps."""
    floor = tl.full((), MINUS_INFINITY, tl.int32)
    if min_p > 0:
        floor = ordered(unordered(highest) + tl.log(min_p))
    return floor


@triton.jit(**NOT_SPECIALIZED)
def _search_kernel(
    logits_ptr,
    logits_stride,
    temperature_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    seen_ptr,
    seen_stride,
    counts_ptr,
    counts_stride,
    min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    ends_ptr,
    border_bins_ptr,
    num_listed_ptr,
    bin_counts_ptr,
    bin_weights_ptr,
    arrived_ptr,
    num_rows_ptr,
    total_rows,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    PADDED_TILES: tl.constexpr,
    BINS: tl.constexpr,
    FILLS_BINS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The tile's ends, and an empty list and bins; or, in the second launch, the bins."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    if row >= live_rows(num_rows_ptr, total_rows):
        return
    if not cuts_row(temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr, row):
        return
    if FILLS_BINS:
        top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        if not searches(top_k, top_p, V):
            return
        highest, lowest, is_finite = row_ends(ends_ptr, row, TILES, PADDED_TILES)
        if not is_finite:
            return
    _, scores = tile_scores(
        logits_ptr, logits_stride, temperature_ptr, repetition_ptr, presence_ptr, frequency_ptr,
        seen_ptr, seen_stride, counts_ptr, counts_stride, row, V, BLOCK,
    )  # fmt: skip
    keys = ordered(scores)
    if FILLS_BINS:
        bins = bins_of(keys, highest, lowest, BINS)
        floor = _raised(floor_of(highest, tl.load(min_p_ptr + row)), ends_ptr, row, top_k, TILES, PADDED_TILES)
        kept = (keys >= floor) & (bins < BINS)
        if (top_k > 0) & (top_k < V):
            tl.atomic_add(bin_counts_ptr + row * BINS + bins, 1, mask=kept, sem="relaxed")
        if top_p < 1:
            weights = weights_of(keys, highest)
            tl.atomic_add(bin_weights_ptr + row * BINS + bins, weights, mask=kept & (weights > 0), sem="relaxed")
        tl.debug_barrier()  # all warps have added theirs, before one thread says so
        if tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel", scope="gpu") == TILES - 1:
            counted, first, last = border_bins(
                bin_counts_ptr + row * BINS, bin_weights_ptr + row * BINS, top_k, top_p, V, BINS
            )  # fmt: skip
            border_bins_ptr += row * 3
            tl.store(border_bins_ptr, counted)
            tl.store(border_bins_ptr + 1, first)
            tl.store(border_bins_ptr + 2, last)
    else:
        tile = tl.program_id(1)
        ends_ptr += row * (2 * TILES) + tile
        tl.store(ends_ptr, tl.max(keys, 0))
        tl.store(ends_ptr + TILES, tl.min(tl.where(keys > MINUS_INFINITY, keys, _HIGHEST), 0))
        # Each tile empties its part of the bins.
        SHARE: tl.constexpr = (BINS + TILES - 1) // TILES
        places = tl.arange(0, triton.next_power_of_2(SHARE))
        bins = tile * SHARE + places
        mine = (places < SHARE) & (bins < BINS)
        tl.store(bin_counts_ptr + row * BINS + bins, 0, mask=mine)
        tl.store(bin_weights_ptr + row * BINS + bins, 0, mask=mine)
        if tile == 0:
            tl.store(arrived_ptr + row, 0)
            tl.store(num_listed_ptr + row, 0)


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
