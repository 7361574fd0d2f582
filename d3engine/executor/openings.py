"""A step of prompts with the run behind it: which chunks go on, and what both have brought together.

An answer that ends with its token of the opening, or meets a fault there, has no row in the run. So the run's columns
are spread over the chunks again; what then stands at those that ended is never read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from d3engine.cache.kv_cache import IntArray
from d3engine.plan import Chosen, Plan
from d3engine.request.sequence import Sequence


@dataclass(frozen=True)
class GoingOn:
    """Those of `count` chunks whose answers go on behind the opening, and the token that each has there."""

    count: int
    chunks: IntArray  # [n], in order
    sequences: list[Sequence]
    token_ids: IntArray  # [n]

    @classmethod
    def of(cls, plan: Plan, opening: Chosen) -> GoingOn:
        """Of the chunks of `plan`, each of which has chosen a token, [1, C], in its opening."""
        token_ids, scores = opening.token_ids[0], opening.scores[0]
        chunks = [
            chunk
            for chunk, (token, score) in enumerate(zip(token_ids.tolist(), scores.tolist(), strict=True))
            if math.isfinite(score) and not plan.sequences[chunk].would_end(token, after=1)
        ]
        sequences = [plan.sequences[chunk] for chunk in chunks]
        return cls(len(token_ids), np.array(chunks, np.int64), sequences, token_ids[chunks])

    def spread(
        self, token_ids: npt.NDArray[np.int64], scores: npt.NDArray[np.float32]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """What the run's rows have chosen, [S, n] each, as columns of all chunks, [S, C]."""
        if len(self.chunks) == self.count:
            return token_ids, scores
        everywhere = np.zeros((len(token_ids), self.count), token_ids.dtype)
        of_all = np.zeros(everywhere.shape, scores.dtype)
        everywhere[:, self.chunks], of_all[:, self.chunks] = token_ids, scores
        return everywhere, of_all
