"""Draft & Verify as published: a draft leaves out attentions and MLPs one by one, and stops where it is unsure.

The one idea: which parts of its layers a model can draft without is found by search on the model itself (`d3engine
calibrate --draft`), and when a draft is to stop by each answer as it goes on (Zhang et al. 2023, "Draft & Verify:
Lossless Large Language Model Acceleration via Self-Speculative Decoding"; rules and constants are the authors' code's).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from d3engine.depth.draft_options import check_draft_length, check_stop_probability
from d3engine.depth.draft_rule import DraftRule
from d3engine.depth.full_depth import FullDepth
from d3engine.depth.layer_ids import checked_layers, cutoffs_without
from d3engine.depth.policy import DepthPolicy
from d3engine.depth.schedule import Schedule
from d3engine.errors import require, require_number


@dataclass(frozen=True)
class DraftAndVerify(DepthPolicy):
    """Draft without some attentions and some MLPs, verify at full depth.

    What comes out is full depth's, as with `SelfSpeculative`. All tokens of a draft run the same parts. In `depths` a
    part counts as half a layer. Drafts are run one step at a time, launched by the host.

    Args:
        skip_attention: ids of the layers whose attention a draft leaves out.
        skip_mlp: ids of the layers whose MLP it leaves out; one of the two must name a layer.
        draft_length: tokens of a draft at most, 1 to 32; the authors' 8, or 12.
        stop_probability: a draft ends with the first token at whose place the likeliest one had less than this
            probability. It is where each answer begins.
        target_acceptance: after each verification the answer's own stop probability moves by 0.001, up while less than
            this part of its drafted tokens has been accepted of late, else down. None: it stays.
    """

    skip_attention: Sequence[int] = ()
    skip_mlp: Sequence[int] = ()
    draft_length: int = 8
    stop_probability: float = 0.8
    target_acceptance: float | None = 0.9

    name: ClassVar[str] = "draft-and-verify"
    drafts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for field in ("skip_attention", "skip_mlp"):
            object.__setattr__(self, field, checked_layers(field, getattr(self, field)))
        some = bool(self.skip_attention or self.skip_mlp)
        require(some, "skip_attention", [], "layer ids, unless skip_mlp has some: a draft leaves out something")
        check_draft_length(self)
        check_stop_probability(self)
        if self.target_acceptance is not None:
            target = require_number("target_acceptance", self.target_acceptance, 0.0, 1.0)
            object.__setattr__(self, "target_acceptance", target)

    def schedule(self, num_layers: int) -> Schedule:
        """Full depth: that is what every token of the answer has."""
        return FullDepth().schedule(num_layers)

    def draft_rule(self, num_layers: int) -> DraftRule:
        """How it drafts; raises `InvalidValueError` for a layer that the model has not."""
        return DraftRule(
            self.draft_length,
            self.stop_probability,
            schedule=Schedule.nested(cutoffs_without("skip_attention", self.skip_attention, num_layers)),
            mlp_schedule=Schedule.nested(cutoffs_without("skip_mlp", self.skip_mlp, num_layers)),
            target_acceptance=self.target_acceptance,
        )

    def describe(self) -> dict[str, Any]:
        """The policy as JSON-ready values."""
        layers = {"skip_attention": list(self.skip_attention), "skip_mlp": list(self.skip_mlp)}
        return {**super().describe(), **layers}
