"""The rows of a decode step as they stand on the device, from one step to the next.

Between the steps of a run nothing comes from the host: each row's token, position and generation step are advanced
here, and what the layers read (lengths, entries, how many rows run each layer) is derived from them here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class DecodeRows:
    """B rows, of which the first `num_rows` live; each is one sequence that decodes one token per step.

    Rows are ordered so that those which run a layer come first, at every step of the run. L layers, D channels per
    head, S steps. All tensors stay where they are: a captured graph knows their addresses.
    """

    num_rows: Tensor  # int32 [1]
    # Advanced by every step.
    tokens: Tensor  # int64 [B] the token to feed
    positions: Tensor  # int64 [B] its position
    steps: Tensor  # int64 [B] its generation step
    taken: Tensor  # int32 [1] steps that the run has taken, which may be more than S
    # The same for a whole run.
    cutoffs: Tensor  # int32 [B, L] layer l runs for row r while steps[r] < cutoffs[r, l]
    block_tables: Tensor  # int32 [L, B, blocks]
    # Derived at the beginning of every step.
    kv_lengths: Tensor  # int32 [B] entries after the step
    active_rows: Tensor  # int32 [L] how many rows run each layer
    entries: Tensor  # int64 [L, B, 2] where the keys and values of the rows go
    rotations: Tensor  # complex64 [B, D / 2]; those of every rope side by side
    # What the last S steps have yielded, step t at t mod S: chosen and scores are views of it, so that one copy brings
    # both to the host.
    yielded: Tensor  # int32 [S, 3 B or more]
    chosen: Tensor  # int64 [S, B]
    scores: Tensor  # float32 [S, B]; a row without a finite one has met a fault

    @classmethod
    def empty(
        cls, rows: int, layers: int, blocks: int, head_dim: int, steps: int, device: torch.device | str
    ) -> DecodeRows:
        """Room for `rows` rows, none of which lives yet."""

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        yielded = zeros(steps, (3 * rows + 1) // 2 * 2, dtype=torch.int32)  # even, for whole tokens
        chosen, scores = tokens_and_scores(yielded, rows)
        return cls(
            num_rows=zeros(1, dtype=torch.int32),
            tokens=zeros(rows, dtype=torch.int64),
            positions=zeros(rows, dtype=torch.int64),
            steps=zeros(rows, dtype=torch.int64),
            taken=zeros(1, dtype=torch.int32),
            cutoffs=zeros(rows, layers, dtype=torch.int32),
            block_tables=zeros(layers, rows, blocks, dtype=torch.int32),
            kv_lengths=zeros(rows, dtype=torch.int32),
            active_rows=zeros(layers, dtype=torch.int32),
            entries=zeros(layers, rows, 2, dtype=torch.int64),
            rotations=zeros(rows, head_dim // 2, dtype=torch.complex64),
            yielded=yielded,
            chosen=chosen,
            scores=scores,
        )

    def first(self, count: int) -> DecodeRows:
        """The first `count` rows: views of the same memory."""
        return replace(
            self,
            tokens=self.tokens[:count],
            positions=self.positions[:count],
            steps=self.steps[:count],
            cutoffs=self.cutoffs[:count],
            block_tables=self.block_tables[:, :count],
            kv_lengths=self.kv_lengths[:count],
            entries=self.entries[:, :count],
            rotations=self.rotations[:count],
            chosen=self.chosen[:, :count],
            scores=self.scores[:, :count],
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return sum(tensor.nbytes for name, tensor in vars(self).items() if name not in ("chosen", "scores"))


def tokens_and_scores(yielded: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The `chosen` int64 [S, rows] and `scores` float32 [S, rows] that lie in `yielded`, of `rows` rows in all."""
    return yielded[:, : 2 * rows].view(torch.int64), yielded[:, 2 * rows : 3 * rows].view(torch.float32)
