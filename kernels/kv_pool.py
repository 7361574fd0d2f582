"""The KV pool, in the dtype of activations or in 8-bit floats: what a kernel writes entries to and reads them from.

In the 8-bit form each head of each entry has a scale of its own, the largest magnitude it holds over the
largest that e4m3 can hold. So nothing is calibrated and nothing overflows, an entry's bytes depend on that entry alone,
and they mean the same in whichever layer's block a copy of it stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest finite value of e4m3fn, which has no infinities (Micikevicius et al. 2022, arXiv 2209.05433, table 1)."""

FP8_CAPABILITY = 89
"""The first compute capability, without its point, that converts from and to such values."""

NO_WINDOW = 2**31 - 1
"""The sliding window of attention without one, in positions: more than any text has."""

SMALLEST = 2.0**-100
"""What a head's largest magnitude counts as at least, so that a head of zeros has a scale by which one can divide."""


@dataclass(frozen=True, eq=False, slots=True)
class Fp8Pool:
    """`values` float8_e4m3fn [num_blocks, 2, block_size, M, D] times `scales` float32 [num_blocks, 2, M, block_size].

    Of a head the scales of a block are neighbours: a program that reads one head reads them at once.
    """

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        """(num_blocks, 2, block_size, M, D)."""
        return self.values.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """What it is made of: the values, then the scales."""
        return self.values, self.scales

    def is_contiguous(self) -> bool:
        return self.values.is_contiguous() and self.scales.is_contiguous()


KVPool: TypeAlias = Tensor | Fp8Pool
"""Entries as they were computed, [num_blocks, 2, block_size, M, D] of a float dtype, or in 8 bits."""


def values_and_scales(pool: KVPool) -> tuple[Tensor, Tensor | None]:
    """What lies in memory: the entries [num_blocks, 2, block_size, M, D], and their scales if they have any."""
    return (pool.values, pool.scales) if isinstance(pool, Fp8Pool) else (pool, None)


def block_bytes(block_size: int, kv_heads: int, channels: int, dtype: torch.dtype) -> int:
    """Bytes of a block in a pool of `dtype`: keys and values of `block_size` entries, and their scales."""
    scale = torch.float32.itemsize if dtype == FP8 else 0
    return 2 * block_size * kv_heads * (channels * dtype.itemsize + scale)


def write_entries(pool: KVPool, entries: Tensor, heads: Tensor) -> None:
    """Write `heads` [n, M, D] at the flat `entries` int64 [n] of `pool`; a value that is not finite spoils its head."""
    if isinstance(pool, Fp8Pool):
        values, scales = quantized(heads)
        _by_entry(pool.values.view(torch.uint8)).index_copy_(0, entries, values.view(torch.uint8).flatten(1))
        pool.scales.view(-1, *pool.scales.shape[2:])[_places(pool, entries)] = scales
    else:
        _by_entry(pool).index_copy_(0, entries, heads.flatten(1))


def quantized(heads: Tensor) -> tuple[Tensor, Tensor]:
    """`heads` [..., D] as float8_e4m3fn [..., D], and their scales float32 [...]."""
    wide = heads.float()
    scales = wide.abs().amax(dim=-1).clamp_(min=SMALLEST) / LARGEST
    return (wide / scales.unsqueeze(-1)).to(FP8), scales


def read_blocks(pool: KVPool, halves: Tensor, dtype: torch.dtype) -> Tensor:
    """The entries [n, block_size, M, D] of half-blocks `halves` int64 [n] in `dtype`; block b has its keys in 2 b, its
    values in 2 b + 1."""
    if isinstance(pool, Fp8Pool):
        values = pool.values.view(torch.uint8).flatten(0, 1).index_select(0, halves).view(FP8)
        scales = pool.scales.flatten(0, 1).index_select(0, halves)
        return values.float().mul_(scales.transpose(1, 2).unsqueeze(-1)).to(dtype)
    return pool.flatten(0, 1).index_select(0, halves)


def copy_entries(pool: KVPool, source: Tensor, target: Tensor) -> None:
    """Copy the flat entries `source` int64 [n] of `pool` to `target` [n], to the bit."""
    if isinstance(pool, Fp8Pool):
        _copy(_by_entry(pool.values.view(torch.uint8)), source, target)
        scales = pool.scales.view(-1, *pool.scales.shape[2:])
        scales[_places(pool, target)] = scales[_places(pool, source)]
    else:
        _copy(_by_entry(pool), source, target)


def _copy(flat: Tensor, source: Tensor, target: Tensor) -> None:
    flat.index_copy_(0, target, flat.index_select(0, source))


def _by_entry(pool: Tensor) -> Tensor:
    """A view [entries, M D]."""
    return pool.view(-1, pool.shape[3] * pool.shape[4])


def _places(pool: Fp8Pool, entries: Tensor) -> tuple[Tensor, slice, Tensor]:
    """Where the scales of `entries` stand in a view [half-blocks, M, block_size] of all."""
    size = pool.shape[2]
    return entries // size, slice(None), entries % size
