"""Checkpoints under other names, of published 8-bit floats and of GGUF files as tensors of our own formats."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from d3engine.errors import ModelFormatError
from d3engine.kernels.quantized import GROUP
from d3engine.model.checkpoint import (
    FLOAT_DTYPES,
    FP8,
    SCALES,
    VALUES,
    Checkpoint,
    MadeTensor,
    MappedFile,
    Packed,
    TensorEntry,
    TensorFile,
    is_layer_matrix,
    made_checkpoint,
    quantized_tensors,
)
from d3engine.model.family import GGUF_LAYER_MODULES, GGUFLayout, OwnNames, TensorNames
from d3engine.model.fields import Fields, of_a_model
from d3engine.model.gguf_file import GGUFFile
from d3engine.model.gguf_metadata import RANKING_HEAD, ROPE_TENSORS, gguf_family, is_ranking
from d3engine.model.quantization_config import FP8_GROUPS, Block


def renamed_checkpoint(checkpoint: Checkpoint, names: OwnNames, fields: Fields) -> Checkpoint:
    """A checkpoint of a family with other names than a Llama's, by a Llama's; `fields` are those of config.json.

    Raises `ModelFormatError` for a fused matrix that is not groups of heads, and two tensors that become one.
    """
    if names == OwnNames():
        return checkpoint
    made: dict[str, _Renamed] = {}
    for name, entry in checkpoint.entries.items():
        if name.startswith(names.dropped):
            continue
        for one in _renamed(entry, names, fields):
            if one.entry.name in made:
                raise ModelFormatError(f"{entry.file}: tensor {name!r} is {one.entry.name!r}, which is there already")
            made[one.entry.name] = one
    return made_checkpoint(checkpoint, made.values(), checkpoint.entries)


def headed_checkpoint(checkpoint: Checkpoint, names: TensorNames, is_tied: bool) -> Checkpoint:
    """A checkpoint that sentence-transformers has saved, without a head and the prefix of names, by those of `names`.

    An untied head, which no embedding of a text needs, is the embedding of tokens.
    """
    bare, head = replace(names, prefix="").embedding, "lm_head.weight"
    if not names.prefix or bare not in checkpoint.entries:
        return checkpoint
    renamed = {name: entry for name, entry in checkpoint.entries.items() if name != head}
    made = [_Renamed(replace(entry, name=names.prefix + name), name) for name, entry in renamed.items()]
    if not is_tied and head not in checkpoint.entries:
        made.append(_Renamed(replace(renamed[bare], name=head), bare))
    return made_checkpoint(checkpoint, made, renamed)


@dataclass(frozen=True)
class _HeadRows:
    """Some heads of each group of a fused matrix, whose rows are [groups, heads of a group, channels of a head]."""

    groups: int
    heads: slice
    heads_per_group: int

    def of(self, tensor: Tensor) -> Tensor:
        """The rows of these heads, copied; of a single value the value."""
        if tensor.numel() == 1:
            return tensor
        heads = tensor.reshape(self.groups, self.heads_per_group, -1, *tensor.shape[1:])
        return heads[:, self.heads].flatten(0, 2)


@dataclass(frozen=True)
class _Renamed(MadeTensor):
    """A tensor of a file under another name, or the part of it that some heads are."""

    entry: TensorEntry
    source: str
    rows: _HeadRows | None = None

    def read(self, checkpoint: Checkpoint) -> Tensor:
        """The tensor; a part of one is newly allocated."""
        tensor = checkpoint.read(self.source)
        return tensor if self.rows is None else self.rows.of(tensor)

    def row(self, checkpoint: Checkpoint, row: int) -> Tensor:
        tensor = checkpoint.read(self.source)
        if self.rows is None or tensor.numel() == 1:
            return tensor[row]
        return tensor[int(self.rows.of(torch.arange(tensor.shape[0]))[row])]


def _renamed(entry: TensorEntry, names: OwnNames, fields: Fields) -> list[_Renamed]:
    """A tensor by its other name; a fused one is three: a matrix, a bias, scales of rows or one scale."""
    part = names.grouped_qkv
    if part is None or part not in entry.name:
        name = entry.name
        for own, other in names.parts.items():
            name = name.replace(own, other)
        return [_Renamed(replace(entry, name=name), entry.name)]
    queries = fields.integer("num_attention_heads")
    groups = fields.integer("num_key_value_heads", default=queries)
    per_group = queries // groups + 2
    first = entry.shape[0] if entry.shape else 1
    if entry.num_values != 1 and (queries % groups or first % (groups * per_group)):
        allowed = f"{groups} groups of {per_group} heads, as {fields.source} has it"
        raise ModelFormatError(f"{entry.file}: tensor {entry.name!r} of shape {list(entry.shape)} is not {allowed}")
    made = []
    for module, heads in (("q", slice(0, -2)), ("k", slice(-2, -1)), ("v", slice(-1, None))):
        rows = _HeadRows(groups, heads, per_group)
        name = entry.name.replace(part, f".self_attn.{module}_proj.")
        shape = rows.of(torch.empty(entry.shape, device="meta")).shape
        made.append(_Renamed(replace(entry, name=name, shape=tuple(shape)), entry.name, rows))
    return made


_PUBLISHED_SCALES = ("weight_scale", "weight_scale_inv")
"""Factors of the values; despite its name, so is the second."""
_OF_INPUTS = frozenset({"input_scale", "input_scale_ub", "activation_scale", "output_scale"})
_OF_HEADS = frozenset({"q_scale", "k_scale", "v_scale", "kv_scale"})
"""Scales of activations, which are not used: inputs stay floats, and an 8-bit KV cache computes its own."""
_ONE = ((), (1,), (1, 1))
"""The shapes of a single scale."""


def scheme_of_fp8(checkpoint: Checkpoint, block: Block | None) -> str | None:
    """The 8-bit scheme that can hold the layers' matrices; None where none can.

    "fp8" if each has one scale or one for each row, FP8_GROUPS if each has one for each block of 128 columns.
    """
    matrices = [entry for name, entry in checkpoint.entries.items() if is_layer_matrix(name)]
    if not matrices or any(entry.dtype != FP8 or len(entry.shape) != 2 for entry in matrices):
        return None
    scales = [_scales_of(checkpoint, entry) for entry in matrices]
    if all(map(_is_of_rows, matrices, scales)):
        return "fp8"
    blocks = [_block_in(entry.shape, found.shape, block) for entry, found in zip(matrices, scales, strict=True)]
    return FP8_GROUPS if all(found is not None and found[1] == GROUP for found in blocks) else None


def fp8_checkpoint(checkpoint: Checkpoint, block: Block | None) -> Checkpoint:
    """The tensors of a published checkpoint by our names: rows of 8 bits and their scales, or floats.

    With a scheme (`scheme_of_fp8`) a layer's matrix becomes `X.qweight`, as stored, and `X.scales`, float32 [rows] or
    [rows, groups]; any other matrix of 8-bit floats becomes float32. Tensors of other dtypes stay. Values are computed
    when a tensor is read and not kept. Raises `ModelFormatError` for a matrix without scales, or with scales of a shape
    that is not supported.
    """
    scales = {name: _scales_of(checkpoint, entry) for name, entry in checkpoint.entries.items() if entry.dtype == FP8}
    scheme = scheme_of_fp8(checkpoint, block)
    made: list[MadeTensor] = []
    for name, factors in scales.items():
        entry = checkpoint.entries[name]
        _check_shape(entry, factors, block)
        if scheme is None or not is_layer_matrix(name):
            made.append(_dequantized(entry, name, factors, block))
            continue
        (values, _), (rows, shape) = quantized_tensors(name, entry.shape, scheme).items()
        packed = Packed(factors.dtype, factors.nbytes)
        of_rows = replace(factors, name=rows, shape=shape, dtype="F32", packed=packed)
        made += [_Renamed(replace(entry, name=values), name), _ScalesOfRows(of_rows, factors, block)]
    gone = {*scales, *(factors.name for factors in scales.values())}
    return _with_made(checkpoint, made, gone)


def floats_of_rows(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint by our names with its 8-bit floats dequantized: `X.weight`, float32, replaces them."""
    made: list[MadeTensor] = []
    gone: set[str] = set()
    for name, entry in checkpoint.entries.items():
        module = name.removesuffix(VALUES)
        if name != module and entry.dtype == FP8 and module + SCALES in checkpoint.entries:
            made.append(_dequantized(entry, module + ".weight", checkpoint.entries[module + SCALES], (1, GROUP)))
            gone |= {name, module + SCALES}
    return _with_made(checkpoint, made, gone) if made else checkpoint


