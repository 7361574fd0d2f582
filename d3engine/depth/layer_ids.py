"""Layers named by their numbers: checked, and left out of every step after the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from d3engine.depth.schedule import NEVER, Int32Array
from d3engine.errors import InvalidValueError, require, require_integer


def checked_layers(field: str, layers: Any) -> tuple[int, ...]:
    """Layer ids in ascending order, without one twice."""
    allowed = "different layer ids, from 0"
    if not isinstance(layers, Sequence | np.ndarray) or isinstance(layers, str | bytes):
        raise InvalidValueError(field, layers, allowed)
    ids = sorted(require_integer(f"{field}[{place}]", layer, 0) for place, layer in enumerate(layers))
    require(len(set(ids)) == len(ids), field, layers, allowed)
    return tuple(ids)


def cutoffs_without(field: str, layers: Sequence[int], num_layers: int) -> Int32Array:
    """Int32 [L]: 1 for these layers, in ascending order, and `NEVER` for all others; refuses what the model has not."""
    require(not layers or layers[-1] < num_layers, field, list(layers), f"layer ids from 0 to {num_layers - 1}")
    cutoffs = np.full(num_layers, NEVER, np.int32)
    cutoffs[list(layers)] = 1
    return cutoffs
