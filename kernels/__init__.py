"""Every operation of the model, tensors in and tensors out; nothing here knows of the engine.

One file an implementation or an operation. `reference.py` has every operation in plain torch: it is the specification,
the CPU path and the oracle of the other implementations. `for_device` is the one table that picks among them.
"""

from __future__ import annotations

from types import ModuleType

import torch

from d3engine.kernels import reference

_BY_DEVICE: dict[str, ModuleType] = {"cpu": reference, "cuda": reference}


def for_device(device: torch.device) -> ModuleType:
    """Return the module that holds the operations for `device`; raise `ValueError` for a device without any."""
    if device.type not in _BY_DEVICE:
        raise ValueError(f"device={str(device)!r} is not allowed: one of {sorted(_BY_DEVICE)}")
    return _BY_DEVICE[device.type]