@dataclass(frozen=True)
class _ScalesOfRows(MadeTensor):
    """Scales [rows] or [rows, groups], from one for the matrix, for each row or for each block."""

    entry: TensorEntry
    scales: TensorEntry
    block: Block | None
    source = None

    def read(self, checkpoint: Checkpoint) -> Tensor:
        shape = self.entry.shape
        if len(shape) == 1:
            return _spread(checkpoint, self.scales, (*shape, 1), self.block).expand(*shape, 1).flatten().clone()
        scales = _finite_scales(checkpoint, self.scales)
        high = shape[0] // scales.shape[0] if self.block is None else self.block[0]
        return scales.repeat_interleave(high, 0)[: shape[0]]


@dataclass(frozen=True)
class _Dequantized(MadeTensor):
    """The product of values, which are `source`, and scales."""

    entry: TensorEntry
    source: str
    scales: TensorEntry
    block: Block | None

    def read(self, checkpoint: Checkpoint) -> Tensor:
        """The matrix, newly allocated."""
        scales = _spread(checkpoint, self.scales, self.entry.shape, self.block)
        return checkpoint.read(self.source).float().mul_(scales)

    def row(self, checkpoint: Checkpoint, row: int) -> Tensor:
        scales = _spread(checkpoint, self.scales, self.entry.shape, self.block)
        return checkpoint.read(self.source)[row].float().mul_(scales.expand(self.entry.shape)[row])


