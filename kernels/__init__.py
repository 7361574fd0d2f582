"""Every operation of the model, tensors in and tensors out; nothing here knows of the engine.

One file an implementation or an operation. `reference.py` has every operation in plain torch, attention in a file
beside it: it is the specification, the CPU path and the oracle of the other implementations. `triton/` has them for a
GPU. `for_device` picks between them.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch

_BY_DEVICE = {"cpu": "torch", "cuda": "triton"}
_MODULES = {"torch": "d3engine.kernels.reference", "triton": "d3engine.kernels.triton"}


def for_device(device: torch.device, implementation: str = "auto", *, batch_invariant: bool = False) -> ModuleType:
    """The module that holds the operations for `device`: the one made for it, or another by name.

    With `batch_invariant` what an operation makes of a row is the same bits in any batch: Triton's alone.
    Raises `ValueError` for a device without operations and for an unknown name. Triton runs on a CPU only in its
    interpreter (TRITON_INTERPRET=1 before Triton is first imported).
    """
    if device.type not in _BY_DEVICE:
        raise ValueError(f"device must be one of {', '.join(_BY_DEVICE)}; got {str(device)!r}")
    if implementation not in ("auto", *_MODULES):
        raise ValueError(f"implementation must be auto, or one of {', '.join(_MODULES)}; got {implementation!r}")
    chosen = _BY_DEVICE[device.type] if implementation == "auto" else implementation
    if batch_invariant:
        if chosen != "triton":
            raise ValueError(f"implementation must be triton where batch_invariant is True; got {chosen!r}")
        return import_module(f"{_MODULES[chosen]}.batch_invariant")
    return import_module(_MODULES[chosen])
