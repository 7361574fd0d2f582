"""The bridges that an engine of these settings may use."""

from __future__ import annotations

import torch

from d3engine.depth.schedule import AUTO_BRIDGES
from d3engine.executor.bridging import BridgeStore
from d3engine.loading.settings import EngineSettings

NOWHERE = torch.device("meta")
"""For who checks requests and computes none: bridges are read and looked at, and take neither memory nor a device."""


def bridge_store(settings: EngineSettings, device: torch.device | None = None) -> BridgeStore:
    """Those beside the weights, and those that the engine's own policy names, on `device` or where the weights are;
    none where there are several ranks, which have no way yet to get them."""
    allowed = settings.own_bridges | {AUTO_BRIDGES} if settings.tensor_parallel_size == 1 else frozenset()
    return BridgeStore(
        settings.directory,
        settings.config,
        dtype=settings.dtype,
        weight_dtype=settings.weight_dtype,
        device=settings.device if device is None else device,
        allowed=allowed,
    )
