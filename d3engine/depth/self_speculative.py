"""Self-speculation: the model drafts for itself with some of its layers left out, and verifies at full depth.

The one idea: a draft costs no second model and no second cache; what comes out is full depth's, whatever the draft
skips (Zhang et al. 2023, "Draft & Verify"). The draft may be any scheduled policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from d3engine.depth.draft_options import check_draft, check_options
from d3engine.depth.draft_rule import DraftRule
from d3engine.depth.full_depth import FullDepth
from d3engine.depth.policy import DepthPolicy, policy_from_dict
from d3engine.depth.schedule import Schedule
from d3engine.errors import require


@dataclass(frozen=True)
class SelfSpeculative(DepthPolicy):
    """Draft at the depth of another policy, verify at full depth.

    Greedy tokens are full depth's; drawn ones follow full depth's distribution exactly (Leviathan et al. 2023,
    "Fast Inference from Transformers via Speculative Decoding", theorem 3.5), though not with the same draws.

    A draft runs the layers of the step at which it begins. While the draft's schedule skips nothing yet, nothing is
    drafted. A draft also ends with a token that would end the answer.

    Args:
        draft: a scheduled policy (D3, SkipDecode, LayerTable, one's own ...), or what its `describe` says.
        draft_length: tokens of a draft at most, 1 to 32.
        stop_probability: end a draft with the first token at whose place the draft's likeliest one had less than this
            probability; 0 never does.
        adaptive: let each sequence adapt its length: one more, up to `draft_length`, after a draft that was
            accepted whole; one less, down to 1, after any other.
    """

    draft: DepthPolicy
    draft_length: int = 4
    stop_probability: float = 0.0
    adaptive: bool = False

    name: ClassVar[str] = "self-speculative"
    drafts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.draft, Mapping):
            object.__setattr__(self, "draft", policy_from_dict(self.draft))
        require(isinstance(self.draft, DepthPolicy), "draft", self.draft, "a policy whose layers a draft runs")
        require(not self.draft.drafts, "draft", self.draft, "a policy that does not draft itself")
        check_options(self)

    def schedule(self, num_layers: int) -> Schedule:
        """Full depth: that is what every token of the answer has."""
        return FullDepth().schedule(num_layers)

    def draft_rule(self, num_layers: int) -> DraftRule:
        """How it drafts; raises `InvalidValueError` if the draft does not fit the model, or fills entries."""
        schedule = check_draft(self.draft, num_layers)
        return DraftRule(self.draft_length, self.stop_probability, self.adaptive, schedule)
