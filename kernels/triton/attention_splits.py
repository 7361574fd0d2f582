"""How the entries of a single row are dealt out to programs, and how what these find of it becomes one result.

How many splits a row has follows from its own length alone, so what it computes does not depend on who
shares its batch, and one long row among short ones keeps as many programs busy as its bytes need. The list of all
splits stands nowhere: a program finds the next one that is its own from the rows' lengths. Of the programs that share
a row and a head, the one that is done last puts the parts together, always in the order of the entries; none waits for
another.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLIT = 128
"""Entries of a split: every tile is a part of it. Not yet measured on a GPU."""

MOST_SPLITS = 64
"""Splits of a row; longer rows have larger ones. It bounds what the last program of a row puts together."""

_SEARCH = tl.constexpr(128)  # chunks that are looked at together
_TOGETHER = tl.constexpr(16)  # parts of a head that are loaded together
_FLOOR = tl.constexpr(-1e38)


@triton.jit
def entries_a_split(kv_length, SPLIT: tl.constexpr, MOST_SPLITS: tl.constexpr):
    """Entries that each split of a row of so many takes; the last may have fewer."""
    return tl.cdiv(tl.cdiv(tl.maximum(kv_length, 1), SPLIT), MOST_SPLITS) * SPLIT


@triton.jit
def find_split(nth, query_starts, kv_lengths, num_chunks, num_rows, SPLIT: tl.constexpr, MOST_SPLITS: tl.constexpr):
    """The `nth` split of all chunks of one row below `num_rows`: its chunk, its number there, and how many there are.

    The last of the three counts the splits of all chunks; where it is not above `nth`, the others mean nothing.
    """
    chunk = 0
    begun = 0  # splits of the chunks before it
    total = 0
    for first in range(0, num_chunks, _SEARCH):
        candidates = first + tl.arange(0, _SEARCH)
        exists = candidates < num_chunks
        starts = tl.load(query_starts + candidates, mask=exists, other=0).to(tl.int32)
        stops = tl.load(query_starts + candidates + 1, mask=exists, other=0).to(tl.int32)
        lengths = tl.load(kv_lengths + candidates, mask=exists, other=0).to(tl.int32)
        single = (stops - starts == 1) & (starts < num_rows)
        splits = tl.where(single, tl.cdiv(lengths, entries_a_split(lengths, SPLIT, MOST_SPLITS)), 0)
        ends = total + tl.cumsum(splits, 0)
        is_before = ends <= nth
        chunk += tl.sum(is_before.to(tl.int32), 0)
        begun = tl.maximum(begun, tl.max(tl.where(is_before, ends, 0), 0))
        total += tl.sum(splits, 0)
    return chunk, nth - begun, total


@triton.jit
def combine_parts(
    out, parts, log_totals, splits, HEADS: tl.constexpr, CHANNELS: tl.constexpr, PADDED_CHANNELS: tl.constexpr
):
    """Weigh the `splits` parts of one head into `out` [D]; `parts` and `log_totals` point at the head in the first.

    What other programs have written is loaded from the L2 cache, where it is sure to be new.
    """
    channels = tl.arange(0, PADDED_CHANNELS)
    peak = _FLOOR
    total = 0.0
    mean = tl.zeros([PADDED_CHANNELS], tl.float32)
    for first in range(0, splits, _TOGETHER):
        those = (first + tl.arange(0, _TOGETHER)) * HEADS
        exists = first + tl.arange(0, _TOGETHER) < splits
        logs = tl.load(log_totals + those, mask=exists, other=float("-inf"), cache_modifier=".cg")
        valid = exists[:, None] & (channels < CHANNELS)[None, :]
        values = tl.load(
            parts + those[:, None] * CHANNELS + channels[None, :], mask=valid, other=0.0, cache_modifier=".cg"
        )
        new_peak = tl.maximum(peak, tl.max(logs, 0))
        decay = tl.exp2(peak - new_peak)
        shares = tl.exp2(logs - new_peak)
        total = total * decay + tl.sum(shares, 0)
        mean = mean * decay + tl.sum(values * shares[:, None], 0)
        peak = new_peak
    result = mean / tl.where(total > 0.0, total, 1.0)
    tl.store(out + channels, result.to(out.dtype.element_ty), mask=channels < CHANNELS)


@dataclass(slots=True)
class Room:
    """Where the splits of rows meet: made when the first layer of a step needs it, and used by one after the other."""

    _parts: Tensor | None = field(default=None, repr=False)
    _arrived: Tensor | None = field(default=None, repr=False)

    def of(self, splits: int, heads: int, counters: int, channels: int, device: torch.device) -> tuple[Tensor, ...]:
        """Parts float32 [splits, heads, channels], their logarithms [splits, heads], and int32 counters, all zero.

        A kernel leaves the counters at zero for the next.
        """
        states = splits * heads
        parts, arrived = self.take(states * (channels + 1), counters, device)
        return parts[: states * channels], parts[states * channels :], arrived

    def take(self, numbers: int, counters: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """So many float32 numbers, and so many counters."""
        if self._parts is None or self._parts.numel() < numbers:
            self._parts = torch.empty(numbers, dtype=torch.float32, device=device)
        if self._arrived is None or self._arrived.numel() < counters:
            self._arrived = torch.zeros(counters, dtype=torch.int32, device=device)
        return self._parts[:numbers], self._arrived[:counters]
