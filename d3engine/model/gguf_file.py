"""Headers and tensors of a GGUF file, in one or several parts; every count and length is checked against the files."""

from __future__ import annotations

import math
import os
import re
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from d3engine.errors import MissingExtraError, ModelFormatError, must_be
from d3engine.model.fields import of_a_model
from d3engine.utils.files import UnreadableFileError, open_regular

if TYPE_CHECKING:  # a config is read without torch and numpy
    import numpy as np
    from numpy.typing import NDArray

TENSOR_TYPES = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
)
"""The types of tensors that are read, by ggml's names."""

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_HEADER_BYTES = 256 * 2**20
_MAX_ELEMENTS = 4_000_000
"""Limit of all arrays of a header together: a vocabulary of 256 thousand tokens has a fifth of that."""
_MAX_TENSORS = 200_000
_MAX_KEYS = 100_000
_MAX_DIMENSIONS = 4
_VALUES_AT_ONCE = 2**22
"""Values dequantized at once: dequantizing takes several times the memory of its result."""

_SETTLED_NS = 2 * 10**9
"""Age of a file from which on an unchanged time stamp means unchanged contents."""

_PART_NAME = re.compile(r"(.+)-(\d{5,})-of-(\d{5,})\.gguf")
"""The file name of a part, as llama.cpp writes and reads it: MODEL-00001-of-00003.gguf."""
_PART, _PARTS, _PARTS_TENSORS = "split.no", "split.count", "split.tensors.count"
_OF_EACH_PART = (_PART, "general.alignment")
"""The keys whose values parts of one file need not share."""

_CHUNK = 2**20
_LENGTH = struct.Struct("<Q")
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF's numbers for the types of values, in the letters of `struct`."""


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor in a file; `shape` is in torch's order, its last dimension contiguous."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int  # bytes from the start of the file
    nbytes: int
    path: Path  # of the file, or of the part of it


@dataclass(frozen=True)
class GGUFFile:
    """The checked header of a GGUF file: `metadata` by key (arrays are lists), `tensors` by name. Not to be changed.

    Of a file in several parts: `path` and `metadata` of the first, `tensors` of all.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    _versions: dict[Path, tuple[int, ...]]  # of the files that the headers were read from

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(path.stat().st_size for path in self._versions)

    def refuse(self, key: str, allowed: str) -> NoReturn:
        """Raise the error for the value of a key, saying what is allowed."""
        raise ModelFormatError(must_be(f"{self.path}: {key}", self.metadata.get(key), allowed))

    def read(self, name: str) -> NDArray[np.float32]:
        """The tensor of that name, dequantized; takes a few MiB beyond the result."""
        return self.read_rows(name, 0, math.prod(self.tensors[name].shape[:-1])).reshape(self.tensors[name].shape)

    def read_rows(self, name: str, first: int, count: int) -> NDArray[np.float32]:
        """Rows `first` to `first + count` of a tensor, dequantized, as [count, its last dimension]."""
        import numpy as np
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        kind = GGMLQuantizationType[tensor.type_name]
        values = np.empty((count, tensor.shape[-1]), dtype=np.float32)
        row_bytes = tensor.nbytes // math.prod(tensor.shape[:-1])
        step = max(1, _VALUES_AT_ONCE // tensor.shape[-1])
        # The loader refuses values that are not finite.
        with of_a_model(), self.opened(tensor.path) as file, np.errstate(all="ignore"):
            file.seek(tensor.offset + first * row_bytes)
            for start in range(0, count, step):
                some = min(step, count - start)
                raw = file.read(some * row_bytes)
                if len(raw) != some * row_bytes:
                    raise _shortened(tensor)
                values[start : start + some] = dequantize(np.frombuffer(raw, np.uint8).reshape(some, row_bytes), kind)
        return values

    @contextmanager
    def opened(self, path: Path) -> Iterator[BinaryIO]:
        """The file at `path`; raises `ModelFormatError` if it is not the one whose header was read."""
        with open_regular(path) as file:
            if _version_of(file) != self._versions[path]:
                raise ModelFormatError(f"{path} has changed since its header was read")
            yield file

    def _is_unchanged(self) -> bool:
        """Whether all files are those whose headers were read."""
        for path, version in self._versions.items():
            with open_regular(path) as file:
                if _version_of(file) != version:
                    return False
        return True


def _shortened(tensor: GGUFTensor) -> ModelFormatError:
    return ModelFormatError(f"{tensor.path}: tensor {tensor.name!r} cannot be read: the file has become shorter")


def is_gguf(path: Path) -> bool:
    """Whether a regular file has a GGUF file's suffix or magic; `open_gguf` checks the contents."""
    if not os.path.isfile(path):  # which raises for no name, however long
        return False
    if path.suffix.lower() == ".gguf":
        return True
    with suppress(UnreadableFileError), open_regular(path) as file:
        return file.read(len(_MAGIC)) == _MAGIC
    return False


