"""A clock for rehearsals of the GPU round: it moves with the work, so a machine of any speed has the same times."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.common import Round
from d3engine.scheduling.plan import Plan
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
    update = Scheduler.update

    def timed_update(scheduler: Scheduler, plan: Plan, *given: Any) -> Any:
        clock.now += 1e-2 * plan.num_steps
        return update(scheduler, plan, *given)

    for module in ("arrivals", "common", "peers"):
        patch.setattr(f"benchmarks.gpu.{module}.time", clock)
    patch.setattr("benchmarks.gpu_round.time", clock)
    patch.setattr("d3engine.text.output.time", clock)
    patch.setattr(Scheduler, "update", timed_update)
    return clock
