"""Tensor parallelism: the shard of a model on each rank, and the sums over ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from d3engine.errors import InvalidValueError
from d3engine.kernels.matrices import Table, looked_up
from d3engine.kernels.quantized import GROUP
from d3engine.model.checkpoint import SCALES, VALUES, Checkpoint, dtype_of, has_groups
from d3engine.model.config import ModelConfig
from d3engine.model.expected_tensors import LM_HEAD, expected_tensors, rows_of
from d3engine.model.quantization_config import SCHEMES

ARGUMENT = "tensor_parallel_size"

_UNIT = 16
"""Multiple of channels and tokens on a rank, where there are enough: kernels like even widths."""

_NOISE_UNIT = 4
"""Multiple of tokens on a rank in any case: random numbers come by fours (`kernels/reference.py`)."""


@dataclass(frozen=True, slots=True)
class ModelShard:
    """Query heads, key/value heads and channels of the MLP of rank `rank`; `vocabulary` are all ranks' tokens.

    Two ranks hold the same key/value head where there are fewer of these than ranks.
    """

    # Whole heads, channels and tokens, in order: a shard is again a Llama's layers, with fewer heads and a narrower
    # MLP, so every executor runs it. Shards need not be equal: three key heads on two ranks are two and one.

    rank: int
    heads: range
    kv_heads: range
    channels: range
    vocabulary: tuple[range, ...]

    @property
    def tokens(self) -> range:
        """The rank's tokens: rows of the embedding and of the head."""
        return self.vocabulary[self.rank]

    def config(self, whole: ModelConfig) -> ModelConfig:
        """The config of the rank's layers; the vocabulary is still the whole one."""
        return replace(
            whole, num_heads=len(self.heads), num_kv_heads=len(self.kv_heads), intermediate_size=len(self.channels)
        )


def shard_of(config: ModelConfig, rank: int, size: int) -> ModelShard:
    """The shard of rank `rank` of `size`.

    Raises `InvalidValueError` naming `tensor_parallel_size` where there is not at least one head, channel and token for
    each rank. Matrices with scales of groups are cut between groups only.
    """
    if size > 1 and config.has_projection_norms:
        raise InvalidValueError(ARGUMENT, size, "1 for a model whose norms of queries and keys span all heads")
    group = GROUP if has_groups(config.quantization) else 1
    heads, kv_heads = _heads(config, size, group)[rank]
    channels = split_evenly(config.intermediate_size, size, _unit(config.intermediate_size, size, group))
    tokens = split_evenly(config.vocab_size, size, _unit(config.vocab_size, size, 1, _NOISE_UNIT))
    if not all((*channels, *tokens)):
        what = (
            "one channel of the MLP"
            + (f", in groups of {group} of {config.quantization}," if group > 1 else "")
            + " and one token"
        )
        raise InvalidValueError(ARGUMENT, size, f"so few that each rank has at least {what}")
    return ModelShard(rank, heads, kv_heads, channels[rank], tuple(tokens))


