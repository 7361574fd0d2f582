"""Early exit: a token leaves the layers as soon as the model is sure of it (CALM, here for decoder-only models).

The one idea: depth is not a function of the step but of what the hidden state says, so the schedule is full depth and
an `ExitRule` beside it lets rows go. Which layers a later token finds entries in is then not known, so all are filled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from d3engine.depth.exit_rule import BatchRule, Confidence, ExitRule
from d3engine.depth.policy import DepthPolicy
from d3engine.depth.presets import EXIT_CONFIDENCES, of_layers
from d3engine.depth.schedule import NEVER, OnSkip, Schedule
from d3engine.errors import require, require_integer


@dataclass(frozen=True)
class EarlyExit(DepthPolicy):
    """Confidence-based early exit (Schuster et al. 2022, "Confident Adaptive Language Modeling").

    After layer l >= min_layer (of layers 0 .. L - 1) the confidence of each token is compared with the threshold of its
    step, `0.9 t + 0.1 t exp(-decay i / N)` with N the request's max_tokens. A token that reaches it takes the LM head's
    logits there and runs no further layer. Prompts always run at full depth.

    Under `batch="batch_min"`, the published rule for batches, all tokens that an engine step computes under equal
    options leave together, when the least confident of them may. **What a request answers then depends on who shares
    its batch**: the one policy here that does so. `batch="per_row"` has no such effect.

    Nothing is saved in the KV cache: later tokens may go deeper and read every layer, so skipped ones are filled, and
    blocks for all layers are taken before the step, when the depth is not known yet.

    Args:
        threshold: t, from 0 (leave at the first check) to 2 (never).
        confidence: "softmax_max" (the largest probability of the LM head), "softmax_diff" (its lead over the second;
            both run the LM head at every check), or "cosine" (of the layer's input and output).
        decay: how fast the threshold falls; CALM's 4. 0 keeps it at t.
        min_layer: the lowest layer after which a token may leave, so at least min_layer + 1 layers run.
        every: check only after layers min_layer, min_layer + every, min_layer + 2 every ...
        batch: "per_row" or "batch_min".
        on_skip: "project" (CALM: keys and values of the exit state at each skipped layer) or "copy" (the entry of the
            last layer that ran).
    """

    threshold: float
    confidence: Confidence = "softmax_max"
    decay: float = 4.0
    min_layer: int = 0
    every: int = 1
    batch: BatchRule = "per_row"
    on_skip: OnSkip = "project"

    name: ClassVar[str] = "early-exit"

    def __post_init__(self) -> None:
        self._rule()
        allowed = "'project' or 'copy', since a later token may go deeper and would read entries nobody wrote"
        require(self.on_skip in ("project", "copy"), "on_skip", self.on_skip, allowed)

    def schedule(self, num_layers: int) -> Schedule:
        """Full depth: what the rule takes away is not known beforehand. Raises if `min_layer` does not fit."""
        self.exit_rule(num_layers)
        return Schedule.nested(np.full(num_layers, NEVER), self.on_skip)

    def exit_rule(self, num_layers: int) -> ExitRule:
        """The rule by which rows leave early."""
        require_integer("num_layers", num_layers, 1)
        require_integer("min_layer", self.min_layer, 0, num_layers - 1)
        return self._rule()

    @classmethod
    def preset(cls, num_layers: int) -> EarlyExit:
        """The confidence that the D3 paper's Table 2 prints for a Llama-2 of so many layers, as the threshold."""
        return cls(of_layers({"early-exit": EXIT_CONFIDENCES}, "early-exit", num_layers))

    def _rule(self) -> ExitRule:
        return ExitRule(self.confidence, self.threshold, self.decay, self.min_layer, self.every, self.batch)
