"""Depth: which layers run for which generated token. Numpy only; it knows no model and no device."""

from d3engine.depth.d3 import D3
from d3engine.depth.draft_and_verify import DraftAndVerify
from d3engine.depth.early_exit import EarlyExit
from d3engine.depth.even_skip import EvenSkip
from d3engine.depth.exit_rule import ExitRule
from d3engine.depth.fixed_skip import FixedSkip
from d3engine.depth.full_depth import FullDepth
from d3engine.depth.layer_table import LayerTable
from d3engine.depth.lossless import Lossless
from d3engine.depth.nested import Nested
from d3engine.depth.policy import DepthPolicy, policy_from_dict, policy_from_name
from d3engine.depth.schedule import NEVER, Schedule
from d3engine.depth.self_speculative import SelfSpeculative
from d3engine.depth.skip_decode import SkipDecode
from d3engine.depth.speculative import Speculative
from d3engine.depth.tail_skip import TailSkip
from d3engine.depth.unified_skip import UnifiedSkip

__all__ = [
    "D3",
    "NEVER",
    "DepthPolicy",
    "DraftAndVerify",
    "EarlyExit",
    "EvenSkip",
    "ExitRule",
    "FixedSkip",
    "FullDepth",
    "LayerTable",
    "Lossless",
    "Nested",
    "Schedule",
    "SelfSpeculative",
    "SkipDecode",
    "Speculative",
    "TailSkip",
    "UnifiedSkip",
    "policy_from_dict",
    "policy_from_name",
]
