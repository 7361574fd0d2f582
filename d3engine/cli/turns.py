"""How much faster one way is than another, by taking turns.

The one idea: on a machine with other work each measurement is wrong, but whatever slows the machine for a while slows
both halves of a round, so the median of the rounds' ratios says what one run of each cannot.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

MOST_ROUNDS = 9
ENOUGH_SECONDS = 5.0


@dataclass(frozen=True)
class Speedup:
    """The median over rounds of one way's time over the other's."""

    ratio: float
    rounds: int

    def __str__(self) -> str:
        """ "1.7x faster (median of 9 turns)"."""
        factor, way = (self.ratio, "faster") if self.ratio >= 1 else (1 / self.ratio, "slower")
        how = "as fast" if f"{factor:.1f}" == "1.0" else f"{factor:.1f}x {way}"
        return f"{how} (median of {self.rounds} turns)" if self.rounds > 1 else f"{how} (one turn each)"


def speedup(
    slow: Callable[[], float],
    fast: Callable[[], float],
    *,
    most_rounds: int = MOST_ROUNDS,
    enough_seconds: float = ENOUGH_SECONDS,
) -> Speedup:
    """How much faster `fast` is than `slow`; each call runs one and returns the seconds that count.

    Ends after `most_rounds` rounds, or with the round in which `enough_seconds` have gone by. Every other round begins
    with the other one.
    """
    ratios: list[float] = []
    began = time.perf_counter()
    while len(ratios) < most_rounds and (not ratios or time.perf_counter() - began < enough_seconds):
        if len(ratios) % 2:
            after = fast()
            before = slow()
        else:
            before = slow()
            after = fast()
        ratios.append(before / after)
    return Speedup(median(ratios), len(ratios))
