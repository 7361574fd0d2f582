"""How much faster one way is than another, by taking turns.

The one idea: on a machine with other work each measurement is wrong, but whatever slows the machine for a while slows
both halves of a round, so the median of the rounds' ratios says what one run of each cannot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

MOST_ROUNDS = 9
ENOUGH_SECONDS = 5.0


@dataclass(frozen=True)
class Speedup:
    """The median over rounds of one way's time over the other's."""

    ratio: float
    rounds: int

    @property
    def words(self) -> str:
        """ "1.7x faster"."""
        factor, way = (self.ratio, "faster") if self.ratio >= 1 else (1 / self.ratio, "slower")
        return "as fast" if f"{factor:.1f}" == "1.0" else f"{factor:.1f}x {way}"

    def __str__(self) -> str:
        """ "1.7x faster (median of 9 turns)"."""
        return f"{self.words} (median of {self.rounds} turns)" if self.rounds > 1 else f"{self.words} (one turn each)"


def speedups(
    slow: Callable[[], Sequence[float]],
    fast: Callable[[], Sequence[float]],
    *,
    most_rounds: int = MOST_ROUNDS,
    enough_seconds: float = ENOUGH_SECONDS,
) -> list[Speedup]:
    """How much faster `fast` is than `slow` in each of the seconds that both tell; each call runs one and returns them.

    Ends after `most_rounds` rounds, or with the round in which `enough_seconds` have gone by. Every other round begins
    with the other one.
    """
    rounds: list[list[float]] = []
    began = time.perf_counter()
    while len(rounds) < most_rounds and (not rounds or time.perf_counter() - began < enough_seconds):
        if len(rounds) % 2:
            after = fast()
            before = slow()
        else:
            before = slow()
            after = fast()
        rounds.append([a / b for a, b in zip(before, after, strict=False)])
    return [Speedup(median(ratios), len(ratios)) for ratios in zip(*rounds, strict=False)]
