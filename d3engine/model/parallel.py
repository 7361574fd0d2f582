"""What the ranks of a model that lies on several devices do together, as the model sees it.

The one idea: hidden states are a sum. Each rank has some of the heads and of the MLP's channels, so what it computes of
a layer is a term of what the layer adds to the residual stream. Rank 0 adds its terms to the stream, the others theirs
to zeros, and the sum over the ranks is on each of them the same states again. A model that lies on one device has
nothing to add up, and pays nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from d3engine.kernels.matrices import Table, looked_up
from d3engine.model.part import Part


class Collectives(Protocol):
    """What all ranks of a model call together, each with a tensor of the same shape and dtype."""

    def sum_(self, tensor: Tensor) -> None:
        """Put the sum of all ranks' tensors into each of them; the same bits everywhere."""
        ...

    def gather(self, tensor: Tensor) -> Tensor:
        """All ranks' tensors, [ranks, ...]."""
        ...

    def agree_(self, tensor: Tensor) -> None:
        """Put rank 0's tensor into each of them."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class Ranks:
    """A model's part on this rank, and what joins it to the others."""

    part: Part
    collectives: Collectives

    def begin_term_(self, hidden: Tensor) -> None:
        """Make room for this rank's term of a sum: the residual stream is rank 0's to bring."""
        if self.part.rank:
            hidden.zero_()

    def embed(self, token_ids: Tensor, table: Table, dtype: torch.dtype) -> Tensor:
        """Rows [T, H] of an embedding of which each rank has its own tokens' rows, as `table`."""
        places = token_ids - self.part.tokens.start
        is_own = (places >= 0) & (places < len(self.part.tokens))
        states = looked_up(table, places.where(is_own, 0), dtype).masked_fill_(~is_own.unsqueeze(1), 0.0)
        self.collectives.sum_(states)
        return states

    def best(self, tokens: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The best token int64 [T] and its score float32 [T], of each rank's best among its own tokens.

        Of equal scores the lowest token wins, and NaN wins over all, as in an argmax of the whole.
        """
        bits = scores.contiguous().view(torch.int32).long()
        every = self.collectives.gather(torch.stack((tokens + self.part.tokens.start, bits)))
        all_scores = every[:, 1].int().view(torch.float32)
        first = all_scores.argmax(dim=0, keepdim=True)  # ranks hold their tokens in order
        return every[:, 0].gather(0, first).squeeze(0), all_scores.gather(0, first).squeeze(0)

    def logits(self, own: Tensor) -> Tensor:
        """Logits [T, V] of which each rank has computed those of its own tokens."""
        sizes = [len(tokens) for tokens in self.part.vocabulary]
        if not len(own):  # of no rows there is nothing to tell each other
            return own.new_empty(0, sum(sizes))
        padded = own.new_zeros(own.shape[0], max(sizes))
        padded[:, : own.shape[1]] = own
        every = self.collectives.gather(padded)
        return torch.cat([rows[:, :size] for rows, size in zip(every, sizes, strict=True)], dim=1)
