"""Checkpoints of AutoAWQ, GPTQ and llm-compressor: matrices of whole numbers in groups, as blocks or as floats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from d3engine.errors import ModelFormatError
from d3engine.kernels.blocks import BLOCK_FORMATS
from d3engine.kernels.integer_groups import pack_integer_groups
from d3engine.model.checkpoint import FLOAT_DTYPES, Checkpoint, MadeTensor, Packed, TensorEntry, made_checkpoint
from d3engine.model.quantization_config import IntegerLayout

# The published value of a weight is (number - zero point) x scale, rounded to the dtype of the scales. Here it is not
# rounded: the product is a float32.

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the numbers of eight neighbouring output channels are in a word: the fifth is second, and so on."""

_ROWS_AT_ONCE = 4096
"""Output channels that are unpacked at once, so that temporaries stay small."""


@dataclass(frozen=True)
class _Names:
    """Suffixes of a matrix's tensors: the numbers, their scales, zero points (absent: the middle) and group indices."""

    values: tuple[str, ...]
    scales: str
    zero_points: str
    group_indices: str
    others: tuple[str, ...] = ()


_GPTQ_NAMES = _Names((".qweight",), ".scales", ".qzeros", ".g_idx")
_NAMES = {
    "awq": _GPTQ_NAMES,
    "gptq": _GPTQ_NAMES,
    "compressed-tensors": _Names(
        (".weight_packed", ".weight"), ".weight_scale", ".weight_zero_point", ".weight_g_idx", (".weight_shape",)
    ),
}


