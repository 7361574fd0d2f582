"""The settings that the D3 paper found by grid search for its two tasks, by the number of layers of Llama-2.

They are the paper's, not a recommendation for another model: calibrate on data of your own.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from d3engine.errors import require


class Preset(NamedTuple):
    """One setting of D3."""

    alpha: float
    start: float


PRESETS: Mapping[str, Mapping[int, Preset]] = MappingProxyType(
    {
        "bbh": MappingProxyType({32: Preset(0.9, 0.6), 40: Preset(0.9, 0.5), 80: Preset(0.9, 0.6)}),
        "gsm8k": MappingProxyType({32: Preset(0.9999, 0.8), 40: Preset(0.9999, 0.7)}),
    }
)
"""Task -> layers -> setting; 32, 40 and 80 layers are Llama-2 7B, 13B and 70B."""


def preset(task: Any, num_layers: Any) -> Preset:
    """The setting for a task and a number of layers; what the table lacks is refused by name."""
    require(isinstance(task, str) and task in PRESETS, "preset", task, f"one of {', '.join(PRESETS)}")
    by_layers = PRESETS[task]
    allowed = f"one of {', '.join(map(str, by_layers))} for the preset {task!r}"
    require(isinstance(num_layers, int) and num_layers in by_layers, "num_layers", num_layers, allowed)
    return by_layers[num_layers]
