"""Lossless D3: D3 drafts, full depth verifies, and what the draft has computed of the lower layers is not repeated.

The one idea: D3 never skips a layer below the window, so there a draft's hidden states and KV entries are the full
model's already. They are kept, and the verification of a drafted row resumes at the first layer of the window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType
from typing import ClassVar, NamedTuple

from d3engine.depth.d3 import D3
from d3engine.depth.draft_rule import DraftRule
from d3engine.depth.self_speculative import SelfSpeculative
from d3engine.errors import require, require_integer


class ExitAndLength(NamedTuple):
    """Lowest layers that draft, all others left out, and tokens of a draft."""

    exit_layer: int
    draft_length: int


PRESETS: Mapping[str, ExitAndLength] = MappingProxyType({"layerskip": ExitAndLength(8, 6)})
"""LayerSkip's for Llama-2 7B (Elhoushi et al. 2024, "LayerSkip"; its authors' own examples run so)."""

AT_ONCE = 0.001
"""An alpha at which D3's window is whole at step 1, unless a model has a thousand layers for each that stays."""


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

    @classmethod
    def preset(cls, name: str, num_layers: int) -> Lossless:
        """ "layerskip": drafts of 6 tokens by the lowest 8 of `num_layers` layers, verified from the 9th on.

        That is LayerSkip's self-speculation, made for models that were trained to answer from there.
        """
        require(isinstance(name, str) and name in PRESETS, "preset", name, f"one of {', '.join(PRESETS)}")
        exit_layer, length = PRESETS[name]
        require_integer("num_layers", num_layers, exit_layer + 1)
        return cls(D3(AT_ONCE, Fraction(exit_layer, num_layers)), length)

    def draft_rule(self, num_layers: int) -> DraftRule:
        return replace(super().draft_rule(num_layers), resumes=True)
