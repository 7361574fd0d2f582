"""Chunks of rows over the entries of a pool, and their attention by its definition."""

import math
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from d3engine.kernels.kv_pool import NO_WINDOW


class Paged:
    """Random queries and entries for several chunks; whatever no chunk owns is NaN or infinite."""

    def __init__(
        self,
        lengths: list[int],
        row_counts: list[int] | None = None,
        *,
        heads: int = 2,
        kv_heads: int = 2,
        channels: int = 32,
        block_size: int = 16,
        window: int = NO_WINDOW,
        cap: float | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(sum(lengths) + channels)
        self.lengths, self.row_counts = lengths, row_counts or [1] * len(lengths)
        self.starts = [0, *accumulate(self.row_counts)]
        self.scale, self.window, self.cap = channels**-0.5, window, cap
        per_chunk = [-(-length // block_size) for length in lengths]
        blocks = torch.randperm(sum(per_chunk), generator=generator) + 1
        self.pool: Any = torch.full((len(blocks) + 1, 2, block_size, kv_heads, channels), torch.nan)
        self.pool[:, :, 1::2] = torch.inf
        self.tables = torch.zeros(len(lengths), max(per_chunk, default=0), dtype=torch.int64)  # block 0 is padding
        self.entries = []
        for chunk, (length, own) in enumerate(zip(lengths, blocks.split(per_chunk), strict=True)):
            self.tables[chunk, : len(own)] = own
            entries = torch.randn(length, 2, kv_heads, channels, generator=generator)
            entries[:, 0] *= 3.0  # weights that differ by orders of magnitude
            positions = torch.arange(length)
            self.pool[own[positions // block_size], :, positions % block_size] = entries
            self.entries.append(entries.transpose(0, 1).to(dtype).double())
        self.pool = self.pool.to(device=device, dtype=dtype)
        self.tables = self.tables.to(device)
        queries = torch.randn(self.starts[-1], heads, channels, generator=generator)
        self.queries = queries.to(device=device, dtype=dtype)

    def inputs(self, operations: Any) -> Any:
        return operations.attention_inputs(self.starts, self.lengths, self.tables.unsqueeze(0))[0]

    def attend(self, operations: Any) -> Tensor:
        """Attention by `operations`, which are Triton's or the reference's."""
        given = {"window": self.window, "cap": self.cap}
        found: Tensor = operations.paged_attention(
            self.queries, self.pool, self.inputs(operations), self.scale, **given
        )
        return found

    def expected(self) -> Tensor:
        """[T, N D] float64, from the definition: the row r of n looks at the first length - n + r + 1 entries."""
        out = []
        queries = self.queries.cpu().double().split(self.row_counts)
        for chunk, (keys, values), rows in zip(queries, self.entries, self.row_counts, strict=True):
            group = chunk.shape[1] // keys.shape[1]
            scores = torch.einsum("rnd,knd->nrk", chunk, keys.repeat_interleave(group, 1)) * self.scale
            scores = scores if self.cap is None else self.cap * torch.tanh(scores / self.cap)
            ends = torch.arange(keys.shape[0] - rows, keys.shape[0])
            scores.masked_fill_(torch.arange(keys.shape[0]) > ends[:, None], -math.inf)
            scores.masked_fill_(torch.arange(keys.shape[0]) <= ends[:, None] - self.window, -math.inf)
            weights = scores.softmax(-1)
            out.append(torch.einsum("nrk,knd->rnd", weights, values.repeat_interleave(group, 1)).flatten(1))
        return torch.cat(out)
