"""Lossless D3: D3 drafts, full depth verifies, and what the draft has computed of the lower layers is not repeated.

The one idea: D3 never skips a layer below the window, so there a draft's hidden states and KV entries are the full
model's already. They are kept, and the verification of a drafted row resumes at the first layer of the window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from d3engine.depth.d3 import D3
from d3engine.depth.draft_rule import DraftRule
from d3engine.depth.self_speculative import SelfSpeculative
from d3engine.errors import require


@dataclass(frozen=True)
class Lossless(SelfSpeculative):
    """Full depth's answers, drafted by D3: `Lossless(D3(alpha=0.9, start=0.6))`.

    As `SelfSpeculative`, but of the rows to verify only the last, which no draft has fed, runs the layers below the
    window.
    """

    name: ClassVar[str] = "lossless"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(isinstance(self.draft, D3), "draft", self.draft, "a D3 (SelfSpeculative takes any scheduled policy)")

    def draft_rule(self, num_layers: int) -> DraftRule:
        return replace(super().draft_rule(num_layers), resumes=True)
