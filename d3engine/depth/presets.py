"""The settings of the D3 paper for its two tasks, by the number of layers of Llama-2: D3's, and those of its rivals.

They are the paper's, not a recommendation for another model: calibrate on data of your own.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

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


SKIP_DECODE_MEANS: Mapping[str, Mapping[int, float]] = MappingProxyType(
    {
        "bbh": MappingProxyType({32: 24.68, 40: 30.99, 80: 62.48}),
        "gsm8k": MappingProxyType({32: 29.90, 40: 37.51, 80: 75.53}),
    }
)
"""Mean depth of SkipDecode as Table 6 prints it."""

MAX_TOKENS: Mapping[str, int] = MappingProxyType({"bbh": 200, "gsm8k": 1024})
"""Tokens of an answer at most, over which the means are."""

EXIT_CONFIDENCES: Mapping[int, float] = MappingProxyType({32: 0.8, 40: 0.7, 80: 0.8})
"""Confidence at the saturation depth, Table 2."""

SHORTGPT_ORDER: Mapping[str, Mapping[int, tuple[int, ...]]] = MappingProxyType(
    {
        "shortgpt": MappingProxyType(
            {32: (27, 26, 25, 28, 24, 29, 23, 21, 22), 40: (33, 31, 32, 30, 29, 34, 28, 35, 27, 26)}
        )
    }
)
"""The layers that ShortGPT removes, those of least influence first (Men et al. 2024, Table 9)."""

Setting = TypeVar("Setting")


def preset(task: Any, num_layers: Any) -> Preset:
    """D3's setting for a task and a number of layers; what the table lacks is refused by name."""
    return of_layers(PRESETS, task, num_layers)


def of_layers(table: Mapping[str, Mapping[int, Setting]], task: Any, num_layers: Any) -> Setting:
    """What a table has for a task and a number of layers; what it lacks is refused by name."""
    require(isinstance(task, str) and task in table, "preset", task, f"one of {', '.join(table)}")
    by_layers = table[task]
    allowed = f"one of {', '.join(map(str, by_layers))} for the preset {task!r}"
    require(isinstance(num_layers, int) and num_layers in by_layers, "num_layers", num_layers, allowed)
    return by_layers[num_layers]