def open_gguf(path: str | Path) -> GGUFFile:
    """Read and check the header of a GGUF file; no tensor is read. The last header is kept (`forget_header`).

    The path of a file in several parts is that of the first. Raises `ModelFormatError`, naming the file, for anything
    but a whole little-endian GGUF file of version 2 or 3 with tensors of `TENSOR_TYPES`, and `MissingExtraError`
    without the package `gguf`.
    """
    path = Path(path)
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("gguf", "gguf", "reading GGUF files") from error
    global _kept
    with of_a_model():
        if _kept is not None and _kept.path == path and _kept._is_unchanged():
            return _kept
        file = _read_parts(path)
    changed = max(version[-1] for version in file._versions.values())
    _kept = file if time.time_ns() - changed > _SETTLED_NS else None
    return file


def is_later_part(path: Path) -> bool:
    """Whether a file's name is that of a part behind the first of a GGUF file in several parts."""
    name = _PART_NAME.fullmatch(path.name)
    return name is not None and int(name[2]) != 1


# Loading a model asks for the header six times, and one with a large vocabulary takes 0.2 s to read.
_kept: GGUFFile | None = None


def forget_header() -> None:
    """Release the header that `open_gguf` keeps: about 30 MB with a large vocabulary."""
    global _kept
    _kept = None


def _version_of(file: BinaryIO) -> tuple[int, ...]:
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class _Header:
    """Reads values from the start of a file, bounded by its size: a false count costs no time or memory."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.version = _version_of(file)
        self.size = os.fstat(file.fileno()).st_size
        self._file = file
        self._elements = 0
        self._read = 0  # bytes read so far; the last ones are in the buffer, of which `_at` are consumed
        self._buffer = b""
        self._at = 0

    @property
    def position(self) -> int:
        """Bytes taken so far."""
        return self._read - len(self._buffer) + self._at

    def error(self, what: str) -> ModelFormatError:
        return ModelFormatError(f"{self.path}: {what}")

    def take(self, count: int) -> bytes:
        if count > len(self._buffer) - self._at:
            self._fetch(count)
        self._at += count
        return self._buffer[self._at - count : self._at]

    def _fetch(self, count: int) -> None:
        """Fill the buffer with at least `count` bytes."""
        most = min(self.size, _MAX_HEADER_BYTES)
        left = most - self.position
        if count > left:
            raise self.error(f"its header asks for {count:,} bytes at byte {self.position:,}, where {left:,} are left")
        untaken = self._buffer[self._at :]
        new = self._file.read(min(max(count, _CHUNK) - len(untaken), most - self._read))
        self._read += len(new)
        self._buffer, self._at = untaken + new, 0
        if len(self._buffer) < count:
            raise self.error("cannot be read: the file has become shorter")

    def integer(self, code: str) -> int:
        return int(struct.unpack(code, self.take(struct.calcsize(code)))[0])

    def string(self) -> str:
        raw = self.take(self.integer("<Q"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.error(f"a string that ends at byte {self.position:,} is not UTF-8") from None

    def strings(self, count: int) -> list[str]:
        """As `string`, fast for the hundreds of thousands of a vocabulary."""
        found: list[str] = []
        length_at, prefix = _LENGTH.unpack_from, _LENGTH.size
        while len(found) < count:
            buffer, at, size = self._buffer, self._at, len(self._buffer)
            with suppress(UnicodeDecodeError):
                for _ in range(count - len(found)):
                    if at + prefix > size or (end := at + prefix + length_at(buffer, at)[0]) > size:
                        break
                    found.append(buffer[at + prefix : end].decode())
                    at = end
            self._at = at
            if len(found) < count:  # one that goes beyond the buffer, or is invalid
                found.append(self.string())
        return found

    def value(self, key: str) -> Any:
        kind = self.integer("<I")
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self._scalars(key, kind, 1)[0]
        kind, count = self.integer("<I"), self.integer("<Q")
        self._elements += count
        if self._elements > _MAX_ELEMENTS:
            raise self.error(f"{key} has {count:,} elements: all arrays may have {_MAX_ELEMENTS:,} together")
        return self.strings(count) if kind == _STRING else self._scalars(key, kind, count)

    def _scalars(self, key: str, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            raise self.error(f"{key} is of the unknown type {kind}")
        code = f"<{count}{_SCALARS[kind]}"
        return list(struct.unpack(code, self.take(struct.calcsize(code))))


def _read_parts(path: Path) -> GGUFFile:
    """The file at `path`, with those of its other parts."""
    first = _read_file(path)
    count = first.metadata.get(_PARTS, 1)
    if type(count) is not int or count < 0:
        first.refuse(_PARTS, "an integer of at least 0")
    if count < 2:
        return first
    name = _PART_NAME.fullmatch(path.name)
    if name is None or int(name[3]) != count:
        parts = f"NAME-00001-of-{count:05}.gguf"
        raise ModelFormatError(f"{path}: the first of {count:,} parts (split.count) must be called {parts}")
    if int(name[2]) != 1 or first.metadata.get(_PART) != 0:
        file = path.with_name(_part_name(name, 1))
        first.refuse(_PART, f"0: a file in {count:,} parts is named by its first, {file}")
    tensors, versions = dict(first.tensors), dict(first._versions)
    for number in range(1, count):
        place = path.with_name(_part_name(name, number + 1))
        if not place.exists():
            raise ModelFormatError(f"{place} is missing: {path} is the first of {count:,} parts (split.count)")
        part = _read_file(place)
        for key, value in {_PART: number, _PARTS: count}.items():
            if part.metadata.get(key) != value:
                part.refuse(key, f"{value}, as in the file's name")
        for key in part.metadata.keys() - set(_OF_EACH_PART):
            if part.metadata[key] != first.metadata.get(key):
                part.refuse(key, f"what it is in {path}")
        for tensor in part.tensors.values():
            if tensor.name in tensors:
                raise ModelFormatError(f"tensor {tensor.name!r} is in both {tensors[tensor.name].path} and {place}")
        tensors |= part.tensors
        versions |= part._versions
    if first.metadata.get(_PARTS_TENSORS, len(tensors)) != len(tensors):
        first.refuse(_PARTS_TENSORS, f"the number of tensors in all parts, {len(tensors):,}")
    return GGUFFile(path, first.metadata, tensors, versions)


def _part_name(name: re.Match[str], number: int) -> str:
    """The file name of a part, where `name` is another's."""
    return f"{name[1]}-{number:0{len(name[2])}}-of-{name[3]}.gguf"


