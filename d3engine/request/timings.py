"""How long steps and requests took: running sums and counts by size, ready for a monitor to read.

The one idea: a monitor wants histograms, and looks every few seconds. So nothing is kept of a single step or request
but a count in a bucket, and a step costs the same whatever its batch.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from d3engine.request.outputs import RequestMetrics

STEP_SECONDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
STEP_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
REQUEST_SECONDS = (1e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 1000.0)


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many values there were of each size, and their sum.

    `counts[i]` are those of at most `bounds[i]` that are above the bound before it; the last count, one more than there
    are bounds, is of all that are above every bound.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """How many values there were in all."""
        return sum(self.counts)


class HistogramCounter:
    """A histogram that grows."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def histogram(self) -> Histogram:
        return Histogram(self._bounds, tuple(self._counts), self._sum)


class Timings:
    """Of one engine, since it began. A run of several steps counts as so many of equal length."""

    def __init__(self) -> None:
        self.step_seconds = HistogramCounter(STEP_SECONDS)
        self.step_rows = HistogramCounter(STEP_ROWS)
        self.queue_seconds = HistogramCounter(REQUEST_SECONDS)
        self.prefill_seconds = HistogramCounter(REQUEST_SECONDS)
        self.decode_seconds = HistogramCounter(REQUEST_SECONDS)
        self.last_step_time: float | None = None
        self.last_step_seconds: float | None = None
        self.last_step_rows: int | None = None

    def count_steps(self, num_steps: int, num_rows: int, begun: float, ended: float) -> None:
        """Count `num_steps` steps of `num_rows` rows each, which began and ended then by the monotonic clock."""
        self.last_step_time = ended
        self.last_step_seconds = (ended - begun) / num_steps
        self.last_step_rows = num_rows
        self.step_seconds.add(self.last_step_seconds, num_steps)
        self.step_rows.add(num_rows, num_steps)

    def count_request(self, metrics: RequestMetrics) -> None:
        """Count a finished request, as far as it came."""
        for tally, seconds in (
            (self.queue_seconds, metrics.queue_seconds),
            (self.prefill_seconds, metrics.prefill_seconds),
            (self.decode_seconds, metrics.decode_seconds),
        ):
            if seconds is not None:
                tally.add(seconds)
