"""A safetensors file as tensors that lie in the file itself, mapped into memory.

The one idea: a page of a mapped file is no memory of the process's own. A tensor that is used as it is stays there and
is never copied; of one that was copied elsewhere the pages are given back, so that no more than one tensor is in memory
twice.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from d3engine.errors import ModelFormatError
from d3engine.files import as_json

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
}


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of what safetensors calls "BF16"; for the dtypes that `open_safetensors` lets through."""
    return _DTYPES[name]


class MappedFile:
    """One file whose header is known to be valid; the mapping lasts as long as a tensor lies in it."""

    def __init__(self, file: Path, opened: BinaryIO) -> None:
        """Map `opened`, the open `file`. What is written to a tensor of it stays in this process, and never reaches the
        file."""
        self._file = file
        self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        header_end = 8 + int.from_bytes(self._map[:8], "little")
        header = as_json(self._map[8:header_end], file)
        self._ranges = {
            name: (header_end + entry["data_offsets"][0], header_end + entry["data_offsets"][1])
            for name, entry in header.items()
            if name != "__metadata__"
        }

    def tensor(self, name: str, dtype: str, shape: Sequence[int]) -> Tensor:
        """A tensor of the file, without a copy unless it begins at an address that its dtype cannot have.

        The file must stay as it is while the tensor is in use; a new file in its place (a rename) does no harm.
        """
        begin, end = self._ranges[name]
        held = dtype_of(dtype)
        if begin == end:
            return torch.empty(tuple(shape), dtype=held)
        if end > len(self._map):
            raise ModelFormatError(f"{self._file}: tensor {name!r} cannot be read: the file has become shorter")
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=end - begin, offset=begin)
        if begin % held.itemsize:
            raw = raw.clone()
        return raw.view(held).view(tuple(shape))

    def row(self, name: str, dtype: str, shape: Sequence[int], row: int) -> Tensor:
        """One row of a tensor, of which no other page is read."""
        return self.tensor(name, dtype, shape)[row]

    def give_back(self, name: str) -> None:
        """Let go of the pages of a tensor that is not needed any more; should it be read again, so is the file."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        begin, end = self._ranges[name]
        # Only whole pages: those at the borders belong to the neighbours too.
        first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)
