"""Opens the safetensors files of a model directory and reads single tensors from them, memory-mapped.

The one idea: headers first. Every name, shape, dtype and file is known and cross-checked when
`open_safetensors` returns, before a single weight is read or allocated. The directory is untrusted: shard
names must be plain names inside it, and whatever is truncated, doubled or contradictory is an error that
names the file and the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from d3engine.errors import ModelFormatError
from d3engine.files import is_there, open_regular, path_of
from d3engine.model.fields import of_a_model, read_json_object
from d3engine.model.mapped_file import MappedFile

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
FP8 = "F8_E4M3"
"""Eight bits with scales beside them, of which `fp8_tensors.py` knows."""
_BYTES_PER_VALUE = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, FP8: 1, "I8": 1, "U8": 1}


@dataclass(frozen=True)
class Packed:
    """How a file holds a tensor whose values it does not hold one by one: what it calls that, and the bytes."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class TensorEntry:
    """What a file's header says of one tensor; `dtype` is safetensors' name for what is read, such as "BF16".

    `packed` is None where the file holds just that.
    """

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    packed: Packed | None = None

    @property
    def num_values(self) -> int:
        """Product of the shape."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def bytes_per_value(self) -> int:
        """Size of one value as it is read; only for the dtypes that `open_safetensors` lets through."""
        return _BYTES_PER_VALUE[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.num_values * self.bytes_per_value if self.packed is None else self.packed.nbytes

    @property
    def type_name(self) -> str:
        """What the file calls the kind of its values."""
        return self.dtype if self.packed is None else self.packed.name


class TensorFile(Protocol):
    """Where tensors are read from: a mapped file, or what a converter reads instead of one."""

    def tensor(self, name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of that name, on the CPU."""

    def row(self, name: str, dtype: str, shape: tuple[int, ...], row: int) -> Tensor:
        """That row of its first dimension alone."""

    def give_back(self, name: str) -> None:
        """Let go of what reading that tensor has brought into memory."""


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of an open model, by name; readable until the block that opened it ends."""

    entries: dict[str, TensorEntry]
    _sources: dict[Path, TensorFile]

    def read(self, name: str) -> Tensor:
        """Return one tensor on the CPU, in the dtype of its entry; one of a safetensors file lies in it
        (`MappedFile.tensor` says how).

        It may be used after the block.
        """
        entry = self.entries[name]
        return self._sources[entry.file].tensor(name, entry.dtype, entry.shape)

    def give_back(self, name: str) -> None:
        """Let go of the memory that a tensor takes; for those that were copied, or only looked at."""
        self._sources[self.entries[name].file].give_back(name)

    def read_row(self, name: str, row: int) -> bytes:
        """Return the bytes of `tensor[row]` in the dtype of its entry; nothing else of the tensor is read."""
        entry = self.entries[name]
        values = self._sources[entry.file].row(name, entry.dtype, entry.shape, row)
        return values.flatten().view(torch.uint8).numpy().tobytes()


@contextmanager
def open_safetensors(directory: str | Path) -> Iterator[Checkpoint]:
    """Open all safetensors files of a model directory: `model.safetensors`, or else the shards its index
    names.

    Raises `ModelFormatError` for a missing, unreadable, truncated or corrupt file, a tensor held by two
    shards, an index that disagrees with its shards, a shard name that is a path, and a dtype other than F64,
    F32, F16, BF16, F8_E4M3, I8 and U8. Which tensor may have which dtype is `check_tensors`' business.
    """
    index = _read_index(Path(directory))
    entries: dict[str, TensorEntry] = {}
    sources: dict[Path, TensorFile] = {}
    for file in _files(Path(directory), index):
        header, sources[file] = _opened(file)
        for entry in header:
            if entry.name in entries:
                raise ModelFormatError(f"tensor {entry.name!r} is in both {entries[entry.name].file} and {file}")
            entries[entry.name] = entry
    if index is not None:
        _check_index(Path(directory) / INDEX_FILE, index, entries)
    try:
        yield Checkpoint(entries, sources)
    finally:
        sources.clear()  # a mapping ends with the last tensor that lies in it


def _read_index(directory: Path) -> dict[str, str] | None:
    """Return the index's map from tensor name to shard name; None when a single file holds everything.

    As in transformers, a `model.safetensors` wins over an index beside it.
    """
    if is_there(directory / SINGLE_FILE):
        return None
    path = directory / INDEX_FILE
    if not is_there(path):
        raise _no_weights(directory)
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFormatError(f"{path}: weight_map must be an object of tensor names and file names")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_plain_name(shard):
            raise ModelFormatError(
                f"{path}: tensor {tensor!r} is in {shard!r}: a shard must be a plain .safetensors file name"
            )
    return weight_map


def _is_plain_name(shard: str) -> bool:
    """True for a name that stays in the directory; it may be a link, as in a hub cache."""
    return shard.endswith(".safetensors") and not any(mark in shard for mark in ("/", "\\", ":", "\0"))


def _files(directory: Path, index: dict[str, str] | None) -> list[Path]:
    if index is None:
        return [directory / SINGLE_FILE]
    return [directory / shard for shard in sorted(set(index.values()))]


def _no_weights(directory: Path) -> ModelFormatError:
    """The error for a directory without safetensors; it names the converter if there is work for one."""
    found = f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}"
    if any(directory.glob("consolidated*.pth")):
        return ModelFormatError(f"{found}; convert its .pth files: d3engine weights convert meta {directory} DST")
    if any(directory.glob("*.bin")) or any(directory.glob("*.pth")):
        return ModelFormatError(
            f"{found}, and pickled weights are never loaded; convert them: d3engine weights convert bin {directory} DST"
        )
    return ModelFormatError(found)


def _opened(file: Path) -> tuple[list[TensorEntry], MappedFile]:
    """The tensors of one file; safetensors itself checks the header's size and that offsets cover the file exactly."""
    with of_a_model(), open_regular(file) as opened:
        try:
            with safe_open(path_of(opened), framework="pt", device="cpu") as handle:
                entries = list(_header(file, handle))
        except (SafetensorError, OSError) as error:
            raise ModelFormatError(f"{file} is not a valid safetensors file: {error}") from None
        try:
            return entries, MappedFile(file, opened)
        except (OSError, ValueError, KeyError) as error:  # its header has just been valid: another process writes
            raise ModelFormatError(f"{file} cannot be read: {error}") from None


def _header(file: Path, handle: Any) -> Iterator[TensorEntry]:
    for name in handle.keys():  # noqa: SIM118  (a safe_open handle is not a mapping)
        header = handle.get_slice(name)
        entry = TensorEntry(name, file, tuple(header.get_shape()), header.get_dtype())
        if entry.dtype not in _BYTES_PER_VALUE:
            raise ModelFormatError(
                f"{file}: tensor {name!r} has dtype {entry.dtype}: allowed are {', '.join(_BYTES_PER_VALUE)}"
            )
        yield entry


def _check_index(path: Path, index: dict[str, str], entries: dict[str, TensorEntry]) -> None:
    """Raise unless the index and the shards' own headers name the same tensors in the same files."""
    for tensor, shard in index.items():
        if tensor not in entries:
            raise ModelFormatError(f"{path}: tensor {tensor!r} is not in any shard; the index says {shard!r}")
        if entries[tensor].file.name != shard:
            raise ModelFormatError(
                f"{path}: tensor {tensor!r} is in {entries[tensor].file.name!r}; the index says {shard!r}"
            )
    for tensor, entry in entries.items():
        if tensor not in index:
            raise ModelFormatError(f"{entry.file}: tensor {tensor!r} is not in {path}")
