"""The tensors of memory-mapped safetensors files, and the names of quantized ones."""

from __future__ import annotations

import math
import mmap
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from d3engine.errors import ModelFormatError
from d3engine.kernels.quantized import GROUP
from d3engine.model.fields import of_a_model, read_json_object
from d3engine.model.quantization_config import SCHEMES
from d3engine.model.source import instead_of_a_model
from d3engine.utils.files import as_json, is_there, open_regular, path_of

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
FP8 = "F8_E4M3"
"""8-bit floats with scales in tensors of other names (`checkpoint_formats.py`)."""
VALUES, SCALES = ".qweight", ".scales"
"""The suffixes, in place of ".weight", of a quantized matrix's two tensors."""


@dataclass(frozen=True)
class Packed:
    """The file's own type of a tensor that it stores in another format, and its bytes there."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class TensorEntry:
    """One tensor in a file's header; `dtype` is safetensors' name, such as "BF16", of what is read.

    `packed` is None where the file stores it in that dtype.
    """

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    packed: Packed | None = None

    @property
    def num_values(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)

    @property
    def bytes_per_value(self) -> int:
        """Size of one value as it is read; only for the dtypes that `open_safetensors` lets through."""
        return _DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.num_values * self.bytes_per_value if self.packed is None else self.packed.nbytes

    @property
    def type_name(self) -> str:
        """The file's name for the type of its values."""
        return self.dtype if self.packed is None else self.packed.name


