"""Kernels that begin while the one before ends: turned on for a process whose devices have shown that they can."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from d3engine.environment import KERNELS, PROGRAMMATIC_LAUNCH
from d3engine.executor.graph_shapes import Recorder
from d3engine.loading.device import capability

_log = logging.getLogger(__name__)
_faults: dict[torch.device, str | None] = {}


def settle_programmatic_launch(device: torch.device, new_recorder: Callable[[], Recorder]) -> bool:
    """Turn such launches on or off, as D3ENGINE_PROGRAMMATIC_LAUNCH and `device` say; returns whether they are on.

    Each device is tried once, by launches that a `new_recorder()` repeats as the engine's steps will be. One that has
    them and fails ends them for the whole process, and it is said why.
    """
    if KERNELS.read() == "reference":
        return False
    # Imported late, as nothing imports Triton where no kernel of its runs.
    from d3engine.kernels.triton import launches, programmatic

    launches.PROGRAMMATIC = False
    if PROGRAMMATIC_LAUNCH.read() == "off" or capability(device) < launches.PROGRAMMATIC_CAPABILITY:
        return False
    if device not in _faults:
        launches.PROGRAMMATIC = True
        _faults[device] = fault = programmatic.fault(device, new_recorder().record)
        if fault is not None:
            lost = "no kernel on %s begins before the one in front of it has ended, as its trial failed: %s"
            _log.warning(lost, device, fault)
    launches.PROGRAMMATIC = not any(_faults.values())
    return launches.PROGRAMMATIC
