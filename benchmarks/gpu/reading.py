"""A kernel that only reads, with as many bytes under way as it is told: its rates give the latency of a load."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048
"""int32 numbers that a program loads at once: 8 KiB."""


def read(source: Tensor, programs: int, stages: int) -> Tensor:
    """Add up `source` int32 in `programs` programs, each with `stages` - 1 tiles under way; their sums, int32.

    What is left over when tiles are dealt out evenly is not read.
    """
    sums = torch.empty(programs, dtype=torch.int32, device=source.device)
    _read_kernel[(programs,)](source, sums, source.numel() // (programs * TILE), TILE, stages)
    return sums


@triton.jit
def _read_kernel(source, sums, STEPS: tl.constexpr, SIZE: tl.constexpr, STAGES: tl.constexpr):
    begin = source + tl.program_id(0).to(tl.int64) * STEPS * SIZE
    total = tl.zeros([SIZE], tl.int32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        total += tl.load(begin + step * SIZE + tl.arange(0, SIZE), eviction_policy="evict_first")
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))
