"""The attention of `reference.py`, where the letters of its shapes are explained.

Torch's attention serves a group at a time, one chunk of many rows or many chunks of one row each, whose
entries are gathered out of the pool's blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from d3engine.kernels.decode_rows import DecodeRows
from d3engine.kernels.kv_pool import NO_WINDOW, KVPool, read_blocks


@dataclass(frozen=True, slots=True)
class _Group:
    """Chunks that one attention call serves: one chunk of many rows, or many chunks of one row each."""

    chunks: slice
    rows: slice
    kv_length: int  # the longest of the group, in entries
    ends: Tensor  # where each row ceases to look
    mask: Tensor | None  # True where a query may look; None where it may look everywhere
    windowed: dict[int, Tensor] = field(default_factory=dict)  # the same in a sliding window, by its length

    def mask_in(self, window: int) -> Tensor | None:
        """The mask with a window of `window` entries."""
        if window >= self.kv_length:
            return self.mask
        if window not in self.windowed:
            places, ends = torch.arange(self.kv_length, device=self.ends.device), self.ends.unsqueeze(1)
            self.windowed[window] = (places < ends) & (places >= ends - window)
        return self.windowed[window]


AttentionInputs: TypeAlias = list[tuple[_Group, Tensor]]
"""What `paged_attention` reads for one layer: each group, and its half-blocks [2 C blocks], keys' before values'."""


def attention_inputs(query_starts: list[int], kv_lengths: list[int], block_tables: Tensor) -> list[AttentionInputs]:
    """Prepare attention of C chunks for n layers at once; item k is for the layer of `block_tables[k]`.

    Chunk c has rows [query_starts[c], query_starts[c + 1]). `kv_lengths[c]` counts its entries, its own rows included:
    its last row looks at all of them, the row before at one less, and so on. `block_tables` [n, C, >= longest /
    block_size] int64 holds each chunk's blocks in the order of positions, padded with any valid block.
    """
    # A pool of blocks [2, block_size, ...] is a pool of half-blocks: keys in 2 b, values in 2 b + 1.
    halves = block_tables.unsqueeze(1) * 2
    halves = torch.cat((halves, halves + 1), dim=1)  # [n, 2, C, blocks]
    groups = _groups(query_starts, kv_lengths, block_tables.device)
    if len(groups) == 1:
        (group,) = groups
        return [[(group, layer)] for layer in halves.flatten(1).unbind()]
    by_group = [halves[:, :, group.chunks].flatten(1).unbind() for group in groups]
    return [list(zip(groups, layers, strict=True)) for layers in zip(*by_group, strict=True)]


def _groups(query_starts: list[int], kv_lengths: list[int], device: torch.device) -> list[_Group]:
    """Neighbouring chunks of a single row are served together, a longer chunk alone."""
    groups = []
    chunk, count = 0, len(kv_lengths)
    while chunk < count:
        last = chunk
        if query_starts[chunk + 1] - query_starts[chunk] == 1:
            while last + 1 < count and query_starts[last + 2] - query_starts[last + 1] == 1:
                last += 1
        lengths = kv_lengths[chunk : last + 1]
        rows = slice(query_starts[chunk], query_starts[last + 1])
        longest, is_single = max(lengths), rows.stop - rows.start == len(lengths)
        if is_single:
            ends = torch.tensor(lengths, device=device)
        else:
            ends = torch.arange(longest - (rows.stop - rows.start) + 1, longest + 1, device=device)
        sees_all = is_single and min(lengths) == longest
        mask = None if sees_all else torch.arange(longest, device=device) < ends.unsqueeze(1)
        groups.append(_Group(slice(chunk, last + 1), rows, longest, ends, mask))
        chunk = last + 1
    return groups


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """What `paged_attention` reads for one layer of a decode step: single rows, their numbers on the device."""

    kv_lengths: Tensor  # int32 [B]
    block_tables: Tensor  # int32 [B, blocks]
    num_rows: Tensor  # int32 [1]

    def inputs(self, block_size: int) -> AttentionInputs:
        """The rows that run the layer, as chunks of one row each."""
        count = int(self.num_rows)
        lengths = self.kv_lengths[:count].tolist()
        tables = self.block_tables[None, :count, : -(-max(lengths) // block_size)].long()
        return attention_inputs(list(range(count + 1)), lengths, tables)[0]


def decode_attention_inputs(rows: DecodeRows, query_starts: Tensor, max_kv_length: int) -> list[DecodeAttention]:
    """What `paged_attention` reads at each layer of a decode step; it may be captured where the device does that.

    `query_starts` int32 [B + 1] counts 0, 1, 2 .. B; no row has more than `max_kv_length` entries.
    """
    return [
        DecodeAttention(rows.kv_lengths, tables, rows.active_rows[layer : layer + 1])
        for layer, tables in enumerate(rows.block_tables.unbind())
    ]


def paged_attention(
    queries: Tensor,
    pool: KVPool,
    inputs: AttentionInputs | DecodeAttention,
    scale: float,
    *,
    window: int = NO_WINDOW,
    cap: float | None = None,
    num_rows: Tensor | None = None,
) -> Tensor:
    """Causal attention of `queries` [T, N, D] over the entries of their chunks in `pool`; returns [T, N D].

    Query head n reads key/value head n // (N / M). A row looks at the last `window` entries alone, its own included.
    With a soft `cap` above 0 a score x, already times `scale`, becomes cap * tanh(x / cap).
    """
    if isinstance(inputs, DecodeAttention):
        count = int(inputs.num_rows)
        if count == 0:
            return queries.new_full((queries.shape[0], queries[0].numel()), math.nan)
        found = paged_attention(queries[:count], pool, inputs.inputs(pool.shape[2]), scale, window=window, cap=cap)
        return undefined_beyond(found, queries)
    if num_rows is not None:
        out = paged_attention(queries, pool, inputs, scale, window=window, cap=cap)
        return undefined_beyond(out[live_rows(num_rows)], queries)
    outputs = []
    for group, halves in inputs:
        keys, values = _gather(pool, halves, group, queries.dtype)
        attend = (
            _attend_chunk
            if group.chunks.stop - group.chunks.start < group.rows.stop - group.rows.start
            else _attend_single_rows
        )
        outputs.append(attend(queries[group.rows], keys, values, group.mask_in(window), scale, cap))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _gather(pool: KVPool, halves: Tensor, group: _Group, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values [C, M, kv_length, D] of a group's chunks, in `dtype`, copied out of the pool's blocks."""
    _, _, _, kv_heads, channels = pool.shape
    chunks = group.chunks.stop - group.chunks.start
    entries = read_blocks(pool, halves, dtype)
    entries = entries.view(2, chunks, -1, kv_heads, channels)[:, :, : group.kv_length]
    keys, values = entries.transpose(2, 3).unbind()
    return keys, values


