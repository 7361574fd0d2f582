"""What the schedules of requests promise, before anything is generated."""

from __future__ import annotations

from functools import lru_cache

from d3engine.depth import Schedule
from d3engine.request.sequence import Sequence

NUM_KEPT = 64
"""Sums to remember: most requests share a few schedules and lengths, but each may bring its own."""


class NominalDepth:
    """The mean depth that the schedules promise over the longest answers allowed, whatever is really generated."""

    def __init__(self) -> None:
        self._layers = 0
        self._tokens = 0
        self._layers_of = lru_cache(NUM_KEPT)(_layers_of)

    def count(self, sequence: Sequence) -> None:
        tokens = sequence.max_length - len(sequence.prompt_token_ids)
        self._layers += self._layers_of(sequence.schedule, tokens)
        self._tokens += tokens

    def mean(self) -> float | None:
        """Layers per token over all sequences so far; None before the first."""
        return self._layers / self._tokens if self._tokens else None


def _layers_of(schedule: Schedule, tokens: int) -> int:
    """Layers that a schedule runs for its first `tokens` generated tokens."""
    return int(schedule.depths(tokens).sum())
