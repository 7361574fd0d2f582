"""The rope of a config: its fields as transformers reads them, in both of its spellings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from d3engine.errors import ModelFormatError
from d3engine.model.family import Family
from d3engine.model.fields import Fields

_ORIGINAL = "original_max_position_embeddings"
PARTIAL = "partial_rotary_factor"
QUERY_SCALING = "llama_4_scaling_beta"
# The keys transformers reads for each rope type, beyond the type and theta themselves; `attn_factor` is vLLM's.
_ROPE_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL}),
    "yarn": frozenset(
        {
            *("factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow"),
            *("mscale", "mscale_all_dim", "truncate", "attn_factor", QUERY_SCALING),
        }
    ),
    "longrope": frozenset({"short_factor", "long_factor", "factor", _ORIGINAL, "attention_factor"}),
}

_ALIASES = {"su": "longrope"}
"""Names of early configs, as transformers reads them."""

_MAX_FACTOR = 1_000_000
"""Far above any real model, low enough that the length it stretches to is a number."""


@dataclass(frozen=True)
class RopeConfig:
    """The fields that transformers' rope functions read; None where the type does not use one.

    `factor` is None for "default"; for a yarn with null and for a longrope it is the ratio of the context lengths then.
    `rotary_dim` are the channels of a head that are turned, its first ones; None: all of them.
    """

    rope_type: str = "default"
    theta: float = 10_000.0
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    attn_factor: float | None = None  # of a yarn: a factor of the default of the one above
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    query_scaling: float | None = None  # of a Ministral 3, whose queries grow beyond the original length
    rotary_dim: int | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    @property
    def trained_length(self) -> int | None:
        """The length up to which a longrope has its `short_factor`; None for other types."""
        return None if self.long_factor is None else self.original_max_position_embeddings

    def is_long(self, length: int) -> bool:
        """Whether a longrope has its `long_factor` where texts have at most `length` tokens."""
        # One list for all texts of an engine, as in vLLM and llama.cpp. transformers changes over within a text: keys
        # that it has cached keep the other frequencies, so its answers depend on how a text was cut.
        return self.trained_length is not None and length > self.trained_length


def read_rope_config(
    fields: Fields, family: Family, head_dim: int, max_positions: int, default_theta: float | None = None
) -> RopeConfig:
    """Return the rope of a family's config, read as transformers reads it. Raises `ModelFormatError`.

    Both spellings are read, and must agree: `rope_theta` with `rope_scaling` (transformers 4), and `rope_parameters`
    (transformers 5). `default_theta`: where neither has one; None: the family's.
    """

    def read(name: str, values: Mapping[str, Any]) -> RopeConfig:
        rope = Fields(values, f"{fields.source}: {name}")
        return _read_rope(fields, rope, family, head_dim, max_positions, default_theta or family.default_theta)

    found = []
    for name in ("rope_parameters", "rope_scaling"):
        value = fields.get(name)
        if value is not None and not isinstance(value, Mapping):
            fields.refuse(name, "an object or null")
        if value:
            found.append(read(name, value))
    if not found:
        found.append(read("rope_parameters", {}))
    rope = found[0]
    if rope != found[-1]:
        fields.refuse("rope_scaling", "the same as rope_parameters where both are given")
    if rope.rope_type == "dynamic" and (rope.rotary_dim or head_dim) == 2:
        raise ModelFormatError(f"{fields.source}: head_dim must be above 2 for dynamic rope; got 2")
    if family.rope_types is not None and rope.rope_type not in family.rope_types:
        name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
        fields.refuse(name, f"of type {' or '.join(family.rope_types)} for {family.architectures[0]}")
    return rope


def _read_rope(
    outer: Fields, rope: Fields, family: Family, head_dim: int, max_positions: int, default_theta: float
) -> RopeConfig:
    rope_type, default_part = _rope_type(rope), family.partial_rotary_factor
    _refuse_unknown_rope_keys(rope, rope_type, has_part=default_part is not None)
    rotary_dim = head_dim if default_part is None else _rotary_dim(outer, rope, head_dim, default_part)
    known = _ROPE_KEYS[rope_type]
    original = _original_max_positions(outer, rope, max_positions) if _ORIGINAL in known else None
    rescales = rope_type != "default"
    if rescales and "factor" not in rope.values and rope_type != "longrope":
        raise ModelFormatError(f"{rope.source}: factor is missing")
    null_allowed = rope_type in ("yarn", "longrope")
    factors = [_factors(rope, name, rotary_dim // 2) if name in known else None for name in _FACTORS]
    config = RopeConfig(
        rope_type=rope_type,
        theta=_rope_theta(outer, rope, default_theta),
        factor=(rope.optional_number if null_allowed else rope.number)("factor") if rescales else None,
        low_freq_factor=rope.number("low_freq_factor") if "low_freq_factor" in known else None,
        high_freq_factor=rope.number("high_freq_factor") if "high_freq_factor" in known else None,
        original_max_position_embeddings=original,
        attention_factor=rope.optional_number("attention_factor"),
        attn_factor=rope.optional_number("attn_factor"),
        # Zero means "not set" for these four: transformers takes them with `or` and `and`.
        beta_fast=rope.number("beta_fast", default=32.0, zero_allowed=True) or 32.0,
        beta_slow=rope.number("beta_slow", default=1.0, zero_allowed=True) or 1.0,
        mscale=rope.optional_number("mscale", zero_allowed=True),
        mscale_all_dim=rope.optional_number("mscale_all_dim", zero_allowed=True),
        truncate=rope.boolean("truncate", default=True),
        query_scaling=rope.optional_number(QUERY_SCALING, zero_allowed=True) or None,
        rotary_dim=None if rotary_dim == head_dim else rotary_dim,
        short_factor=factors[0],
        long_factor=factors[1],
    )
    _check_rope_ranges(rope, config)
    return config


def _rope_type(rope: Fields) -> str:
    key = "rope_type" if rope.get("rope_type") is not None else "type"
    rope_type = "default" if rope.get(key) is None else rope.get(key)
    if not isinstance(rope_type, str) or _ALIASES.get(rope_type, rope_type) not in _ROPE_KEYS:
        rope.refuse(key, f"one of {', '.join(_ROPE_KEYS)}")
    if rope.get("type") not in (None, rope_type):
        rope.refuse("type", f"the same as rope_type={rope_type!r}")
    return _ALIASES.get(rope_type, rope_type)


def _refuse_unknown_rope_keys(rope: Fields, rope_type: str, *, has_part: bool) -> None:
    """Raise for a key that is not read and could change the angles."""
    neutral = {"rope_type", "type", "rope_theta", "max_position_embeddings", *([PARTIAL] if has_part else [])}
    for key, value in rope.values.items():
        without_effect = (
            value is None
            or (key == PARTIAL and value == 1)
            or (key == "finetuned" and value is True)  # yarn's own configs: says how the weights were trained
        )
        if key not in neutral | _ROPE_KEYS[rope_type] and not without_effect:
            allowed = ", ".join(sorted(_ROPE_KEYS[rope_type])) or "none"
            rope.refuse(key, f"absent, since rope type {rope_type!r} reads: {allowed}")


def _rotary_dim(outer: Fields, rope: Fields, head_dim: int, default: float) -> int:
    """The channels of a head that are turned, by the factor inside the rope parameters or next to them."""
    inner, outside = rope.optional_number(PARTIAL), outer.optional_number(PARTIAL)
    if inner is not None and outside is not None and inner != outside:
        rope.refuse(PARTIAL, f"the same as the {PARTIAL}={outside} outside")
    factor = inner or outside or default
    rotary_dim = int(head_dim * factor) if factor <= 1 else 0
    if rotary_dim < 2 or rotary_dim % 2:
        allowed = f"a number up to 1 that makes an even number of channels, 2 or more, of head_dim={head_dim}"
        (rope if inner else outer).refuse(PARTIAL, allowed)
    return rotary_dim


_FACTORS = ("short_factor", "long_factor")


def _factors(rope: Fields, name: str, count: int) -> tuple[float, ...]:
    """A longrope's divisor of each pair's frequency."""
    values = rope.get(name)
    is_list = isinstance(values, list) and len(values) == count
    if not is_list or not all(type(value) in (int, float) and 0 < value <= _MAX_FACTOR for value in values):
        shape = f"one for each of {count} pairs of channels"
        rope.refuse(name, f"a list of numbers above 0, {_MAX_FACTOR:,} at most, {shape}")
    return tuple(map(float, values))


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
    """Inside the rope parameters or next to them; without either, max_position_embeddings as in transformers."""
    outside, inner = outer.optional_integer(_ORIGINAL), rope.optional_integer(_ORIGINAL)
    if outside is not None and inner is not None and outside != inner:
        rope.refuse(_ORIGINAL, f"the same as the {_ORIGINAL}={outside} beside it")
    return inner or outside or max_positions


def _check_rope_ranges(rope: Fields, config: RopeConfig) -> None:
    if config.trained_length == 1:  # whose logarithm divides
        rope.refuse(_ORIGINAL, "an integer from 2 for a longrope")
    if config.factor is not None and not 1 <= config.factor <= _MAX_FACTOR:
        rope.refuse("factor", f"a number from 1 to {_MAX_FACTOR:,}")
    if (config.high_freq_factor or math.inf) <= (config.low_freq_factor or 0):
        rope.refuse("high_freq_factor", f"a number above low_freq_factor={config.low_freq_factor}")
    if config.beta_fast < config.beta_slow:
        rope.refuse("beta_fast", f"a number of at least beta_slow={config.beta_slow}")