def _dequantized(values: TensorEntry, name: str, scales: TensorEntry, block: Block | None) -> _Dequantized:
    packed = Packed(FP8, values.nbytes + scales.nbytes)
    return _Dequantized(replace(values, name=name, dtype="F32", packed=packed), values.name, scales, block)


def _with_made(checkpoint: Checkpoint, made: list[MadeTensor], gone: set[str]) -> Checkpoint:
    own = {name.rpartition(".")[0] for name in checkpoint.entries if name.endswith(".weight")}
    modules = own | {module.rpartition(".")[0] for module in own}
    kept = {name: entry for name, entry in checkpoint.entries.items() if name not in gone}
    others = {name for name, entry in kept.items() if _is_of_activations(entry, modules)}
    for name in {one.entry.name for one in made} & (kept.keys() - others):
        raise ModelFormatError(f"{kept[name].file}: tensor {name!r} is unexpected beside published 8-bit weights")
    return made_checkpoint(checkpoint, made, gone | others)


def _spread(checkpoint: Checkpoint, scales: TensorEntry, shape: tuple[int, ...], block: Block | None) -> Tensor:
    """The scales of a matrix in float32, in a shape that broadcasts to its values."""
    found = _finite_scales(checkpoint, scales)
    rows, columns = shape
    if found.numel() == 1:
        return found.reshape(1, 1)
    if found.shape in ((rows,), (rows, 1)):
        return found.reshape(rows, 1)
    fitting = _block_in(shape, found.shape, block)
    assert fitting is not None, "the shape was checked"
    high, wide = fitting
    return found.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]


def _finite_scales(checkpoint: Checkpoint, entry: TensorEntry) -> Tensor:
    """The published scales in float32; raises `ModelFormatError` unless all are finite and above 0."""
    scales = checkpoint.read(entry.name).float()
    low, high = scales.aminmax()
    if not (low > 0 and high < math.inf):
        raise ModelFormatError(f"{entry.file}: tensor {entry.name!r} must have finite values above 0 as float32")
    return scales


def _is_of_activations(entry: TensorEntry, modules: Collection[str]) -> bool:
    """Whether a tensor is a scale of activations of one of `modules`, which is not read.

    Raises `ModelFormatError` for one whose shape or dtype no such scale has.
    """
    module, _, kind = entry.name.rpartition(".")
    if kind not in _OF_INPUTS | _OF_HEADS or module not in modules:
        return False
    is_scale = entry.shape in _ONE or (kind in _OF_HEADS and len(entry.shape) == 1 and entry.num_values > 0)
    if entry.dtype not in FLOAT_DTYPES or not is_scale:
        allowed = "one float, or one for each head" if kind in _OF_HEADS else "one float"
        held = f"dtype {entry.dtype} and shape {list(entry.shape)}"
        raise ModelFormatError(f"{entry.file}: tensor {entry.name!r} has {held}: allowed is {allowed}")
    return True


