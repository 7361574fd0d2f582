"""A policy in words, for headings and titles: "D3, alpha 0.9, start 0.6"."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, cast

from d3engine.depth.policy import BRIDGES, DepthPolicy

LONGEST_VALUE = 60
"""Characters of an option's value (a table's can have thousands)."""


def policy_in_words(policy: DepthPolicy) -> str:
    """Its name and its options; those that stand at their defaults, and those that are None, are left out."""
    usual = {"policy": policy.name} | {field.name: field.default for field in fields(cast(Any, policy))}
    parts = [policy.label or type(policy).__name__]
    for name, value in policy.describe().items():
        own = getattr(policy, name, None)
        if value is None or usual.get(name, ...) in (value, own):
            continue
        said = f"({policy_in_words(own)})" if isinstance(own, DepthPolicy) else _said(name, value)
        parts.append(f"{name.replace('_', ' ')} {said}")
    return ", ".join(parts)


def _said(name: str, value: Any) -> str:
    """A value as the command line spells it; of a long path its end."""
    if name == "windows":
        return _shortened(",".join(f"{first}:{stop}" for first, stop in value))
    if name == BRIDGES and len(value) > LONGEST_VALUE:
        return f"... {value[4 - LONGEST_VALUE :]}"
    return _shortened(f"{value}")


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 4] + " ..."