class TensorFile:
    """A source of tensors: a mapped file, or a reader that converts another format."""

    @abstractmethod
    def tensor(self, entry: TensorEntry) -> Tensor:
        """The tensor of an entry, on the CPU."""

    def row(self, entry: TensorEntry, row: int) -> Tensor:
        """One row of its first dimension."""
        return self.tensor(entry)[row]

    def blocks(self, name: str) -> Tensor:
        """As `Checkpoint.read_blocks`."""
        raise TypeError(f"tensor {name!r} is not in blocks")

    def order(self, name: str) -> Tensor | None:
        """As `Checkpoint.order_of`."""
        return None

    def give_back(self, name: str) -> None:
        """Release the memory that reading the tensor has taken, where any is kept."""


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of an open model, by name; readable until the block that opened it ends."""

    entries: dict[str, TensorEntry]
    _sources: dict[Path, TensorFile]

    def read(self, name: str) -> Tensor:
        """Return one tensor on the CPU, in the dtype of its entry; it may be used after the block.

        A tensor of a safetensors file stays in the mapped file (`MappedFile.tensor`).
        """
        entry = self.entries[name]
        return self._sources[entry.file].tensor(entry)

    def read_blocks(self, name: str) -> Tensor:
        """Return one matrix as uint8 [rows, bytes of a row], where its type is one of blocks."""
        return self._sources[self.entries[name].file].blocks(name)

    def order_of(self, name: str) -> Tensor | None:
        """Of a matrix in blocks: int32, the input channel of each of their columns; None: they are in order."""
        return self._sources[self.entries[name].file].order(name)

    def give_back(self, name: str) -> None:
        """Release the memory of a tensor that was copied, or only inspected."""
        self._sources[self.entries[name].file].give_back(name)

    def read_row(self, name: str, row: int) -> bytes:
        """Return the bytes of `tensor[row]` in the dtype of its entry; nothing else of the tensor is read."""
        entry = self.entries[name]
        return self._sources[entry.file].row(entry, row).flatten().view(torch.uint8).numpy().tobytes()


class MadeTensor:
    """A tensor that is made of others of a checkpoint when it is read.

    Attributes:
        entry: what it is.
        source: the tensor whose pages reading it takes; None: none are given back.
        order: as `Checkpoint.order_of`.
    """

    entry: TensorEntry
    source: str | None
    order: Tensor | None = None

    @abstractmethod
    def read(self, checkpoint: Checkpoint) -> Tensor:
        """The tensor."""

    def row(self, checkpoint: Checkpoint, row: int) -> Tensor:
        return self.read(checkpoint)[row]

    def blocks(self, checkpoint: Checkpoint) -> Tensor:
        raise TypeError(f"tensor {self.entry.name!r} is not in blocks")


def made_checkpoint(checkpoint: Checkpoint, made: Iterable[MadeTensor], gone: Collection[str]) -> Checkpoint:
    """A checkpoint without the tensors `gone`, and with those that are made of its tensors."""
    by_name = {one.entry.name: one for one in made}
    entries = {name: entry for name, entry in checkpoint.entries.items() if name not in gone}
    entries |= {name: one.entry for name, one in by_name.items()}
    tensors = _MadeTensors(checkpoint, by_name)
    return Checkpoint(entries, {entry.file: tensors for entry in entries.values()})


@dataclass(frozen=True)
class _MadeTensors(TensorFile):
    checkpoint: Checkpoint
    made: Mapping[str, MadeTensor]

    def tensor(self, entry: TensorEntry) -> Tensor:
        made = self.made.get(entry.name)
        return self.checkpoint.read(entry.name) if made is None else made.read(self.checkpoint)

    def row(self, entry: TensorEntry, row: int) -> Tensor:
        made = self.made.get(entry.name)
        return self.checkpoint.read(entry.name)[row] if made is None else made.row(self.checkpoint, row)

    def blocks(self, name: str) -> Tensor:
        return self.made[name].blocks(self.checkpoint) if name in self.made else self.checkpoint.read_blocks(name)

    def order(self, name: str) -> Tensor | None:
        return self.made[name].order if name in self.made else self.checkpoint.order_of(name)

    def give_back(self, name: str) -> None:
        source = self.made[name].source if name in self.made else name
        if source is not None:
            self.checkpoint.give_back(source)


@contextmanager
def open_safetensors(directory: str | Path) -> Iterator[Checkpoint]:
    """Open all safetensors files of a model directory: `model.safetensors`, or else the shards its index
    names.

    Checks every name, shape, dtype and file before a weight is read. Raises `ModelFormatError` for a missing,
    unreadable, truncated or corrupt file, a tensor held by two shards, an index that disagrees with its shards, a shard
    name that is a path, and a dtype other than F64, F32, F16, BF16, F8_E4M3, I8 and U8. `check_tensors` decides which
    tensor may have which dtype.
    """
    directory = Path(directory)
    index = _read_index(directory)
    names = [SINGLE_FILE] if index is None else sorted(set(index.values()))
    with open_safetensors_files(directory / name for name in names) as checkpoint:
        if index is not None:
            _check_index(directory / INDEX_FILE, index, checkpoint.entries)
        yield checkpoint


@contextmanager
def open_safetensors_files(files: Iterable[Path]) -> Iterator[Checkpoint]:
    """Open safetensors files, which need not be a model's own; raises as `open_safetensors`."""
    entries: dict[str, TensorEntry] = {}
    sources: dict[Path, TensorFile] = {}
    for file in files:
        header, sources[file] = _opened(file)
        for entry in header:
            if entry.name in entries:
                raise ModelFormatError(f"tensor {entry.name!r} is in both {entries[entry.name].file} and {file}")
            entries[entry.name] = entry
    try:
        yield Checkpoint(entries, sources)
    finally:
        sources.clear()  # a mapping ends with the last tensor that lies in it


