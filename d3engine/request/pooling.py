"""Embeddings: the last hidden states of a prompt, after the final norm, pooled into one vector."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from d3engine.errors import FailedError, require_integer
from d3engine.request.outputs import RequestOutput

FloatArray: TypeAlias = npt.NDArray[np.float32]


class PromptPooling:
    """Pools the states of one prompt, whose chunks come in order.

    A preempted prompt is computed again from its beginning; states that are known stay.
    """

    def __init__(self, pooling: str) -> None:
        self._takes_mean = pooling == "mean"
        self._sum: npt.NDArray[np.float64] | None = None
        self._num_known = 0

    def take(self, positions: npt.NDArray[np.int64], states: FloatArray) -> None:
        """Add the states [T, H] of these positions."""
        fresh = states[positions >= self._num_known] if self._takes_mean else states
        if not len(fresh):
            return
        added = fresh.sum(axis=0, dtype=np.float64)
        self._sum = added if self._sum is None or not self._takes_mean else self._sum + added
        self._num_known = int(positions[-1]) + 1

    def pooled(self) -> list[float]:
        """The vector [H], neither cut nor normalized; empty where no state has come."""
        if self._sum is None:
            return []
        whole = self._sum / self._num_known if self._takes_mean else self._sum
        found: list[float] = whole.astype(np.float32).tolist()
        return found


def embedding_of(output: RequestOutput, *, normalize: bool, dimensions: int | None) -> FloatArray:
    """The embedding of a request by `pooling_params`, cut to its first `dimensions` and then, with `normalize`, of
    length 1.

    Raises `InvalidValueError` for more dimensions than there are, `FailedError` where the model's states were of no
    use.
    """
    pooled = output.embedding
    if not pooled or any(answer.finish_reason == "abort" for answer in output.outputs):
        why = next((answer.stop_reason for answer in output.outputs if answer.stop_reason), "it was aborted")
        raise FailedError(f"the embedding of request {output.request_id} has failed: {why}")
    if dimensions is not None:
        require_integer("dimensions", dimensions, 1, len(pooled))
    found: FloatArray = np.asarray(pooled[:dimensions], np.float32)
    if normalize:
        length = float(np.linalg.norm(found.astype(np.float64)))
        found = (found / max(length, 1e-12)).astype(np.float32)
    return found
