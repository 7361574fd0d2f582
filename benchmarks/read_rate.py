"""The rate at which this machine reads memory, for what is spent on reading to be compared with."""

from __future__ import annotations

import time

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

    def rate(self, times: int) -> float:
        """Bytes a second: the best of `times` sums and as many products."""
        best = float("inf")
        for read in [self._values.sum, lambda: self._values @ self._vector] * times:
            start = time.perf_counter()
            read()
            best = min(best, time.perf_counter() - start)
        return self._values.nbytes / best
