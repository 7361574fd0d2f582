"""Mean depth, FLOPs ratio, bound on any speed-up and freed KV cache of a schedule:
`nominal` over the maximum length, `realised` over the tokens generated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from d3engine.depth.schedule import Schedule
from d3engine.errors import require, require_integer, require_number


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a Llama model that its cost depends on."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        for field, value in vars(self).items():
            require_integer(field, value, 1)

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer's matrices: q, k, v, o, gate, up, down."""
        return self.attention_parameters + self.mlp_parameters

    @property
    def attention_parameters(self) -> int:
        """Those of q, k, v and o."""
        return 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.hidden_size

    @property
    def mlp_parameters(self) -> int:
        """Those of gate, up and down."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def head_parameters(self) -> int:
        """Parameters of the LM head."""
        return self.vocab_size * self.hidden_size

    @property
    def kv_size(self) -> int:
        """Rows of the key projection, and of the value projection; a cache entry holds both."""
        return self.num_kv_heads * self.head_dim


LLAMA2_7B = ModelShape(32, 4096, 11008, 32000, 32, 32, 128)
LLAMA2_13B = ModelShape(40, 5120, 13824, 32000, 40, 40, 128)
LLAMA2_70B = ModelShape(80, 8192, 28672, 32000, 64, 8, 128)

LLAMA2_BY_LAYERS = {shape.num_layers: shape for shape in (LLAMA2_7B, LLAMA2_13B, LLAMA2_70B)}


def mean_depth(schedule: Schedule, num_steps: int) -> float:
    """The nominal mean number of layers over steps [0, num_steps): #Avg.Layer of the D3 paper's Table 6."""
    require_integer("num_steps", num_steps, 1)
    return float(schedule.depths(num_steps).mean())


def flops_ratio(mean_depth: float, num_layers: int, layer_parameters: int, head_parameters: int) -> float:
    """FLOPs of full depth over those at the mean depth, for the matrices of the layers and the LM head.

    `(L p + h) / (mean p + h)` reproduces the FLOPs column of the D3 paper's Table 6. Attention over the
    context is not counted, as in the paper. The mean depth may also be that of a run.
    """
    require_number("mean_depth", mean_depth, 0, num_layers)
    full = num_layers * layer_parameters + head_parameters
    return full / (mean_depth * layer_parameters + head_parameters)


def layer_bound(
    depths: Iterable[int],
    *,
    num_layers: int,
    layer_size: float,
    head_size: float,
    full_size: float | None = None,
) -> float:
    """The most that skipping can speed up a run: weights moved at full depth over weights moved.

    Args:
        depths: layers run for each token really generated (one sequence at a time; in a batch, for each
            engine step, the layers that any row runs).
        num_layers: L.
        layer_size: bytes (or parameters) of one layer.
        head_size: bytes (or parameters) of the LM head, which every token runs.
        full_size: what one full-depth token moves, where layers differ; None is `L * layer_size + head_size`.
    """
    run = [require_integer("depths", depth, 0, num_layers) for depth in depths]
    require(len(run) > 0, "depths", run, "of at least one token")
    full = num_layers * layer_size + head_size if full_size is None else full_size
    return len(run) * full / (sum(run) * layer_size + len(run) * head_size)


@dataclass(frozen=True)
class KVSaved:
    """KV entries (one layer, one token) of one sequence: what full depth holds and what the schedule holds.

    Attributes:
        entries_full: entries that full depth holds when the last token has been generated.
        entries_held: entries that the schedule holds then.
        fraction: of `entries_full`, the part that need not be held.
        mean_fraction: the same over the whole generation, summed over its steps.
        bytes_saved: `entries_full - entries_held` in bytes.
    """

    entries_full: int
    entries_held: int
    fraction: float
    mean_fraction: float
    bytes_saved: int


def kv_saved(schedule: Schedule, prompt_tokens: int, generated_tokens: int, bytes_per_entry: int = 1) -> KVSaved:
    """The KV cache one sequence need not hold: a layer's whole cache goes once its cutoff has passed.

    After step i a layer that runs holds `prompt_tokens + i` entries, for the last token is not fed; a layer
    past its cutoff holds none, its prompt's neither. Only `on_skip="none"` saves: otherwise every layer's
    entries are kept (that copied blocks are shared is not counted).
    """
    prompt = require_integer("prompt_tokens", prompt_tokens, 1)
    tokens = require_integer("generated_tokens", generated_tokens, 1)
    entry = require_integer("bytes_per_entry", bytes_per_entry, 1)
    layers = schedule.num_layers
    lengths = prompt + np.arange(tokens, dtype=np.int64)
    depths = schedule.depths(tokens) if schedule.on_skip == "none" else np.full(tokens, layers)
    full, held = lengths * layers, lengths * depths
    entries_full, entries_held = int(full[-1]), int(held[-1])
    return KVSaved(
        entries_full=entries_full,
        entries_held=entries_held,
        fraction=1 - entries_held / entries_full,
        mean_fraction=1 - float(held.sum() / full.sum()),
        bytes_saved=(entries_full - entries_held) * entry,
    )


PRESETS: Mapping[str, Mapping[int, tuple[float, float]]] = {
    "bbh": {32: (0.9, 0.6), 40: (0.9, 0.5), 80: (0.9, 0.6)},
    "gsm8k": {32: (0.9999, 0.8), 40: (0.9999, 0.7)},
}
"""Task -> layers -> alpha and start of D3; 32, 40 and 80 layers are Llama-2 7B, 13B and 70B."""


SKIP_DECODE_MEANS: Mapping[str, Mapping[int, float]] = {
    "bbh": {32: 24.68, 40: 30.99, 80: 62.48},
    "gsm8k": {32: 29.90, 40: 37.51, 80: 75.53},
}
"""Mean depth of SkipDecode as Table 6 prints it."""

MAX_TOKENS: Mapping[str, int] = {"bbh": 200, "gsm8k": 1024}
"""Tokens of an answer at most, over which the means are."""

EXIT_CONFIDENCES: Mapping[int, float] = {32: 0.8, 40: 0.7, 80: 0.8}
"""Confidence at the saturation depth, Table 2."""

SHORTGPT_ORDER: Mapping[str, Mapping[int, tuple[int, ...]]] = {
    "shortgpt": {32: (27, 26, 25, 28, 24, 29, 23, 21, 22), 40: (33, 31, 32, 30, 29, 34, 28, 35, 27, 26)},
}
"""The layers that ShortGPT removes, those of least influence first (Men et al. 2024, Table 9)."""

Setting = TypeVar("Setting")


def preset(task: Any, num_layers: Any) -> tuple[float, float]:
    """D3's alpha and start for a task and a number of layers; what the table lacks is refused by name."""
    return of_layers(PRESETS, task, num_layers)


def of_layers(table: Mapping[str, Mapping[int, Setting]], task: Any, num_layers: Any) -> Setting:
    """What a table has for a task and a number of layers; what it lacks is refused by name."""
    require(isinstance(task, str) and task in table, "preset", task, f"one of {', '.join(table)}")
    by_layers = table[task]
    allowed = f"one of {', '.join(map(str, by_layers))} for the preset {task!r}"
    require(isinstance(num_layers, int) and num_layers in by_layers, "num_layers", num_layers, allowed)
    return by_layers[num_layers]
