"""Kernels that begin while the one before ends: turned on for a process whose devices have shown that they can."""

from __future__ import annotations

import logging

import torch

from d3engine.environment import KERNELS, PROGRAMMATIC_LAUNCH
from d3engine.executor.recording import Recorder
from d3engine.loading.device import capability

_log = logging.getLogger(__name__)
_faults: dict[torch.device, str | None] = {}


def has_programmatic_launch(device: torch.device, recorder: Recorder) -> bool:
    """Whether kernels on `device` are launched so from now on, as D3ENGINE_PROGRAMMATIC_LAUNCH says.

    Each device is asked once, by launches that `recorder` repeats as the engine's steps will be. One that has them and
    fails ends them for the whole process, and it is said what that costs.
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
        _faults[device] = fault = programmatic.fault(device, recorder.record)
        if fault is not None:
            lost = "no kernel on %s begins before the one in front of it has ended, as its trial failed: %s"
            _log.warning(lost, device, fault)
    launches.PROGRAMMATIC = not any(_faults.values())
    return launches.PROGRAMMATIC