def _read_index(directory: Path) -> dict[str, str] | None:
    """Return the index's map from tensor name to shard name; None when a single file holds everything.

    As in transformers, `model.safetensors` takes precedence over an index.
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


def _no_weights(directory: Path) -> ModelFormatError:
    """The error for a directory without safetensors; it names the converter for other weights there."""
    found = f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}"
    if adapter := instead_of_a_model(directory):
        return ModelFormatError(f"{found}{adapter}")
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
        except (OSError, ValueError, KeyError) as error:  # its header was valid a moment ago: another process writes
            raise ModelFormatError(f"{file} cannot be read: {error}") from None


def _header(file: Path, handle: Any) -> Iterator[TensorEntry]:
    for name in handle.keys():  # noqa: SIM118  (a safe_open handle is not a mapping)
        header = handle.get_slice(name)
        entry = TensorEntry(name, file, tuple(header.get_shape()), header.get_dtype())
        if entry.dtype not in _DTYPES:
            raise ModelFormatError(f"{file}: tensor {name!r} has dtype {entry.dtype}: allowed are {', '.join(_DTYPES)}")
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


def is_layer_matrix(name: str) -> bool:
    """Whether a tensor, by its name as a float, is a matrix of a layer."""
    return name.endswith(("_proj.weight", "_linear.weight"))


def has_groups(scheme: str | None) -> bool:
    """Whether 128 input channels of an output channel share a scale."""
    return scheme is not None and SCHEMES[scheme].has_groups


def value_dtype(scheme: str) -> torch.dtype:
    """The dtype of the values of a matrix quantized by `scheme`."""
    return dtype_of(SCHEMES[scheme].dtype)


def quantized_tensors(name: str, shape: tuple[int, ...], scheme: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the values and the scales that stand for a matrix `name` of `shape` (N, K)."""
    module = name.removesuffix(".weight")
    rows, columns = shape
    if not has_groups(scheme):
        return {module + VALUES: (rows, columns), module + SCALES: (rows,)}
    groups = -(-columns // GROUP)
    packed = SCHEMES[scheme].values_a_byte
    stored = groups * GROUP // packed if packed > 1 else columns
    return {module + VALUES: (rows, stored), module + SCALES: (rows, groups)}


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    FP8: torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of safetensors' name for it, such as "BF16", for the dtypes that `open_safetensors` allows."""
    return _DTYPES[name]


class MappedFile(TensorFile):
    """One file with a valid header, mapped into memory as long as one of its tensors is in use."""

    # Pages of a mapped file are no memory of the process. A tensor that is used as stored is never copied; after a copy
    # `give_back` releases the pages, so that a thread that loads has at most one tensor in memory twice.

    def __init__(self, file: Path, opened: BinaryIO, ranges: Mapping[str, tuple[int, int]] | None = None) -> None:
        """Map `opened`, the open `file`. Writes to its tensors stay in this process and never reach the file.

        `ranges` are the first byte and the end of each tensor; None: a header of safetensors has them.
        """
        self._file = file
        self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        self._ranges = self._of_safetensors() if ranges is None else ranges

    def _of_safetensors(self) -> dict[str, tuple[int, int]]:
        header_end = 8 + int.from_bytes(self._map[:8], "little")
        header = as_json(self._map[8:header_end], self._file)
        return {
            name: (header_end + entry["data_offsets"][0], header_end + entry["data_offsets"][1])
            for name, entry in header.items()
            if name != "__metadata__"
        }

    def tensor(self, entry: TensorEntry) -> Tensor:
        """A tensor of the file, copied only where its address is not aligned to its dtype.

        The file must not change while the tensor is in use; a rename may replace it.
        """
        begin, end = self._ranges[entry.name]
        held = dtype_of(entry.dtype)
        if begin == end:
            return torch.empty(entry.shape, dtype=held)
        if end > len(self._map):
            raise ModelFormatError(f"{self._file}: tensor {entry.name!r} cannot be read: the file has become shorter")
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=end - begin, offset=begin)
        if begin % held.itemsize:
            raw = raw.clone()
        return raw.view(held).view(entry.shape)

    def give_back(self, name: str) -> None:
        """Release the pages of a tensor; a later access reads them from the file again."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        begin, end = self._ranges[name]
        # Only whole pages: those at the ends belong to other tensors too.
        first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)
