"""A checkpoint of which a rank reads its own part alone: whole rows of some tensors, some columns of others.

The one idea: to whoever loads weights it is a smaller checkpoint. Of a mapped file only the pages of the part are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from d3engine.kernels.quantized import GROUP
from d3engine.model.checkpoint import Checkpoint
from d3engine.model.config import ModelConfig
from d3engine.model.expected_tensors import LM_HEAD, SCALES, VALUES, expected_tensors, has_groups, rows_of
from d3engine.model.mapped_file import dtype_of
from d3engine.model.part import Part


@dataclass(frozen=True, slots=True)
class Cut:
    """What is taken of a tensor: some rows, in this order, or some columns; or it is rank 0's, others see zeros."""

    rows: tuple[range, ...] | None = None
    columns: range | None = None
    is_others: bool = False

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what is taken of a tensor."""
        if self.rows is not None:
            return (sum(map(len, self.rows)), *whole[1:])
        return whole if self.columns is None else (whole[0], len(self.columns))

    def of(self, tensor: Tensor) -> Tensor:
        """What is taken, in order; without a copy where it lies in one piece."""
        if self.rows is not None:
            pieces = [tensor[rows.start : rows.stop] for rows in self.rows]
            return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return tensor if self.columns is None else tensor[:, self.columns.start : self.columns.stop].contiguous()


@dataclass(frozen=True)
class CheckpointShard(Checkpoint):
    """`whole`, with `cuts` by the names of tensors; `entries` have the shapes of what is left."""

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


def part_of_checkpoint(whole: Checkpoint, config: ModelConfig, part: Part) -> CheckpointShard:
    """The part of a checkpoint that holds the tensors which `config` asks for; others keep their shapes."""
    cuts = {name: cut for name, cut in _cuts(config, part).items() if name in whole.entries}
    entries = dict(whole.entries)
    for name, cut in cuts.items():
        entries[name] = replace(entries[name], shape=cut.shape(entries[name].shape))
    return CheckpointShard(entries, whole._sources, whole, cuts)


def part_shapes(config: ModelConfig, part: Part) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a rank loads, as `expected_tensors` of the whole."""
    cuts = _cuts(config, part)
    shapes = expected_tensors(config)
    return {name: cuts[name].shape(shape) if name in cuts else shape for name, shape in shapes.items()}


def _cuts(config: ModelConfig, part: Part) -> dict[str, Cut]:
    """What is taken of each tensor that is not every rank's whole."""
    names, width = config.tensor_names, config.head_dim
    queries, keys = _widened(part.heads, width), _widened(part.kv_heads, width)
    sizes = [(config.q_size, queries), (config.kv_size, keys), (config.kv_size, keys)]
    by_rows = {f"self_attn.{name}": _stacked(parts) for name, parts in rows_of(names.qkv, sizes).items()}
    halves = [(config.intermediate_size, part.channels)] * 2
    by_rows |= {f"mlp.{name}": _stacked(parts) for name, parts in rows_of(names.gate_up, halves).items()}
    by_columns = {"self_attn.o_proj": queries, "mlp.down_proj": part.channels}
    cuts: dict[str, Cut] = {}
    for layer in range(config.num_layers):
        prefix = names.layer(layer)
        for module, rows in by_rows.items():
            cuts |= {prefix + module + suffix: Cut(rows=rows) for suffix in (".weight", ".bias", VALUES, SCALES)}
        for module, columns in by_columns.items():
            cuts |= _of_columns(prefix + module, columns, config.quantization)
            if part.rank:  # a bias is added once
                cuts[prefix + module + ".bias"] = Cut(is_others=True)
    tokens = Cut(rows=(part.tokens,))
    by_tokens = (names.embedding.removesuffix(".weight"), LM_HEAD.removesuffix(".weight"))
    return cuts | {module + suffix: tokens for module in by_tokens for suffix in (".weight", VALUES, SCALES)}


def _of_columns(module: str, columns: range, scheme: str | None) -> dict[str, Cut]:
    """The cuts of a matrix of which a rank has these input channels; those with scales of groups begin with one."""
    if not has_groups(scheme):
        return {module + suffix: Cut(columns=columns) for suffix in (".weight", *([VALUES] if scheme else []))}
    groups = range(columns.start // GROUP, -(-columns.stop // GROUP))
    return {
        module + VALUES: Cut(columns=_widened(groups, GROUP // 2) if scheme == "int4" else columns),
        module + SCALES: Cut(columns=groups),
    }


def _widened(things: range, width: int) -> range:
    """The rows of things of `width` rows each."""
    return range(things.start * width, things.stop * width)


def _stacked(parts: list[tuple[int, range]]) -> tuple[range, ...]:
    """What is taken of parts that lie on top of each other, each of so many rows."""
    taken, first = [], 0
    for size, rows in parts:
        taken.append(range(first + rows.start, first + rows.stop))
        first += size
    return tuple(taken)
