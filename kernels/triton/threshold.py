"""A row's border, from the weights of its bins and from the list of those tokens that share a bin with it.

A bin holds the tokens whose score lies in one part of the way from the likeliest to the least likely, or to `REACH`
below the likeliest. It is a beginning and an end in the order of tokens, however the division rounds, so sums over bins
say exactly in which bin the border is; and bisection over that bin's candidates finds which of them it is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from d3engine.kernels.triton.candidates import EVERYTHING, unordered

REACH: tl.constexpr = tl.constexpr(28.0)
"""Nats below the likeliest at which bins end; exp(-28) is less than 2**-40."""

LISTED = 1024
"""Tokens of a list that are looked at together."""

NO_CANDIDATE: tl.constexpr = tl.constexpr(-0x7F800001 << 32)
"""Below the candidate of any finite score."""

_UNIT: tl.constexpr = tl.constexpr(2.0**40)  # the weight of the likeliest token under top-p
_BEYOND: tl.constexpr = tl.constexpr(2**63 - 1)  # no candidate is above this


@triton.jit
def bins_of(keys, highest, lowest, BINS: tl.constexpr):
    """int32: 0 where the likeliest are, more below, and BINS beyond reach."""
    distance = unordered(highest) - unordered(keys)
    width = tl.maximum(tl.minimum(unordered(highest) - unordered(lowest), REACH), 1e-30)
    bins = (tl.minimum(distance, width) * ((BINS - 1) / width)).to(tl.int32)
    return tl.where(distance <= width, bins, BINS)


@triton.jit
def weights_of(keys, highest):
    """int64: probabilities relative to that of the likeliest."""
    return (tl.exp(unordered(keys) - unordered(highest)) * _UNIT).to(tl.int64)


@triton.jit
def border_bins(bin_counts_ptr, bin_weights_ptr, top_k, top_p, V: tl.constexpr, BINS: tl.constexpr):
    """The bin of the last token that top-k keeps, and the first and last in which top-p's may be; BINS for no cut.

    Which one it is depends on which tokens of top-k's bin stay, and so have a part in the whole.
    """
    bins = tl.arange(0, BINS)
    counted = _count_bin(bin_counts_ptr, top_k, V, BINS)
    first, last = tl.full((), BINS, tl.int32), tl.full((), BINS, tl.int32)
    if top_p < 1:
        weights = _load_new(bin_weights_ptr + bins)
        sums = tl.cumsum(weights, 0)
        first = _reached(sums, _share(tl.sum(tl.where(bins < counted, weights, 0), 0), top_p))
        last = _reached(sums, _share(tl.sum(tl.where(bins <= counted, weights, 0), 0), top_p))
    return counted, first, last


@triton.jit
def find_border(
    listed_ptr, num_listed, bin_counts_ptr, bin_weights_ptr, highest, lowest, top_k, top_p,
    V: tl.constexpr, BINS: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """The last candidate that top-k and top-p keep, if it shares a bin with others; else one below all of the list."""
    bins = tl.arange(0, BINS)
    counted = _count_bin(bin_counts_ptr, top_k, V, BINS)
    border = tl.full((), EVERYTHING, tl.int64)
    if counted < BINS:
        above = tl.sum(tl.where(bins < counted, tl.load(bin_counts_ptr + bins), 0), 0)
        border = _search(
            listed_ptr, num_listed, highest, lowest, counted, top_k - above, BINS, LISTED, BY_COUNT=True
        )  # fmt: skip
    if top_p < 1:
        weights = tl.load(bin_weights_ptr + bins)
        total = tl.sum(tl.where(bins < counted, weights, 0), 0)
        if counted < BINS:
            staying, _, _ = _probe(
                listed_ptr, num_listed, highest, lowest, counted, border, BINS, LISTED, BY_COUNT=False
            )  # fmt: skip
            total += staying
        target = _share(total, top_p)
        weighed = _reached(tl.cumsum(weights, 0), target)
        above = tl.sum(tl.where(bins < weighed, weights, 0), 0)
        border = _search(
            listed_ptr, num_listed, highest, lowest, weighed, target - above, BINS, LISTED, BY_COUNT=False
        )  # fmt: skip
    return border


@triton.jit
def _count_bin(bin_counts_ptr, top_k, V: tl.constexpr, BINS: tl.constexpr):
    """The bin of the last token that top-k keeps; BINS if it cuts nothing within reach."""
    counted = tl.full((), BINS, tl.int32)
    if (top_k > 0) & (top_k < V):
        counted = _reached(tl.cumsum(_load_new(bin_counts_ptr + tl.arange(0, BINS)), 0), top_k)
    return counted


@triton.jit
def _load_new(pointers):
    """What other programs of a launch have just added up, from the L2 cache, where it is sure to be new."""
    return tl.load(pointers, cache_modifier=".cg")


@triton.jit
def _reached(sums, target):
    """The first place at which ascending `sums` reach the target; how many they are if they do not."""
    return tl.sum((sums < target).to(tl.int32), 0)


@triton.jit
def _share(total, top_p):
    """The weight that the smallest set for top-p must reach, of the weight of all."""
    return tl.maximum(tl.ceil(total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _search(
    listed_ptr, num_listed, highest, lowest, wanted_bin, wanted,
    BINS: tl.constexpr, LISTED: tl.constexpr, BY_COUNT: tl.constexpr,
):  # fmt: skip
    """The last of the likeliest of a bin that weigh `wanted` together.

    Bisection over candidates, which are all different. Its ends snap to some that are there.
    """
    low, high = tl.full((), EVERYTHING, tl.int64), tl.full((), _BEYOND, tl.int64)
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up, where a sum would not fit
        weight, least, most = _probe(
            listed_ptr, num_listed, highest, lowest, wanted_bin, middle, BINS, LISTED, BY_COUNT
        )  # fmt: skip
        enough = weight >= wanted
        low = tl.where(enough, least, low)
        high = tl.where(enough, high, most)
    return low


@triton.jit
def _probe(
    listed_ptr, num_listed, highest, lowest, wanted_bin, middle,
    BINS: tl.constexpr, LISTED: tl.constexpr, BY_COUNT: tl.constexpr,
):  # fmt: skip
    """Of a bin's candidates: what those from `middle` on weigh, the least of them, and the next below.

    Without any the least is the largest int64, and the next below the smallest.
    """
    weights = tl.zeros((LISTED,), tl.int64)
    least = tl.full((LISTED,), _BEYOND, tl.int64)
    below = tl.full((LISTED,), EVERYTHING, tl.int64)
    for start in range(0, num_listed, LISTED):
        places = start + tl.arange(0, LISTED)
        found = tl.load(listed_ptr + places, mask=places < num_listed, other=NO_CANDIDATE)
        keys = (found >> 32).to(tl.int32)
        counts = (places < num_listed) & (bins_of(keys, highest, lowest, BINS) == wanted_bin)
        over = counts & (found >= middle)
        if BY_COUNT:
            weights += over.to(tl.int64)
        else:
            weights += tl.where(over, weights_of(keys, highest), 0)
        least = tl.minimum(least, tl.where(over, found, _BEYOND))
        below = tl.maximum(below, tl.where(counts & (found < middle), found, EVERYTHING))
    return tl.sum(weights, 0), tl.min(least, 0), tl.max(below, 0)