def _read_file(path: Path) -> GGUFFile:
    with open_regular(path) as opened:
        return _read_header(path, _Header(path, opened))


def _read_header(path: Path, header: _Header) -> GGUFFile:
    if header.size < 24 or header.take(4) != _MAGIC:
        raise header.error("is not a GGUF file: it does not begin with 'GGUF' and a header")
    version = header.integer("<I")
    if version not in _VERSIONS:
        if version and version & 0xFFFF == 0:
            raise header.error("is a big-endian GGUF file: only little-endian ones are read")
        raise header.error(f"is of GGUF version {version}: only 2 and 3 are read")
    num_tensors, num_values = header.integer("<Q"), header.integer("<Q")
    if num_tensors > _MAX_TENSORS or num_values > _MAX_KEYS:
        allowed = f"{_MAX_TENSORS:,} and {_MAX_KEYS:,} are allowed"
        raise header.error(f"claims {num_tensors:,} tensors and {num_values:,} keys: {allowed}")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = header.string()
        if key in metadata:
            raise header.error(f"has {key} twice")
        metadata[key] = header.value(key)
    described = [_tensor(header) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1) or alignment > 2**20:
        raise header.error(f"general.alignment must be a power of two up to 2^20; got {alignment!r}")
    start = -(-header.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, type_name, offset, nbytes in described:
        if name in tensors:
            raise header.error(f"has tensor {name!r} twice")
        tensors[name] = GGUFTensor(name, shape, type_name, start + offset, nbytes, path)
    _check_places(header, tensors.values(), alignment)
    return GGUFFile(path, metadata, tensors, {path: header.version})


def _tensor(header: _Header) -> tuple[str, tuple[int, ...], str, int, int]:
    """Name, shape, type, offset from the start of the data, and bytes of the next tensor."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    name = header.string()
    dimensions = header.integer("<I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise header.error(f"tensor {name!r} has {dimensions} dimensions: allowed are 1 to {_MAX_DIMENSIONS}")
    shape = tuple(reversed([header.integer("<Q") for _ in range(dimensions)]))
    number = header.integer("<I")
    type_name = GGMLQuantizationType(number).name if number in {kind.value for kind in GGMLQuantizationType} else "?"
    if type_name not in TENSOR_TYPES:
        allowed = ", ".join(TENSOR_TYPES)
        raise header.error(
            f"tensor {name!r} is of ggml's type {number} ({type_name}): those read are {allowed}"
            ", and the model's safetensors run too"
        )
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    if min(shape) < 1 or shape[-1] % block:
        raise header.error(f"tensor {name!r} of shape {shape} cannot be {type_name}, whose rows have blocks of {block}")
    return name, shape, type_name, header.integer("<Q"), math.prod(shape) // block * block_bytes


def _check_places(header: _Header, tensors: Iterable[GGUFTensor], alignment: int) -> None:
    """Raise unless every tensor is inside the file, aligned, and overlaps no other."""
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.offset + tensor.nbytes > header.size:
            where = f"from byte {tensor.offset:,} on {tensor.nbytes:,} bytes"
            raise header.error(f"tensor {tensor.name!r} takes {where}; the file has {header.size:,}")
        if tensor.offset % alignment:
            raise header.error(f"tensor {tensor.name!r} begins at byte {tensor.offset:,}, no multiple of {alignment}")
        if tensor.offset < end:
            raise header.error(f"tensor {tensor.name!r} overlaps the one before it")
        end = tensor.offset + tensor.nbytes