@dataclass(frozen=True)
class _Matrix(MadeTensor):
    """One matrix [N, K] of whole numbers, which are `source`; `type_name`: of the blocks that it becomes, or None.

    `order` int32 are the columns group by group, where each group is not a run of neighbours.
    """

    entry: TensorEntry
    source: str
    layout: IntegerLayout
    scales: TensorEntry
    zero_points: TensorEntry | None
    num_groups: int
    type_name: str | None
    order: Tensor | None

    def read(self, checkpoint: Checkpoint) -> Tensor:
        """The matrix in float32, newly allocated."""
        return torch.cat([self._floats(checkpoint, *span) for span in self._spans()])

    def row(self, checkpoint: Checkpoint, row: int) -> Tensor:
        start = row // 8 * 8  # whole words
        return self._floats(checkpoint, start, min(start + 8, self.entry.shape[0]))[row - start]

    def blocks(self, checkpoint: Checkpoint) -> Tensor:
        """In blocks; raises `ModelFormatError` for scales not finite."""
        assert self.type_name is not None, "it has blocks"
        columns, bits = BLOCK_FORMATS[self.type_name].columns, self.layout.bits
        order = slice(None) if self.order is None else self.order.long()
        try:
            parts = (self._parts(checkpoint, *span) for span in self._spans())
            packed = [
                pack_integer_groups(codes[:, order], zero_points, scales, columns, bits)
                for codes, zero_points, scales in parts
            ]
            return torch.cat(packed)
        except ValueError as error:
            raise ModelFormatError(f"{self.scales.file}: tensor {self.scales.name!r}: {error}") from None

    def _spans(self) -> Iterator[tuple[int, int]]:
        rows = self.entry.shape[0]
        return ((start, min(start + _ROWS_AT_ONCE, rows)) for start in range(0, rows, _ROWS_AT_ONCE))

    def _floats(self, checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        """Rows [start, stop) in float32."""
        codes, zero_points, scales = self._parts(checkpoint, start, stop)
        indices = self.entry.name.removesuffix(".weight") + _NAMES[self.layout.method].group_indices
        groups = _group_indices(checkpoint, indices, self.entry.shape[1], self.num_groups)
        return (codes.float() - zero_points[:, groups]) * scales[:, groups]

    def _parts(self, checkpoint: Checkpoint, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """Numbers [N, K] and zero points [N, groups], uint8, and scales float32 [N, groups] of rows [start, stop).

        `start` is a multiple of eight.
        """
        bits, method = self.layout.bits, self.layout.method
        values, stored = checkpoint.read(self.source), checkpoint.read(self.scales.name).float()
        zero_points = self._zero_points(checkpoint, start, stop)
        if method == "compressed-tensors":
            scales = stored.reshape(-1, self.num_groups).expand(self.entry.shape[0], -1)[start:stop]
            return _bytes_or_numbers(values[start:stop], bits), zero_points, scales
        if method == "gptq":
            codes = _numbers(values[:, start:stop], bits).transpose(0, 1).flatten(1)
        else:
            words = values[:, start * bits // 32 : -(-stop * bits // 32)]
            codes = _numbers(words, bits)[:, :, _AWQ_PLACES].flatten(1)[:, : stop - start].t()
        return codes.contiguous(), zero_points, stored[:, start:stop].t().contiguous()

    def _zero_points(self, checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        """Zero points uint8 [N, groups] of rows [start, stop)."""
        rows, bits, method = stop - start, self.layout.bits, self.layout.method
        if self.zero_points is None:
            return torch.full((rows, self.num_groups), 1 << (bits - 1), dtype=torch.uint8)
        stored = checkpoint.read(self.zero_points.name)
        words = slice(start * bits // 32, -(-stop * bits // 32))
        if method == "compressed-tensors":
            if self.zero_points.dtype == "I8":
                return _bytes_or_numbers(stored[start:stop], bits)
            return _numbers(stored[words], bits).transpose(1, 2).flatten(0, 1)[:rows]
        # Words are added, as GPTQModel does it: the offset of a number that overflows goes to the next one.
        ones = (2**32 - 1) // (2**bits - 1)
        found = _numbers(stored[:, words] + self.layout.zero_offset * ones, bits)
        return (found[:, :, _AWQ_PLACES] if method == "awq" else found).flatten(1)[:, :rows].t()


def integer_checkpoint(checkpoint: Checkpoint, layouts: Sequence[IntegerLayout]) -> Checkpoint:
    """The tensors of a published checkpoint by transformers' names, its matrices of whole numbers as `X.weight`.

    They read as float32, and as blocks where all groups are as large. Raises `ModelFormatError` for tensors that are
    missing or of a shape or dtype that no layout, all of one method, has.
    """
    names = _NAMES[layouts[0].method]
    matrices: dict[str, _Matrix] = {}
    gone: set[str] = set()
    for entry in checkpoint.entries.values():
        module = _module_of(entry, names)
        if module is None:
            continue
        name = f"{module}.weight"
        if name in matrices or (name != entry.name and name in checkpoint.entries):
            raise ModelFormatError(f"{entry.file}: tensor {entry.name!r} is unexpected beside {name!r}")
        layout = layouts[0] if len(layouts) == 1 else _layout_of(checkpoint, module, entry, names, layouts)
        matrices[name] = _matrix_of(checkpoint, module, entry, names, layout)
        beside = (names.scales, names.zero_points, names.group_indices, *names.others)
        gone |= {entry.name, *(module + suffix for suffix in beside)}
    return made_checkpoint(checkpoint, matrices.values(), gone)


def _module_of(entry: TensorEntry, names: _Names) -> str | None:
    """The module whose numbers a tensor holds; None for any other tensor."""
    suffix = next((suffix for suffix in names.values if entry.name.endswith(suffix)), None)
    if suffix is None or (suffix == ".weight" and entry.dtype != "I8"):
        return None
    return entry.name.removesuffix(suffix)


def _layout_of(
    checkpoint: Checkpoint, module: str, values: TensorEntry, names: _Names, layouts: Sequence[IntegerLayout]
) -> IntegerLayout:
    """The one of several layouts by which a matrix has the columns that the file names, and its number of scales.

    The config's `targets` are not read: they may be regular expressions, and a stranger's may run for ever.
    """
    scales, shape = (checkpoint.entries.get(module + suffix) for suffix in (names.scales, *names.others))
    if shape is not None and shape.shape == (2,) and shape.dtype in ("I32", "I64"):
        rows, columns = checkpoint.read(shape.name).tolist()
        columns = columns if (rows, *values.shape[1:]) == values.shape else 0
    else:
        columns = values.shape[-1] if values.dtype == "I8" and values.shape else 0
    for layout in layouts:
        in_word = 32 // layout.bits if values.dtype == "I32" else 1
        is_wide = len(values.shape) == 2 and values.shape[1] * in_word == columns > 0
        groups = columns // layout.group_size if layout.group_size else 1
        if is_wide and scales is not None and scales.num_values in (values.shape[0] * groups, 1):
            return layout
    allowed = ", ".join(f"{one.bits} bits with a scale for {one.group_size or 'all'} columns" for one in layouts)
    raise ModelFormatError(
        f"{values.file}: tensor {values.name!r} with its shape and scales must be one of config_groups: {allowed}"
    )


def _matrix_of(
    checkpoint: Checkpoint, module: str, values: TensorEntry, names: _Names, layout: IntegerLayout
) -> _Matrix:
    scales = checkpoint.entries.get(module + names.scales)
    if scales is None or scales.dtype not in FLOAT_DTYPES:
        raise ModelFormatError(f"{values.file}: tensor {values.name!r} has no floats {module + names.scales!r}")
    in_word = 32 // layout.bits if values.dtype == "I32" else 1
    allowed = ("I32", "I8") if layout.method == "compressed-tensors" and layout.bits == 8 else ("I32",)
    if len(values.shape) != 2 or values.dtype not in allowed:
        held = f"dtype {values.dtype} and shape {list(values.shape)}"
        raise ModelFormatError(
            f"{values.file}: tensor {values.name!r} has {held}: allowed is a matrix of {' or '.join(allowed)}"
        )
    first, second = values.shape
    rows, columns = {
        "awq": (second * in_word, first),
        "gptq": (second, first * in_word),
        "compressed-tensors": (first, second * in_word),
    }[layout.method]
    num_groups = _check_scales(scales, (rows, columns), layout)
    zero_points = checkpoint.entries.get(module + names.zero_points)
    if zero_points is None and layout.method != "compressed-tensors":
        raise ModelFormatError(f"{values.file}: tensor {module + names.zero_points!r} is missing")
    if zero_points is not None:
        _check_zero_points(zero_points, (rows, num_groups), layout)
    indices = _group_indices(checkpoint, module + names.group_indices, columns, num_groups)
    type_name = None
    if scales.dtype in ("F16", "BF16") and bool((indices.bincount() * num_groups == columns).all()):
        type_name = _type_of(columns // num_groups, layout.bits)  # other scales may have more bits than a block keeps
    order = None if bool((indices.diff() >= 0).all()) else indices.argsort(stable=True).int()
    stored = sum(one.nbytes for one in (values, scales, zero_points) if one is not None)
    packed = Packed(type_name or layout.method, stored)
    entry = TensorEntry(f"{module}.weight", values.file, (rows, columns), "F32", packed)
    return _Matrix(entry, values.name, layout, scales, zero_points, num_groups, type_name, order)


def _type_of(columns: int, bits: int) -> str | None:
    """The blocks that hold groups of `columns` columns; None where no blocks fit."""
    types = (name for name, block in BLOCK_FORMATS.items() if block.bits == bits and columns % block.columns == 0)
    return max(types, key=lambda name: BLOCK_FORMATS[name].columns, default=None)


def _check_scales(scales: TensorEntry, shape: tuple[int, int], layout: IntegerLayout) -> int:
    """The number of groups of a row; raises `ModelFormatError` for scales of another shape."""
    rows, columns = shape
    size = layout.group_size or max(1, columns)
    groups = columns // size if columns % size == 0 else 0
    allowed: list[tuple[int, ...]] = [(groups, rows)] if layout.method != "compressed-tensors" else [(rows, groups)]
    if groups == 1 and layout.method == "compressed-tensors":
        allowed += [(rows,), (1,), (1, 1), ()]
    if not groups or scales.shape not in allowed:
        raise ModelFormatError(
            f"{scales.file}: tensor {scales.name!r} has shape {list(scales.shape)}: allowed for a matrix of "
            f"{[rows, columns]} in groups of {size} is {list(allowed[0]) if groups else 'none'}"
        )
    return groups


def _check_zero_points(entry: TensorEntry, shape: tuple[int, int], layout: IntegerLayout) -> None:
    """Raise `ModelFormatError` unless zero points are one for each scale, in words or in bytes."""
    (rows, groups), in_word = shape, 32 // layout.bits
    if layout.method != "compressed-tensors":
        allowed = {"I32": (groups, rows // in_word)}
    else:
        allowed = {"I32": (-(-rows // in_word), groups), "I8": (rows, groups)}
    if entry.shape != allowed.get(entry.dtype):
        raise ModelFormatError(
            f"{entry.file}: tensor {entry.name!r} has dtype {entry.dtype} and shape {list(entry.shape)}: allowed is "
            + " or ".join(f"{dtype} of {list(one)}" for dtype, one in allowed.items())
        )


def _group_indices(checkpoint: Checkpoint, name: str, columns: int, groups: int) -> Tensor:
    """The group of each column, int64; raises `ModelFormatError` for groups that there are not."""
    entry = checkpoint.entries.get(name)
    if entry is None:
        return torch.arange(columns) // (columns // groups)
    is_valid = entry.dtype in ("I32", "I64") and entry.shape == (columns,)
    indices = checkpoint.read(name).long() if is_valid else torch.tensor([-1])
    if not (int(indices.amin()) >= 0 and int(indices.amax()) < groups):
        allowed = f"the groups, 0 to {groups - 1}, of {columns} columns"
        raise ModelFormatError(f"{entry.file}: tensor {name!r} must be {allowed}")
    return indices


def _bytes_or_numbers(stored: Tensor, bits: int) -> Tensor:
    """Numbers [N, K] of words [N, K x bits / 32], or of signed bytes [N, K]."""
    if stored.dtype == torch.int8:
        return (stored + (1 << (bits - 1))).view(torch.uint8)
    return _numbers(stored, bits).flatten(1)


def _numbers(words: Tensor, bits: int) -> Tensor:
    """The numbers of int32 words [A, B], the lowest bits first: uint8 [A, B, 32 / bits]."""
    four = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    return four if bits == 8 else torch.stack([four & 15, four >> 4], dim=3).flatten(2)