def _scales_of(checkpoint: Checkpoint, entry: TensorEntry) -> TensorEntry:
    """The tensor of a matrix's scales."""
    module = entry.name.removesuffix("weight")
    for kind in _PUBLISHED_SCALES:
        found = checkpoint.entries.get(module + kind)
        if found is not None and found.dtype in FLOAT_DTYPES:
            return found
    wanted = module + _PUBLISHED_SCALES[0]
    raise ModelFormatError(f"{entry.file}: tensor {entry.name!r} has dtype {FP8}, but there are no floats {wanted!r}")


def _is_of_rows(entry: TensorEntry, scales: TensorEntry) -> bool:
    rows = entry.shape[0]
    return scales.shape in (*_ONE, (rows,), (rows, 1))


def _check_shape(entry: TensorEntry, scales: TensorEntry, block: Block | None) -> None:
    if len(entry.shape) != 2:
        raise ModelFormatError(f"{entry.file}: tensor {entry.name!r} has dtype {FP8}: allowed for matrices alone")
    if _is_of_rows(entry, scales):
        return
    if _block_in(entry.shape, scales.shape, block) is None:
        blocks = f", or one for each block of {block[0]} x {block[1]}" if block else ", or one for each of equal blocks"
        raise ModelFormatError(
            f"{scales.file}: tensor {scales.name!r} has shape {list(scales.shape)}: allowed for a matrix of "
            f"{list(entry.shape)} are one scale, one for each row{blocks}"
        )