def split_evenly(total: int, count: int, unit: int = 1) -> list[range]:
    """`total` items in order as `count` ranges of multiples of `unit`, as even as possible; some may be empty."""
    units = -(-total // unit)
    ends = [min(units * index // count * unit, total) for index in range(count + 1)]
    return [range(low, high) for low, high in pairwise(ends)]


def _unit(total: int, size: int, group: int, least: int = 1) -> int:
    return group if group > 1 else (_UNIT if total >= _UNIT * size else least)


def _heads(config: ModelConfig, size: int, group: int) -> list[tuple[range, range]]:
    """Query heads and key/value heads of each rank."""
    per_kv, width = config.group_size, config.head_dim
    if size <= config.num_kv_heads:
        together = _least_aligned(per_kv * width, group)
        owned = split_evenly(config.num_kv_heads, size, together)
        found = [(range(kv.start * per_kv, kv.stop * per_kv), kv) for kv in owned]
    else:
        found = []
        together = _least_aligned(width, group)
        for kv, ranks in enumerate(split_evenly(size, config.num_kv_heads)):
            for own in split_evenly(per_kv, len(ranks), together):
                found.append((range(kv * per_kv + own.start, kv * per_kv + own.stop), range(kv, kv + 1)))
    if not all(heads for heads, _ in found):
        allowed = f"so few that each rank has a head of its own: there are {config.num_heads} query heads over"
        allowed += f" {config.num_kv_heads} key/value heads"
        allowed += f", and {config.quantization} parts them at multiples of {group} channels" if group > 1 else ""
        raise InvalidValueError(ARGUMENT, size, allowed)
    return found


def _least_aligned(width: int, group: int) -> int:
    """The fewest items of `width` channels that end where a group does."""
    return group // math.gcd(width, group)


@dataclass(frozen=True, slots=True)
class Cut:
    """The rows, in this order, or the columns of a tensor that a rank reads; zeros if the tensor is rank 0's."""

    rows: tuple[range, ...] | None = None
    columns: range | None = None
    is_others: bool = False

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the cut of a tensor of shape `whole`."""
        if self.rows is not None:
            return (sum(map(len, self.rows)), *whole[1:])
        return whole if self.columns is None else (whole[0], len(self.columns))

    def of(self, tensor: Tensor) -> Tensor:
        """The cut; without a copy where it is one range of rows."""
        if self.rows is not None:
            ranges = [tensor[rows.start : rows.stop] for rows in self.rows]
            return ranges[0] if len(ranges) == 1 else torch.cat(ranges)
        return tensor if self.columns is None else tensor[:, self.columns.start : self.columns.stop].contiguous()


@dataclass(frozen=True)
class CheckpointShard(Checkpoint):
    """`whole`, with `cuts` by the names of tensors; `entries` have the shapes of the cuts.

    Of a mapped file only the pages of the shard are read.
    """

    whole: Checkpoint
    cuts: Mapping[str, Cut]

    def read(self, name: str) -> Tensor:
        cut = self.cuts.get(name)
        if cut is None:
            return self.whole.read(name)
        if cut.is_others:
            return torch.zeros(self.entries[name].shape, dtype=dtype_of(self.entries[name].dtype))
        taken = cut.of(self.whole.read(name))
        if cut.columns is not None or (cut.rows is not None and len(cut.rows) > 1):
            self.whole.give_back(name)  # it was copied
        return taken


def shard_checkpoint(whole: Checkpoint, config: ModelConfig, shard: ModelShard) -> CheckpointShard:
    """A rank's shard of a checkpoint that holds the tensors of `config`; other tensors keep their shapes."""
    cuts = {name: cut for name, cut in _cuts(config, shard).items() if name in whole.entries}
    entries = dict(whole.entries)
    for name, cut in cuts.items():
        entries[name] = replace(entries[name], shape=cut.shape(entries[name].shape))
    return CheckpointShard(entries, whole._sources, whole, cuts)


def shard_shapes(config: ModelConfig, shard: ModelShard) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a rank loads, as `expected_tensors` of the whole model."""
    cuts = _cuts(config, shard)
    shapes = expected_tensors(config)
    return {name: cuts[name].shape(shape) if name in cuts else shape for name, shape in shapes.items()}


def _cuts(config: ModelConfig, shard: ModelShard) -> dict[str, Cut]:
    """The cut of each tensor that not every rank reads whole."""
    names, width = config.tensor_names, config.head_dim
    queries, keys = _widened(shard.heads, width), _widened(shard.kv_heads, width)
    sizes = [(config.q_size, queries), (config.kv_size, keys), (config.kv_size, keys)]
    by_rows = {f"self_attn.{name}": _stacked(parts) for name, parts in rows_of(names.qkv, sizes).items()}
    halves = [(config.intermediate_size, shard.channels)] * 2
    by_rows |= {name: _stacked(parts) for name, parts in rows_of(names.gate_up, halves).items()}
    by_columns = {"self_attn.o_proj": queries, names.down: shard.channels}
    cuts: dict[str, Cut] = {}
    for layer in range(config.num_layers):
        prefix = names.layer(layer)
        for module, rows in by_rows.items():
            cuts |= {prefix + module + suffix: Cut(rows=rows) for suffix in (".weight", ".bias", VALUES, SCALES)}
        for module, columns in by_columns.items():
            cuts |= _of_columns(prefix + module, columns, config.quantization)
            if shard.rank:  # a bias is added once
                cuts[prefix + module + ".bias"] = Cut(is_others=True)
    tokens = Cut(rows=(shard.tokens,))
    by_tokens = (names.embedding.removesuffix(".weight"), LM_HEAD.removesuffix(".weight"))
    return cuts | {module + suffix: tokens for module in by_tokens for suffix in (".weight", VALUES, SCALES)}


def _of_columns(module: str, columns: range, scheme: str | None) -> dict[str, Cut]:
    """The cuts of a matrix at these input channels; with scales of groups the channels begin where a group does."""
    if scheme is None or not has_groups(scheme):
        return {module + suffix: Cut(columns=columns) for suffix in (".weight", *([VALUES] if scheme else []))}
    groups, packed = range(columns.start // GROUP, -(-columns.stop // GROUP)), SCHEMES[scheme].values_a_byte
    return {
        module + VALUES: Cut(columns=columns if packed == 1 else _widened(groups, GROUP // packed)),
        module + SCALES: Cut(columns=groups),
    }


def _widened(items: range, width: int) -> range:
    """The rows of items of `width` rows each."""
    return range(items.start * width, items.stop * width)


def _stacked(parts: list[tuple[int, range]]) -> tuple[range, ...]:
    """The rows of stacked matrices, given the number of rows of each and the rows to take of it."""
    taken, first = [], 0
    for size, rows in parts:
        taken.append(range(first + rows.start, first + rows.stop))
        first += size
    return tuple(taken)


class Collectives(Protocol):
    """Operations that all ranks of a model call together, each with a tensor of the same shape and dtype."""

    def sum_(self, tensor: Tensor) -> None:
        """Put the sum of all ranks' tensors into each of them; the same bits everywhere."""

    def gather(self, tensor: Tensor) -> Tensor:
        """All ranks' tensors, [ranks, ...]."""

    def agree_(self, tensor: Tensor) -> None:
        """Put rank 0's tensor into each of them."""


@dataclass(frozen=True, eq=False, slots=True)
class Ranks:
    """A model's shard on this rank, and the collectives that join it to the others."""

    # Hidden states are a sum: each rank computes a term of what a layer adds to the residual stream. Rank 0 adds its
    # terms to the stream, the others to zeros, and the sum over the ranks is the same states on each of them.

    shard: ModelShard
    collectives: Collectives

    def begin_term_(self, hidden: Tensor) -> None:
        """Prepare `hidden` for this rank's term of a sum: only rank 0 keeps the residual stream."""
        if self.shard.rank:
            hidden.zero_()

    def embed(self, token_ids: Tensor, table: Table, dtype: torch.dtype) -> Tensor:
        """Rows [T, H] of an embedding; `table` has the rows of this rank's tokens."""
        places = token_ids - self.shard.tokens.start
        is_own = (places >= 0) & (places < len(self.shard.tokens))
        states = looked_up(table, places.where(is_own, 0), dtype).masked_fill_(~is_own.unsqueeze(1), 0.0)
        self.collectives.sum_(states)
        return states

    def best(self, tokens: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The best token int64 [T] and its score float32 [T] over all ranks, given this rank's best.

        Of equal scores the lowest token wins, and NaN wins over all, as in an argmax of the whole.
        """
        bits = scores.contiguous().view(torch.int32).long()
        every = self.collectives.gather(torch.stack((tokens + self.shard.tokens.start, bits)))
        all_scores = every[:, 1].int().view(torch.float32)
        first = all_scores.argmax(dim=0, keepdim=True)  # ranks hold their tokens in order
        return every[:, 0].gather(0, first).squeeze(0), all_scores.gather(0, first).squeeze(0)

    def logits(self, own: Tensor) -> Tensor:
        """Logits [T, V] of all tokens; `own` are those of this rank's tokens."""
        sizes = [len(tokens) for tokens in self.shard.vocabulary]
        if not len(own):  # no rows, no exchange
            return own.new_empty(0, sum(sizes))
        padded = own.new_zeros(own.shape[0], max(sizes))
        padded[:, : own.shape[1]] = own
        every = self.collectives.gather(padded)
        return torch.cat([rows[:, :size] for rows, size in zip(every, sizes, strict=True)], dim=1)


Part = ModelShard
