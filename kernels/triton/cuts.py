"""Min-p, top-k and top-p without sorting: where each row's order of tokens is cut off.

Likelier tokens come before others, of equal ones the lower first. All three cuts keep a beginning of that order, so
whatever a row asks for, the outcome is one candidate (see `candidates.py`): the last one to stay, the row's *border*.

It is searched by bisection over the scores' integer keys. A probe passes over the row and weighs what is at or above
the middle: tokens weigh 1 for top-k and their probability for top-p. The ends of the search snap to keys that are
there, so it ends at a token's own key, after 32 probes at most and about 20 on normally distributed logits. The
probabilities are integers in units of 2**-40 of the likeliest: their sums depend on no order, and a probe can be
trusted to the last bit.

One program a row. Several would have to meet after every probe, by atomics or a launch each; one keeps its row of keys
in L2 (and a vocabulary of 32000 in L1), and only batches in which somebody cuts pay for it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from d3engine.kernels.sampling import SamplingRows
from d3engine.kernels.triton.candidates import EVERYTHING, candidate, ordered, unordered
from d3engine.kernels.triton.launches import Launch
from d3engine.kernels.triton.product_kernels import NOT_SPECIALIZED, live_rows

TILE = 4096  # keys per step: 2 loads of 16 bytes in flight for each of 512 threads; more would spill registers
WARPS = 16

_LOWEST: tl.constexpr = tl.constexpr(-(2**31))  # below the key of every score
_INFINITY: tl.constexpr = tl.constexpr(0x7F800000)  # the key of inf
_MINUS_INFINITY: tl.constexpr = tl.constexpr(-0x7F800001)  # the key of -inf
_UNIT: tl.constexpr = tl.constexpr(2.0**40)  # the weight of the likeliest token under top-p


def border_launch(keys: Tensor, rows: SamplingRows, borders: Tensor, num_rows: Tensor | None) -> Launch:
    """`borders` int64 [T] is written from `keys` int32 [T, V], contiguous; `rows.cuts` must be there.

    A row of temperature 0, one without cuts, and one whose best score is not finite keep everything.
    """
    assert rows.cuts is not None
    total, vocab = keys.shape
    arguments = {
        "keys_ptr": keys,
        "temperature_ptr": rows.temperature,
        "min_p_ptr": rows.cuts.min_p,
        "top_k_ptr": rows.cuts.top_k,
        "top_p_ptr": rows.cuts.top_p,
        "borders_ptr": borders,
        "num_rows_ptr": num_rows,
        "total_rows": total,
        "V": vocab,
        "BLOCK": min(TILE, triton.next_power_of_2(max(vocab, 32))),
    }
    return Launch(_border_kernel, (total,), arguments, WARPS)


def borders_of(keys: Tensor, rows: SamplingRows, num_rows: Tensor | None) -> Tensor:
    """The border of every row, int64 [T]: what `border_launch` writes."""
    borders = torch.empty(keys.shape[0], dtype=torch.int64, device=keys.device)
    border_launch(keys, rows, borders, num_rows).run()
    return borders


@triton.jit
def cuts_row(temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr, row):
    """Whether a row has a border to be searched."""
    cuts = (tl.load(min_p_ptr + row) > 0) | (tl.load(top_k_ptr + row) > 0) | (tl.load(top_p_ptr + row) < 1)
    return cuts & (tl.load(temperature_ptr + row) != 0)


@triton.jit(**NOT_SPECIALIZED)
def _border_kernel(
    keys_ptr,
    temperature_ptr,
    min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    borders_ptr,
    num_rows_ptr,
    total_rows,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row >= live_rows(num_rows_ptr, total_rows):
        return
    tl.store(borders_ptr + row, EVERYTHING)
    if not cuts_row(temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr, row):
        return
    keys_ptr += row * V
    highest = _highest(keys_ptr, V, BLOCK)
    if (highest >= _INFINITY) | (highest <= _MINUS_INFINITY):
        return
    min_p, top_k, top_p = tl.load(min_p_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    border = tl.full((), _MINUS_INFINITY, tl.int64) << 32
    if min_p > 0:
        border = ordered(unordered(highest) + tl.log(min_p)).to(tl.int64) << 32
    if (top_k > 0) & (top_k < V):
        border = _search(keys_ptr, border, highest, top_k.to(tl.float64), V, BLOCK, BY_COUNT=True)
    if top_p < 1:
        border = _search(keys_ptr, border, highest, top_p.to(tl.float64), V, BLOCK, BY_COUNT=False)
    tl.store(borders_ptr + row, border)


@triton.jit
def _highest(keys_ptr, V: tl.constexpr, BLOCK: tl.constexpr):
    """The highest key of a row."""
    highest = tl.full((BLOCK,), _LOWEST, tl.int32)
    for start in range(0, V, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        highest = tl.maximum(highest, tl.load(keys_ptr + tokens, mask=tokens < V, other=_LOWEST))
    return tl.max(highest, 0)


@triton.jit
def _search(keys_ptr, border, highest, wanted, V: tl.constexpr, BLOCK: tl.constexpr, BY_COUNT: tl.constexpr):
    """The border of the smallest set of likeliest tokens, of those that `border` keeps, that weighs enough.

    Enough are `wanted` tokens, or the share `wanted` of the weight of all. The new border is the old one if there are
    not more.
    """
    lowest = (border >> 32).to(tl.int32)
    total, low, _ = _probe(keys_ptr, border, lowest, highest, V, BLOCK, BY_COUNT)
    if BY_COUNT:
        target = wanted.to(tl.int64)
    else:
        target = tl.maximum(tl.ceil(total.to(tl.float64) * wanted).to(tl.int64), 1)
    if total > target:
        high = highest
        above = tl.zeros((), tl.int64)  # the weight of all keys above `high`
        while low < high:
            # Rounded up, in 64 bits: the distance of two keys does not fit 32.
            middle = (low.to(tl.int64) + ((high.to(tl.int64) - low.to(tl.int64) + 1) >> 1)).to(tl.int32)
            weight, least, most = _probe(keys_ptr, border, middle, highest, V, BLOCK, BY_COUNT)
            enough = weight >= target
            low = tl.where(enough, least, low)
            high = tl.where(enough, high, most)
            above = tl.where(enough, above, weight)
        # The tokens of this one key all weigh the same: the first few, by token, make up what is missing.
        each = _weight(low, highest, BY_COUNT)
        missing = (target - above + each - 1) // each
        border = _nth(keys_ptr, low, missing, V, BLOCK)
    return border


@triton.jit
def _probe(keys_ptr, border, middle, highest, V: tl.constexpr, BLOCK: tl.constexpr, BY_COUNT: tl.constexpr):
    """Of the tokens that `border` keeps: the weight of those at or above `middle`, their least key, and the next below.

    The least is the highest int32 if there is none at or above, the next below the lowest if there is none.
    """
    weights = tl.zeros((BLOCK,), tl.int64)
    least = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
    below = tl.full((BLOCK,), _LOWEST, tl.int32)
    for start in range(0, V, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        keys = tl.load(keys_ptr + tokens, mask=tokens < V, other=_MINUS_INFINITY)
        kept = (tokens < V) & (candidate(keys, tokens) >= border)
        over = kept & (keys >= middle)
        weights += tl.where(over, _weight(keys, highest, BY_COUNT), 0)
        least = tl.minimum(least, tl.where(over, keys, 0x7FFFFFFF))
        below = tl.maximum(below, tl.where(kept & (keys < middle), keys, _LOWEST))
    return tl.sum(weights, 0), tl.min(least, 0), tl.max(below, 0)


@triton.jit
def _weight(keys, highest, BY_COUNT: tl.constexpr):
    """int64: 1, or the probability relative to that of the likeliest."""
    if BY_COUNT:
        return tl.full(keys.shape, 1, tl.int64)
    else:  # noqa: RET505 (Triton's frontend needs the other branch of a constexpr condition)
        return (tl.exp(unordered(keys) - unordered(highest)) * _UNIT).to(tl.int64)


@triton.jit
def _nth(keys_ptr, key, nth, V: tl.constexpr, BLOCK: tl.constexpr):
    """The candidate of the `nth` token, from 1, whose key is `key`."""
    seen = tl.zeros((), tl.int32)
    last = tl.zeros((), tl.int32)
    for start in range(0, V, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        equal = tl.load(keys_ptr + tokens, mask=tokens < V, other=_LOWEST) == key
        within = equal & (seen + tl.cumsum(equal.to(tl.int32), 0) <= nth)
        last = tl.maximum(last, tl.max(tl.where(within, tokens, 0), 0))
        seen += tl.sum(equal.to(tl.int32), 0)
    return candidate(key, last)
