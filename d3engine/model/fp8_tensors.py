"""A checkpoint in 8-bit floats as one of floats: what is read is values times scales.

The one idea: one tensor at a time, as of a GGUF file. A matrix is multiplied out when it is asked for, and nothing
keeps it. The shape of the scales says what each belongs to: the matrix, a row, or a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from d3engine.errors import ModelFormatError
from d3engine.model.checkpoint import FLOAT_DTYPES, FP8, Checkpoint, Packed, TensorEntry, TensorFile
from d3engine.model.fp8_config import Block

_SCALES = ("weight_scale", "weight_scale_inv")
"""Both are what values are multiplied by, whatever the second is called."""
_OF_ACTIVATIONS = frozenset(
    {"input_scale", "input_scale_ub", "activation_scale", "output_scale", "q_scale", "k_scale", "v_scale", "kv_scale"}
)
"""Scales of what is computed: inputs stay floats here, and cache entries of 8 bits have scales of their own."""


def floats_of_fp8(checkpoint: Checkpoint, block: Block | None) -> Checkpoint:
    """The tensors of `checkpoint` with its matrices in 8-bit floats as float32; those of other dtypes as they are.

    Raises `ModelFormatError` for a matrix without scales, or whose scales have not the shape of any that are read.
    """
    scales = {name: _scales_of(checkpoint, entry) for name, entry in checkpoint.entries.items() if entry.dtype == FP8}
    beside = {entry.name for entry in scales.values()}
    entries = {}
    for name, entry in checkpoint.entries.items():
        if name in beside or name.rpartition(".")[2] in _OF_ACTIVATIONS:
            continue
        if name in scales:
            _check_shape(entry, scales[name], block)
            entry = replace(entry, dtype="F32", packed=Packed(FP8, entry.nbytes + scales[name].nbytes))
        entries[name] = entry
    tensors = _MultipliedOut(checkpoint, scales, block)
    files: dict[Path, TensorFile] = {entry.file: tensors for entry in entries.values()}
    return Checkpoint(entries, files)


class _MultipliedOut:
    """Reads the tensors of a checkpoint, those that have scales multiplied by them."""

    def __init__(self, checkpoint: Checkpoint, scales: Mapping[str, TensorEntry], block: Block | None) -> None:
        self._checkpoint = checkpoint
        self._scales = scales
        self._block = block

    def tensor(self, name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor; a matrix that is multiplied out is memory of its own."""
        values = self._checkpoint.read(name)
        if name not in self._scales:
            return values
        return values.float().mul_(self._spread(name, values.shape))

    def row(self, name: str, dtype: str, shape: tuple[int, ...], row: int) -> Tensor:
        """One row of it."""
        values = self._checkpoint.read(name)
        if name not in self._scales:
            return values[row]
        return values[row].float().mul_(self._spread(name, values.shape).expand(values.shape)[row])

    def give_back(self, name: str) -> None:
        """Let go of the pages that it was read from."""
        self._checkpoint.give_back(name)

    def _spread(self, name: str, shape: torch.Size) -> Tensor:
        """The scales of a matrix in float32, of a shape that its values can be multiplied by."""
        scales = self._checkpoint.read(self._scales[name].name).float()
        rows, columns = shape
        if scales.numel() == 1:
            return scales.reshape(1, 1)
        if scales.numel() == rows and scales.shape[0] == rows:
            return scales.reshape(rows, 1)
        block = _block_in(shape, scales.shape, self._block)
        assert block is not None, "the shape was checked"
        high, wide = block
        return scales.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]


def _scales_of(checkpoint: Checkpoint, entry: TensorEntry) -> TensorEntry:
    """The tensor of a matrix's scales."""
    module = entry.name.removesuffix("weight")
    for kind in _SCALES:
        found = checkpoint.entries.get(module + kind)
        if found is not None and found.dtype in FLOAT_DTYPES:
            return found
    wanted = module + _SCALES[0]
    raise ModelFormatError(f"{entry.file}: tensor {entry.name!r} has dtype {FP8}, but there are no floats {wanted!r}")


def _check_shape(entry: TensorEntry, scales: TensorEntry, block: Block | None) -> None:
    if len(entry.shape) != 2:
        raise ModelFormatError(f"{entry.file}: tensor {entry.name!r} has dtype {FP8}: allowed for matrices alone")
    rows = entry.shape[0]
    if scales.num_values == 1 or scales.shape in ((rows,), (rows, 1)):
        return
    if len(scales.shape) != 2 or _block_in(entry.shape, scales.shape, block) is None:
        blocks = f", or one for each block of {block[0]} x {block[1]}" if block else ", or one for each of equal blocks"
        raise ModelFormatError(
            f"{scales.file}: tensor {scales.name!r} has shape {list(scales.shape)}: allowed for a matrix of "
            f"{list(entry.shape)} are one scale, one for each row{blocks}"
        )


def _block_in(shape: tuple[int, ...], scales: tuple[int, ...], named: Block | None) -> Block | None:
    """The rows and columns that share a scale; None where they do not fit. Blocks at the end may be smaller if the
    config names their size; of others all are equal."""
    (rows, columns), (down, across) = shape, scales
    if named is None:
        fits = down > 0 and across > 0 and rows % down == 0 and columns % across == 0
        return (rows // down, columns // across) if fits else None
    high, wide = named
    return named if (-(-rows // high), -(-columns // wide)) == (down, across) else None
