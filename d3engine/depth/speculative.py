"""Speculative decoding: a second, smaller model drafts, and this one verifies at full depth.

The one idea: any model with the same vocabulary may guess; full depth judges, so the answer is full depth's
(Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding"; Chen et al. 2023).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

from d3engine.depth.draft_options import check_options
from d3engine.depth.draft_rule import DraftRule
from d3engine.depth.full_depth import FullDepth
from d3engine.depth.policy import DepthPolicy
from d3engine.depth.schedule import Schedule
from d3engine.errors import require


@dataclass(frozen=True)
class Speculative(DepthPolicy):
    """Draft with another model, verify at full depth.

    The engine loads that model when it begins, with a KV cache of its own for as many entries as this model's has at
    full depth. So it must be the engine's policy; its requests may ask for the same draft model with other
    options, or for any other policy. `depths` of a token count this model's layers: the draft model's come on top.

    Args:
        draft_model: a Llama model of the same vocabulary, named as `Engine` takes it.
        draft_length: tokens of a draft at most, 1 to 32.
        stop_probability: end a draft with the first token at whose place the draft's likeliest one had less than this
            probability; 0 never does.
        adaptive: let each sequence adapt its length: one more, up to `draft_length`, after a draft that was
            accepted whole; one less, down to 1, after any other.
    """

    draft_model: str
    draft_length: int = 4
    stop_probability: float = 0.0
    adaptive: bool = False

    name: ClassVar[str] = "speculative"
    drafts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        is_path = isinstance(self.draft_model, str | os.PathLike) and os.fspath(self.draft_model) != ""
        require(is_path, "draft_model", self.draft_model, "a Llama model, named as the engine's is")
        object.__setattr__(self, "draft_model", os.fspath(self.draft_model))
        check_options(self)

    def schedule(self, num_layers: int) -> Schedule:
        """Full depth: that is what every token of the answer has."""
        return FullDepth().schedule(num_layers)

    def draft_rule(self, num_layers: int) -> DraftRule:
        return DraftRule(self.draft_length, self.stop_probability, self.adaptive, model=self.draft_model)
