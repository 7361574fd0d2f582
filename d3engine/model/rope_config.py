"""Reads the rope fields of a Llama's config.json into one validated, frozen description.

The one idea: both spellings are read (transformers 4: `rope_theta` + `rope_scaling`; transformers 5:
`rope_parameters`) exactly as transformers reads them, and a key that is not read is refused, because it could have
been meant to change the angles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from d3engine.errors import ModelFormatError
from d3engine.model.fields import Fields

# The keys transformers reads for each rope type, beyond the type and theta themselves.
_ROPE_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}

_MAX_FACTOR = 1_000_000
"""Far above any real model, low enough that the length it stretches to is a number."""


@dataclass(frozen=True)
class RopeConfig:
    """How positions become angles; the fields transformers' rope functions read, None where a type has no use
    for one.

    `factor` is None only for "default", and for a yarn whose config says null: the ratio of the context
    lengths then.
    """

    rope_type: str = "default"
    theta: float = 10_000.0
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def read_rope_config(fields: Fields, head_dim: int, max_positions: int, default_theta: float) -> RopeConfig:
    """Return the rope of either spelling; where a config carries both, they must agree. Raises `ModelFormatError`."""
    found = []
    for name in ("rope_parameters", "rope_scaling"):
        value = fields.get(name)
        if value is not None and not isinstance(value, Mapping):
            fields.refuse(name, "an object or null")
        if value:
            found.append(_read_rope(fields, name, value, max_positions, default_theta))
    if not found:
        found.append(_read_rope(fields, "rope_parameters", {}, max_positions, default_theta))
    if found[0] != found[-1]:
        fields.refuse("rope_scaling", "the same as rope_parameters where both are given")
    if found[0].rope_type == "dynamic" and head_dim == 2:
        raise ModelFormatError(f"{fields.source}: head_dim must be above 2 for dynamic rope; got 2")
    return found[0]


def _read_rope(
    outer: Fields, name: str, values: Mapping[str, Any], max_positions: int, default_theta: float
) -> RopeConfig:
    rope = Fields(values, f"{outer.source}: {name}")
    rope_type = _rope_type(rope)
    _refuse_unknown_rope_keys(rope, rope_type)
    known = _ROPE_KEYS[rope_type]
    original = None
    if "original_max_position_embeddings" in known:
        original = _original_max_positions(outer, rope, max_positions)
    rescales = rope_type != "default"
    if rescales and "factor" not in values:
        raise ModelFormatError(f"{rope.source}: factor is missing")
    null_allowed = rope_type == "yarn"
    config = RopeConfig(
        rope_type=rope_type,
        theta=_rope_theta(outer, rope, default_theta),
        factor=(rope.optional_number if null_allowed else rope.number)("factor") if rescales else None,
        low_freq_factor=rope.number("low_freq_factor") if "low_freq_factor" in known else None,
        high_freq_factor=rope.number("high_freq_factor") if "high_freq_factor" in known else None,
        original_max_position_embeddings=original,
        attention_factor=rope.optional_number("attention_factor"),
        # Zero means "not set" for these four: transformers takes them with `or` and `and`.
        beta_fast=rope.number("beta_fast", default=32.0, zero_allowed=True) or 32.0,
        beta_slow=rope.number("beta_slow", default=1.0, zero_allowed=True) or 1.0,
        mscale=rope.optional_number("mscale", zero_allowed=True),
        mscale_all_dim=rope.optional_number("mscale_all_dim", zero_allowed=True),
        truncate=rope.boolean("truncate", default=True),
    )
    _check_rope_ranges(rope, config)
    return config


def _rope_type(rope: Fields) -> str:
    key = "rope_type" if rope.get("rope_type") is not None else "type"
    rope_type = "default" if rope.get(key) is None else rope.get(key)
    if not isinstance(rope_type, str) or rope_type not in _ROPE_KEYS:
        rope.refuse(key, f"one of {', '.join(_ROPE_KEYS)}")
    if rope.get("type") not in (None, rope_type):
        rope.refuse("type", f"the same as rope_type={rope_type!r}")
    return rope_type


def _refuse_unknown_rope_keys(rope: Fields, rope_type: str) -> None:
    """A key that is not read could have been meant to change the result, so it must have no effect."""
    neutral = {"rope_type", "type", "rope_theta"}
    for key, value in rope.values.items():
        without_effect = (
            value is None
            or (key == "partial_rotary_factor" and value == 1)
            or (key == "finetuned" and value is True)  # yarn's own configs: says how the weights were trained
        )
        if key not in neutral | _ROPE_KEYS[rope_type] and not without_effect:
            allowed = ", ".join(sorted(_ROPE_KEYS[rope_type])) or "none"
            rope.refuse(key, f"absent, since rope type {rope_type!r} reads: {allowed}")


def _rope_theta(outer: Fields, rope: Fields, default: float) -> float:
    theta = outer.optional_number("rope_theta")
    inner = rope.optional_number("rope_theta")
    if theta is not None and inner is not None and theta != inner:
        rope.refuse("rope_theta", f"the same as the rope_theta={theta} beside it")
    chosen = inner or theta or default
    if chosen <= 1:
        (rope if inner else outer).refuse("rope_theta", "a finite number above 1")
    return chosen


def _original_max_positions(outer: Fields, rope: Fields, max_positions: int) -> int:
    """Inside or beside the rope parameters; without either, transformers takes max_position_embeddings."""
    name = "original_max_position_embeddings"
    beside = outer.integer(name) if outer.get(name) is not None else None
    inner = rope.integer(name) if rope.get(name) is not None else None
    if beside is not None and inner is not None and beside != inner:
        rope.refuse(name, f"the same as the {name}={beside} beside it")
    return inner or beside or max_positions


def _check_rope_ranges(rope: Fields, config: RopeConfig) -> None:
    if config.factor is not None and not 1 <= config.factor <= _MAX_FACTOR:
        rope.refuse("factor", f"a number from 1 to {_MAX_FACTOR:,}")
    if (config.high_freq_factor or math.inf) <= (config.low_freq_factor or 0):
        rope.refuse("high_freq_factor", f"a number above low_freq_factor={config.low_freq_factor}")
    if config.beta_fast < config.beta_slow:
        rope.refuse("beta_fast", f"a number of at least beta_slow={config.beta_slow}")
