"""Splits of long texts among the programs of attention: how they are listed, and how their results meet.

Letters and names are those of `attention_kernels.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from d3engine.kernels.triton.product_kernels import wait_for_previous

SPLIT = 128
"""Entries of a split: every tile is a part of it. Not yet measured on a GPU."""

MOST_SPLITS = 64
"""Splits of a row; longer rows have larger ones. It bounds what the last program of a row puts together."""

PARTS_TOGETHER = 16
"""Splits whose parts the last program of a row loads together."""

_TOGETHER = tl.constexpr(PARTS_TOGETHER)
_SEARCH = tl.constexpr(128)  # chunks that are looked at together
_NO_ROW = tl.constexpr(2**31 - 1)
# The running maximum begins at a finite floor: -inf would turn a row that has seen nothing into inf - inf.
FLOOR = tl.constexpr(-1e38)


@triton.jit
def entries_a_split(kv_length, SPLIT: tl.constexpr, MOST_SPLITS: tl.constexpr):
    """Entries that each split of a row of this length takes; the last may have fewer."""
    return tl.cdiv(tl.cdiv(tl.maximum(kv_length, 1), SPLIT), MOST_SPLITS) * SPLIT


@triton.jit
def first_entry(kv_length, window, UNIT: tl.constexpr, WINDOWED: tl.constexpr):
    """The first entry that is read for a row of this length: a multiple of UNIT, 0 but WINDOWED."""
    if WINDOWED:
        first = tl.maximum(kv_length - window, 0) // UNIT * UNIT
    else:
        first = 0
    return first


@triton.jit(do_not_specialize=["turn", "most", "window"], do_not_specialize_on_alignment=["query_starts", "kv_lengths"])
def list_splits_kernel(
    listed,
    counters,
    query_starts,
    kv_lengths,
    turn,
    most,
    window,
    KV_HEADS: tl.constexpr,
    PADDED_KV_HEADS: tl.constexpr,
    SPLIT: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr,
    PDL: tl.constexpr,
):
    """List the splits of all chunks of one row, for all layers of a step: program c those of chunk c.

    `turn` chunks at a time are one launch of `single_rows_kernel`. In `listed` int32 [turns, 1 + turn * most, 4] each
    turn begins with the number of its splits; then each has its chunk, counted from the turn's first, the chunk's row
    and length, and its own number in the chunk. No chunk has more than `most`; where they are several they meet, and
    the chunk's `counters` become zero.
    """
    wait_for_previous(PDL)
    chunk = tl.program_id(0)
    nth_turn = chunk // turn
    listed += nth_turn.to(tl.int64) * (1 + turn * most) * 4
    begun = 0  # splits of the turn's chunks before this one
    splits = 0
    for first in range(nth_turn * turn, chunk + 1, _SEARCH):
        candidates = first + tl.arange(0, _SEARCH)
        exists = candidates <= chunk
        starts = tl.load(query_starts + candidates, mask=exists, other=0).to(tl.int32)
        stops = tl.load(query_starts + candidates + 1, mask=exists, other=0).to(tl.int32)
        lengths = tl.load(kv_lengths + candidates, mask=exists, other=0).to(tl.int32)
        lengths -= first_entry(lengths, window, SPLIT, WINDOWED)
        counts = tl.minimum(tl.cdiv(lengths, entries_a_split(lengths, SPLIT, MOST_SPLITS)), most)
        counts = tl.where(stops - starts == 1, counts, 0)
        begun += tl.sum(tl.where(candidates < chunk, counts, 0), 0)
        splits += tl.sum(tl.where(candidates == chunk, counts, 0), 0)
    numbers = tl.arange(0, PADDED_SPLITS)
    entries = listed + (1 + begun + numbers) * 4
    tl.store(entries, chunk - nth_turn * turn, mask=numbers < splits)
    tl.store(entries + 1, tl.load(query_starts + chunk).to(tl.int32), mask=numbers < splits)
    tl.store(entries + 2, tl.load(kv_lengths + chunk).to(tl.int32), mask=numbers < splits)
    tl.store(entries + 3, numbers, mask=numbers < splits)
    if ((chunk + 1) % turn == 0) | (chunk + 1 == tl.num_programs(0)):
        tl.store(listed, begun + splits)
    heads = tl.arange(0, PADDED_KV_HEADS)
    if most > 1:
        counter = counters + (chunk - nth_turn * turn) * KV_HEADS + heads
        tl.store(counter, tl.zeros_like(heads), mask=heads < KV_HEADS)


@triton.jit
def listed_split(listed, nth, exists):
    """The `nth` split's chunk, its row and length, and the split's number in it; row _NO_ROW where none `exists`."""
    entry = listed + (1 + nth) * 4
    chunk = tl.load(entry, mask=exists, other=0)
    row = tl.load(entry + 1, mask=exists, other=_NO_ROW)
    kv_length = tl.load(entry + 2, mask=exists, other=0)
    split = tl.load(entry + 3, mask=exists, other=0)
    return chunk, row, kv_length, split


@triton.jit
def entries_of_split(kv_length, split, window, SPLIT: tl.constexpr, MOST_SPLITS: tl.constexpr, WINDOWED: tl.constexpr):
    """The entries [begin, end) of a split, and how many splits its chunk has."""
    first = first_entry(kv_length, window, SPLIT, WINDOWED)
    size = entries_a_split(kv_length - first, SPLIT, MOST_SPLITS)
    begin = first + split * size
    return begin, tl.minimum(begin + size, kv_length), tl.cdiv(kv_length - first, size)


@triton.jit
def combine(
    out, partial, lse, splits,
    GROUP: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, PADDED_CHANNELS: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """Weigh the `splits` parts of a group's heads into `out` [GROUP, D], TOGETHER heads in a turn.

    `partial` (acc) and `lse` (lse) point at the group's first head in the first split. What other programs have
    written is loaded from the L2 cache, where it is sure to be new.
    """
    channels = tl.arange(0, PADDED_CHANNELS)
    for first_head in tl.static_range(0, GROUP, TOGETHER):
        heads = first_head + tl.arange(0, TOGETHER)
        m_i = tl.full([TOGETHER], FLOOR, tl.float32)
        l_i = tl.zeros([TOGETHER], tl.float32)
        acc = tl.zeros([TOGETHER, PADDED_CHANNELS], tl.float32)
        for first in range(0, splits, _TOGETHER):
            those = first + tl.arange(0, _TOGETHER)
            # Sums over splits stay within a thread where heads and channels have the threads.
            valid = (
                (those < splits)[:, None, None] & (heads < GROUP)[None, :, None] & (channels < CHANNELS)[None, None, :]
            )
            states = (those * HEADS)[:, None, None] + heads[None, :, None]
            values = tl.load(
                partial + states * CHANNELS + channels[None, None, :], mask=valid, other=0.0, cache_modifier=".cg"
            )
            exists = (heads < GROUP)[:, None] & (those < splits)[None, :]
            logs = tl.load(
                lse + heads[:, None] + (those * HEADS)[None, :],
                mask=exists, other=float("-inf"), cache_modifier=".cg",
            )  # fmt: skip
            m_new = tl.maximum(m_i, tl.max(logs, 1))
            decay = tl.exp2(m_i - m_new)
            shares = tl.exp2(logs - m_new[:, None])
            l_i = l_i * decay + tl.sum(shares, 1)
            acc = acc * decay[:, None] + tl.sum(values * tl.trans(shares)[:, :, None], 0)
            m_i = m_new
        result = acc / tl.where(l_i > 0.0, l_i, 1.0)[:, None]
        cells = heads[:, None] * CHANNELS + channels[None, :]
        wanted = (heads < GROUP)[:, None] & (channels < CHANNELS)[None, :]
        tl.store(out + cells, result.to(out.dtype.element_ty), mask=wanted)


@dataclass(slots=True)
class Room:
    """Where the splits of rows meet: made when the first layer of a step needs it, and used by one after the other."""

    _parts: Tensor | None = field(default=None, repr=False)
    _arrived: Tensor | None = field(default=None, repr=False)
    listed: dict[int, Tensor] = field(default_factory=dict, repr=False)
    """What `list_splits_kernel` has written, for each window."""

    def take(self, numbers: int, counters: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """`numbers` float32 numbers, and `counters` int32 counters.

        `list_splits_kernel` makes the counters zero, and each kernel leaves them at zero for the next.
        """
        if self._parts is None or self._parts.numel() < numbers:
            self._parts = torch.empty(numbers, dtype=torch.float32, device=device)
        if self._arrived is None or self._arrived.numel() < counters:
            self._arrived = torch.empty(counters, dtype=torch.int32, device=device)
        return self._parts[:numbers], self._arrived[:counters]