def _attend_single_rows(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, cap: float | None
) -> Tensor:
    """One query row per chunk: the heads of a group are the rows of one small product, so no head is repeated."""
    chunks, heads, channels = queries.shape
    kv_heads = keys.shape[1]
    packed = queries.reshape(chunks, kv_heads, heads // kv_heads, channels)
    if mask is not None:
        # Beyond a chunk's length stand another sequence's old entries. A weight of zero does not silence a NaN
        # there, so they are cleared: no request can reach its neighbours.
        hidden = ~mask[:, None, :, None]
        keys = keys.masked_fill(hidden, 0.0)
        values = values.masked_fill(hidden, 0.0)
        mask = mask[:, None, None, :]
    out = attended(packed, keys, values, mask, scale, cap)
    return out.reshape(chunks, heads * channels)


def _attend_chunk(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, cap: float | None
) -> Tensor:
    """Many query rows of one chunk, each looking at what stands at or before its own position."""
    rows, heads, channels = queries.shape
    out = attended(queries.transpose(0, 1).unsqueeze(0), keys, values, mask, scale, cap, enable_gqa=True)
    return out[0].transpose(0, 1).reshape(rows, heads * channels)


def live_rows(num_rows: Tensor) -> slice:
    """The rows to compute, of tensors that may have more."""
    return slice(0, int(num_rows))


def undefined_beyond(out: Tensor, like: Tensor) -> Tensor:
    """`out` with as many rows as `like` has: NaN, or -1 for integers, in those that were not computed."""
    filler = math.nan if out.is_floating_point() else -1
    padded = out.new_full((like.shape[0], *out.shape[1:]), filler)
    padded[: out.shape[0]] = out
    return padded


def attended(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    cap: float | None,
    *,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention [..., N, T, D] of `queries` [..., N, T, D] to `keys` and `values` [..., M, S, D].

    `mask` is True where a query may look, None where it may look everywhere; `cap` as of `paged_attention`.
    """
    if cap is None:
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
    group = queries.shape[-3] // keys.shape[-3]
    keys, values = (part.repeat_interleave(group, dim=-3) for part in (keys, values))
    scores = soft_capped(queries @ keys.transpose(-1, -2) * scale, cap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype) @ values


def soft_capped(values: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(values / cap); None: `values` themselves."""
    return values if cap is None else torch.tanh(values / cap) * cap
