"""Depth: which layers run for which generated token. Numpy only; it knows no model and no device."""

from d3engine.depth.drafts import DraftAndVerify, Lossless, PromptLookup, SelfSpeculative, Speculative
from d3engine.depth.policy import DepthPolicy, ExitRule, policy_from_dict, policy_from_name
from d3engine.depth.schedule import NEVER, Level, Schedule
from d3engine.depth.skips import (
    D3,
    Distilled,
    EarlyExit,
    EvenSkip,
    FixedSkip,
    FullDepth,
    LayerTable,
    Nested,
    SkipDecode,
    TailSkip,
    UnifiedSkip,
)
from d3engine.depth.widths import Width

__all__ = [
    "D3",
    "NEVER",
    "DepthPolicy",
    "Distilled",
    "DraftAndVerify",
    "EarlyExit",
    "EvenSkip",
    "ExitRule",
    "FixedSkip",
    "FullDepth",
    "LayerTable",
    "Level",
    "Lossless",
    "Nested",
    "PromptLookup",
    "Schedule",
    "SelfSpeculative",
    "SkipDecode",
    "Speculative",
    "TailSkip",
    "UnifiedSkip",
    "Width",
    "policy_from_dict",
    "policy_from_name",
]
