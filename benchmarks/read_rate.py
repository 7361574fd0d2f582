"""The rate at which this machine reads memory, for what is spent on reading to be compared with."""

from __future__ import annotations

from collections.abc import Callable

import torch

COLUMNS = 2**12


class Reader:
    """Float32 numbers, `size` bytes of them (a multiple of 16 KiB), that torch's threads read.

    Sums and products with a vector are the plainest things to be done with all of them. Whichever is faster counts,
    since what is asked for is what memory gives.
    """

    def __init__(self, size: int) -> None:
        self._values = torch.ones(size // (4 * COLUMNS), COLUMNS)
        self._vector = torch.ones(COLUMNS)

    def rate(self, times: int, clock: Callable[[], float]) -> float:
        """Bytes a second of `clock`: the best of `times` sums and as many products."""
        best = float("inf")
        for read in [self._values.sum, lambda: self._values @ self._vector] * times:
            start = clock()
            read()
            best = min(best, clock() - start)
        return self._values.nbytes / best
