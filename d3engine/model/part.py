"""Which part of a model a rank holds, where several devices hold it together.

The one idea: whole heads, whole channels and whole tokens, in order. A rank's part is again a Llama's layers, with
fewer heads and a narrower MLP, so everything that runs a model runs a part. Shares need not be equal: three key heads
on two ranks are two and one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

from d3engine.errors import InvalidValueError
from d3engine.kernels.quantized import GROUP
from d3engine.model.config import ModelConfig
from d3engine.model.expected_tensors import has_groups

ARGUMENT = "tensor_parallel_size"

_UNIT = 16
"""Channels and tokens are dealt out by so many where there are enough: kernels like even widths."""

_NOISE_UNIT = 4
"""Tokens are never dealt out by fewer: random numbers come by fours (`kernels/random.py`)."""


@dataclass(frozen=True, slots=True)
class Part:
    """What rank `rank` holds: query heads, key/value heads, channels of the MLP; `vocabulary` are all ranks' tokens.

    Two ranks hold the same key/value head where there are fewer of these than ranks.
    """

    rank: int
    heads: range
    kv_heads: range
    channels: range
    vocabulary: tuple[range, ...]

    @property
    def tokens(self) -> range:
        """The rank's own tokens: rows of the embedding and of the head."""
        return self.vocabulary[self.rank]

    def config(self, whole: ModelConfig) -> ModelConfig:
        """The config of what this rank runs; the vocabulary is still the whole one."""
        return replace(
            whole,
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self.channels),
        )


def part_of(config: ModelConfig, rank: int, size: int) -> Part:
    """The part of rank `rank` of `size`.

    Raises `InvalidValueError` naming `tensor_parallel_size` where there is not at least one head, channel and token for
    each rank. The products of matrices with scales of groups can be parted between these groups alone.
    """
    group = GROUP if has_groups(config.quantization) else 1
    heads, kv_heads = _heads(config, size, group)[rank]
    channels = shares(config.intermediate_size, size, _unit(config.intermediate_size, size, group))
    tokens = shares(config.vocab_size, size, _unit(config.vocab_size, size, 1, _NOISE_UNIT))
    if not all((*channels, *tokens)):
        what = (
            "one channel of the MLP"
            + (f", in groups of {group} of {config.quantization}," if group > 1 else "")
            + " and one token"
        )
        raise InvalidValueError(ARGUMENT, size, f"so few that each rank has at least {what}")
    return Part(rank, heads, kv_heads, channels[rank], tuple(tokens))


def shares(total: int, count: int, unit: int = 1) -> list[range]:
    """`total` things in order, dealt out to `count` takers by `unit`, as evenly as that goes; some may get none."""
    units = -(-total // unit)
    borders = [min(units * taker // count * unit, total) for taker in range(count + 1)]
    return [range(low, high) for low, high in pairwise(borders)]


def _unit(total: int, size: int, group: int, least: int = 1) -> int:
    return group if group > 1 else (_UNIT if total >= _UNIT * size else least)


def _heads(config: ModelConfig, size: int, group: int) -> list[tuple[range, range]]:
    """Query heads and key/value heads of each rank."""
    per_kv, width = config.group_size, config.head_dim
    if size <= config.num_kv_heads:
        together = _least_aligned(per_kv * width, group)
        owned = shares(config.num_kv_heads, size, together)
        found = [(range(kv.start * per_kv, kv.stop * per_kv), kv) for kv in owned]
    else:
        found = []
        together = _least_aligned(width, group)
        for kv, ranks in enumerate(shares(size, config.num_kv_heads)):
            for own in shares(per_kv, len(ranks), together):
                found.append((range(kv * per_kv + own.start, kv * per_kv + own.stop), range(kv, kv + 1)))
    if not all(heads for heads, _ in found):
        allowed = f"so few that each rank has a head of its own: there are {config.num_heads} query heads over"
        allowed += f" {config.num_kv_heads} key/value heads"
        allowed += f", and {config.quantization} parts them at multiples of {group} channels" if group > 1 else ""
        raise InvalidValueError(ARGUMENT, size, allowed)
    return found


def _least_aligned(width: int, group: int) -> int:
    """The fewest things of `width` channels that end where a group does."""
    return group // math.gcd(width, group)
