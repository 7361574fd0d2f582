"""A clock for rehearsals of the GPU round: it moves with the work, so a machine of any speed has the same times."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.common import Round
from d3engine.scheduling.scheduler import Scheduler

ROOT = Path(__file__).parents[2]
HERE = Round(torch.device("cpu"), True, 1e6)  # this clock starts now, so its end must be out of reach


@dataclass
class Clock:
    """Stands while nothing is done: moves with each look, with each step of an engine, and where somebody sleeps."""

    now: float = 0.0

    def monotonic(self) -> float:
        self.now += 1e-3
        return self.now

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def set_clock(patch: pytest.MonkeyPatch) -> Clock:
    """Whoever asks for the time in a round, or in the engine, asks the clock that is returned."""
    clock = Clock()
    schedule = Scheduler.schedule

    def timed_schedule(scheduler: Scheduler) -> Any:
        clock.now += 1e-2
        return schedule(scheduler)

    for module in ("arrivals", "common", "peers"):
        patch.setattr(f"benchmarks.gpu.{module}.time", clock)
    patch.setattr("benchmarks.gpu_round.time", clock)
    patch.setattr("d3engine.text.output.time", clock)
    patch.setattr(Scheduler, "schedule", timed_schedule)
    return clock
