"""The two orders in which files keep the channels of query and key heads.

The one idea: rope pairs channels. transformers pairs channel j of a head with j + head_dim / 2; Meta's files,
llama2.c's, GGUF files and this engine keep the two of a pair next to each other.
"""

from __future__ import annotations

from torch import Tensor


def to_adjacent_pairs(weight: Tensor, num_heads: int) -> Tensor:
    """Permute rows per head from half-split order (channel j paired with j + D / 2) to adjacent pairs (2j, 2j
    + 1).

    weight: [num_heads * D, ...], any dtype. Returns the same shape, contiguous.
    """
    halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def to_half_split(weight: Tensor, num_heads: int) -> Tensor:
    """The inverse of `to_adjacent_pairs`: from the order of Meta's and llama2.c's files to transformers'."""
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def adjacent_row(row: int, num_heads: int, num_rows: int) -> int:
    """Where in adjacent pairs that row lies which is number `row` in half-split order."""
    size = num_rows // num_heads
    head, channel = divmod(row, size)
    half, pair = divmod(channel, size // 2)
    return head * size + 2 * pair + half
