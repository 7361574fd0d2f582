"""When a token may leave the layers early: a rule about hidden states, written down without any.

The one idea: what a schedule cannot say (how deep a token goes is not known before it runs) is one small value beside
it. The scheduler carries it to the executor, which computes the confidence; the depths that came of it go back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from d3engine.errors import require, require_integer, require_number

Confidence: TypeAlias = Literal["softmax_max", "softmax_diff", "cosine"]
"""What is compared with the threshold after a layer: the LM head's largest probability there, its lead over the
second, or the cosine between what went into the layer and what came out."""

BatchRule: TypeAlias = Literal["per_row", "batch_min"]
"""Who decides: each row for itself, or the least confident row of the batch for all."""


@dataclass(frozen=True)
class ExitRule:
    """A token leaves after the first checked layer where its confidence reaches the threshold of its step.

    Checked are layers min_layer, min_layer + every, min_layer + 2 every ... (from 0); after the last layer there is
    nothing to decide. Prompt tokens and step 0, which the prompt pass yields, are never asked.

    Attributes:
        confidence: see `Confidence`; the softmax ones are of the raw logits, before temperature and penalties.
        threshold: from 0 (everybody leaves at the first check) to 2 (nobody ever does).
        decay: how fast the threshold falls, see `threshold_at`; 0 keeps it.
        min_layer: the lowest layer after which a token may leave.
        every: layers from one check to the next.
        batch: "per_row" or "batch_min"; under the second, rows of one engine step with equal rules leave together.

    Raises:
        InvalidValueError: for a value that is not allowed.
    """

    confidence: Confidence
    threshold: float
    decay: float = 4.0
    min_layer: int = 0
    every: int = 1
    batch: BatchRule = "per_row"

    def __post_init__(self) -> None:
        _require_one_of("confidence", self.confidence, get_args(Confidence))
        require_number("threshold", self.threshold, 0, 2)
        require_number("decay", self.decay, 0, 1000)
        require_integer("min_layer", self.min_layer, 0)
        require_integer("every", self.every, 1)
        _require_one_of("batch", self.batch, get_args(BatchRule))

    def checks_after(self, layer: int) -> bool:
        """Whether the confidence is looked at after this layer (from 0)."""
        return layer >= self.min_layer and (layer - self.min_layer) % self.every == 0

    def depths(self, num_layers: int) -> list[int]:
        """How many layers a token can take, deepest first."""
        return [num_layers, *(layer + 1 for layer in range(num_layers - 2, -1, -1) if self.checks_after(layer))]

    def threshold_at(self, step: int, max_tokens: int) -> float:
        """`0.9 t + 0.1 t exp(-decay step / N)`: CALM's falling threshold (Schuster et al. 2022, section 3.3).

        N is the request's own max_tokens, so it is known when the step is planned. At step 0 it is `threshold`.
        """
        return self.threshold * (0.9 + 0.1 * math.exp(-self.decay * step / max_tokens))


def _require_one_of(field: str, value: object, allowed: tuple[str, ...]) -> None:
    require(isinstance(value, str) and value in allowed, field, value, f"one of {', '.join(allowed)}")
