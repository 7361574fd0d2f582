"""In which dtype the KV cache is held: that of activations, or 8-bit floats with scales (`kernels/kv_pool.py`)."""

from __future__ import annotations

import torch

from d3engine.errors import require
from d3engine.kernels.kv_pool import FP8, FP8_CAPABILITY
from d3engine.loading.device import capability

NAMES = ("auto", "fp8", "fp8_e4m3")
"""As in vLLM; "auto" is the dtype of activations, the other two are the same."""

ARGUMENT = "kv_cache_dtype"


def resolve_kv_cache_dtype(given: str, *, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of the cache's entries beside activations of `dtype`.

    Raises `InvalidValueError` for another name, and for fp8 on a GPU that converts no such values.
    """
    named = named_dtype(given, dtype)
    if named == dtype:
        return dtype
    if device.type == "cuda":
        here = capability(device)
        allowed = f"auto on a GPU of compute capability {here / 10}: 8.9 is the first that converts 8-bit floats"
        require(here >= FP8_CAPABILITY, ARGUMENT, given, allowed)
    return named


def named_dtype(given: str, dtype: torch.dtype, field: str = ARGUMENT) -> torch.dtype:
    """What `given` stands for beside activations of `dtype`, on whatever device.

    Raises `InvalidValueError` for another name, by that of its `field`.
    """
    require(isinstance(given, str) and given in NAMES, field, given, f"one of {', '.join(NAMES)}")
    return dtype if given == "auto" else FP8
