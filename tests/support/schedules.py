"""Reading schedules layer by layer."""

import numpy as np

from d3engine.depth import Schedule


def layers_run(schedule: Schedule, step: int) -> list[int]:
    return np.flatnonzero(schedule.active(step)).tolist()