def _block_in(shape: tuple[int, ...], scales: tuple[int, ...], named: Block | None) -> Block | None:
    """The rows and columns that share a scale; None where they do not fit.

    The last blocks may be smaller if the config names their size; else all blocks are equal.
    """
    if len(scales) != 2:
        return None
    (rows, columns), (down, across) = shape, scales
    if named is None:
        fits = down > 0 and across > 0 and rows % down == 0 and columns % across == 0
        return (rows // down, columns // across) if fits else None
    high, wide = named
    return named if (-(-rows // high), -(-columns // wide)) == (down, across) else None


_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,4})\.(\w+)\.(weight|bias)")
_HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
"""Modules with rows of heads, which may be in another order than transformers', and the config's number of heads."""


def gguf_checkpoint(file: GGUFFile, config: Mapping[str, Any]) -> Checkpoint:
    """The tensors of `file` with the config.json `config`, dequantized to float32 one at a time when they are read.

    Raises `ModelFormatError` for a tensor that no model here has, or whose rows are not the config's heads.
    """
    family, layout = gguf_family(file)
    unread = {*ROPE_TENSORS, *([RANKING_HEAD] if is_ranking(file) else [])}
    names = {_name_of(file, name, family.names, layout): name for name in file.tensors if name not in unread}
    heads = {module: config[field] for module, field in _HEADS.items()} if layout.adjacent_pairs else {}
    tensors = GGUFTensors(file, names, heads, family.norm_offset)
    return Checkpoint({entry.name: entry for entry in tensors.entries()}, {file.path: tensors})


class GGUFTensors(TensorFile):
    """Reads the tensors of a GGUF file, by their names in transformers."""

    def __init__(
        self, file: GGUFFile, names: Mapping[str, str], heads: Mapping[str, int], norm_offset: float = 0.0
    ) -> None:
        """`norm_offset`: what the norms of the file have more than transformers'."""
        self._file = file
        self._names = names
        self._heads = heads
        self._norm_offset = norm_offset
        self._maps: dict[Path, MappedFile] = {}
        self._mapping = threading.Lock()  # layers are read at once

    def entries(self) -> Iterator[TensorEntry]:
        """The entries; raises `ModelFormatError` for rows that are not whole heads."""
        for name, own in self._names.items():
            tensor, num_heads = self._file.tensors[own], self._num_heads(name)
            if num_heads is not None and tensor.shape[0] % (2 * num_heads):
                raise ModelFormatError(
                    f"{self._file.path}: tensor {own!r} of shape {tensor.shape} is not {num_heads} heads"
                )
            packed = None if tensor.type_name == "F32" else Packed(tensor.type_name, tensor.nbytes)
            yield TensorEntry(name, self._file.path, tensor.shape, "F32", packed)

    def tensor(self, entry: TensorEntry) -> Tensor:
        """The tensor in float32, newly allocated."""
        name = entry.name
        values = torch.from_numpy(self._file.read(self._names[name]))
        if self._norm_offset and name.endswith("norm.weight"):
            values = values - self._norm_offset
        num_heads = self._num_heads(name)
        return values if num_heads is None else to_half_split(values, num_heads)

    def blocks(self, name: str) -> Tensor:
        """The matrix as uint8 [rows, bytes of a row], in ggml's blocks; in the mapped file where its rows' order is."""
        tensor, num_heads = self._file.tensors[self._names[name]], self._num_heads(name)
        shape = (tensor.shape[0], tensor.nbytes // tensor.shape[0])
        blocks = self._mapped(tensor.path).tensor(TensorEntry(tensor.name, tensor.path, shape, "U8"))
        return blocks if num_heads is None else to_half_split(blocks, num_heads)

    def row(self, entry: TensorEntry, row: int) -> Tensor:
        """One row; no other bytes are read."""
        if len(entry.shape) == 1:
            return self.tensor(entry)[row]
        num_heads = self._num_heads(entry.name)
        place = row if num_heads is None else adjacent_row(row, num_heads, entry.shape[0])
        return torch.from_numpy(self._file.read_rows(self._names[entry.name], place, 1))[0]

    def give_back(self, name: str) -> None:
        """Release the pages of a tensor in blocks; others are not kept here."""
        tensor = self._file.tensors[self._names[name]]
        if tensor.path in self._maps:
            self._maps[tensor.path].give_back(tensor.name)

    def _mapped(self, path: Path) -> MappedFile:
        with self._mapping:
            if path not in self._maps:
                tensors = [tensor for tensor in self._file.tensors.values() if tensor.path == path]
                ranges = {tensor.name: (tensor.offset, tensor.offset + tensor.nbytes) for tensor in tensors}
                with of_a_model(), self._file.opened(path) as file:
                    self._maps[path] = MappedFile(path, file, ranges)
            return self._maps[path]

    def _num_heads(self, name: str) -> int | None:
        """The number of heads whose rows are in llama.cpp's order; None for other tensors."""
        return self._heads.get(name.split(".")[-2])


def _name_of(file: GGUFFile, name: str, names: TensorNames, layout: GGUFLayout) -> str:
    """transformers' name of a tensor; raises `ModelFormatError` for an unknown one."""
    found = _LAYER.fullmatch(name)
    module = None if found is None else layout.modules.get(found[2]) or GGUF_LAYER_MODULES.get(found[2])
    if found is not None and module is not None:
        return f"{names.layer(int(found[1]))}{module}.{found[3]}"
    own = {
        "token_embd.weight": names.embedding,
        "output_norm.weight": names.final_norm,
        "output.weight": "lm_head.weight",
    }
    if name not in own:
        raise ModelFormatError(f"{file.path}: tensor {name!r} is not supported: no model here has it")
    return own[name]


def to_adjacent_pairs(weight: Tensor, num_heads: int, rotary_dim: int | None = None) -> Tensor:
    """Permute rows of each head from half-split order (rope pairs j and j + D / 2) to adjacent pairs (2j, 2j + 1).

    Half-split is transformers' order; Meta's files, llama2.c's, GGUF files and this engine use adjacent pairs.
    weight: [num_heads * D, ...], any dtype. `rotary_dim`: the first rows of a head that these are, None for all; later
    ones stay. Returns the same shape, contiguous.
    """
    heads = weight.reshape(num_heads, -1, *weight.shape[1:])
    made = heads.clone()
    turned = made[:, :rotary_dim]
    turned[:, 0::2], turned[:, 1::2] = heads[:, :rotary_dim].chunk(2, dim=1)
    return made.view(weight.shape)


def to_half_split(weight: Tensor, num_heads: int) -> Tensor:
    """The inverse of `to_adjacent_pairs`: from the order of Meta's and llama2.c's files to transformers'."""
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def adjacent_row(row: int, num_heads: int, num_rows: int) -> int:
    """The index in adjacent pairs of row `row` of the half-split order."""
    size = num_rows // num_heads
    head, channel = divmod(row, size)
    half, pair = divmod(channel, size // 2)
    return head * size + 2 * pair + half
