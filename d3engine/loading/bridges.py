"""The bridges that an engine of these settings may use."""

from __future__ import annotations

from d3engine.depth.schedule import AUTO_BRIDGES
from d3engine.executor.bridging import BridgeStore
from d3engine.loading.settings import EngineSettings


def bridge_store(settings: EngineSettings) -> BridgeStore:
    """Those beside the weights, and those that the engine's own policy names; none where there are several ranks,
    which have no way yet to get them."""
    allowed = settings.own_bridges | {AUTO_BRIDGES} if settings.tensor_parallel_size == 1 else frozenset()
    return BridgeStore(
        settings.directory,
        settings.config,
        dtype=settings.dtype,
        weight_dtype=settings.weight_dtype,
        device=settings.device,
        allowed=allowed,
    )
