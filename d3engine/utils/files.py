"""Reads and writes a user's small files: only regular ones, up to a bound whatever their
size is said to be, and whole or not at all."""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

from d3engine.errors import D3EngineError

CONFIG_BYTES = 16 * 2**20
"""Most bytes of a configuration or a chat template: real ones have less than a tenth."""
DATA_BYTES = 256 * 2**20
"""Most bytes of a tokenizer, of a file of questions, or of a prompt."""

_CHUNK = 2**20
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""What a clone of a repository has in place of a large file, unless Git LFS is installed."""
_NOT_REPLACED = ("/dev", "/dev/fd", "/proc/self/fd")


class UnreadableFileError(D3EngineError, ValueError):
    """A file that cannot be read as what it should be; the message begins with its path."""


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """An `OSError` in here names the file at `path`, as that of a full disk does not by itself."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def is_there(path: Path) -> bool:
    """Whether a directory has this entry, be it a broken link: what is there and cannot be read is an error."""
    try:
        os.lstat(path)
    except PermissionError:
        return True  # of a directory that may not be looked into: reading the file says so
    except (OSError, ValueError):
        return False
    return True


def beside(model: str | Path, name: str) -> Path:
    """Where a file lies that goes with a model: in its directory, or beside it where the model is a single file."""
    model = Path(model)
    return (model.parent if model.is_file() else model) / name


def free_bytes(place: Path) -> int:
    """Bytes free on the disk where `place` is, or will be."""
    place = place.absolute()
    return shutil.disk_usage(next(folder for folder in (place, *place.parents) if folder.exists())).free


@contextmanager
def open_regular(path: str | Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading; raises `UnreadableFileError` for anything else, also from within the block.

    What was opened is what is checked: nothing that takes the file's place afterwards is read.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UnreadableFileError(f"{path} is not a regular file")
            if file.peek(len(_LFS_POINTER)).startswith(_LFS_POINTER):
                raise UnreadableFileError(
                    f"{path} is a pointer of Git LFS, not the file itself: git lfs pull fetches it"
                )
            yield file
    except FileNotFoundError:
        raise UnreadableFileError(f"{path} is missing") from None
    except IsADirectoryError:
        raise UnreadableFileError(f"{path} is not a regular file") from None
    except OSError as error:
        raise UnreadableFileError(f"{path} cannot be read: {error.strerror or error}") from None


def path_of(file: BinaryIO) -> str:
    """A path by which a library opens the very file that is open here, where the system has one."""
    same = f"/proc/self/fd/{file.fileno()}"  # on Windows a place on the current drive, or one of Wine's
    return same if os.name == "posix" and os.path.exists(same) else str(file.name)


def read_bytes(path: str | Path, most: int = CONFIG_BYTES) -> bytes:
    """The content of a regular file of at most `most` bytes; raises `UnreadableFileError` for anything else."""
    content = bytearray()
    for chunk in _chunks(path, most):
        content += chunk
    return bytes(content)


def sha256_of(path: str | Path, most: int) -> str:
    """The hex SHA-256 of a regular file of at most `most` bytes; raises as `read_bytes`."""
    digest = hashlib.sha256()
    for chunk in _chunks(path, most):
        digest.update(chunk)
    return digest.hexdigest()


def _chunks(path: str | Path, most: int) -> Iterator[bytes]:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        come = 0
        # A size of 0 may be a lie (/proc), and a file may grow: what counts is what comes.
        while max(size, come) <= most and (chunk := file.read(_CHUNK)):
            come += len(chunk)
            yield chunk
        if max(size, come) > most:
            raise UnreadableFileError(f"{path} has more than {most:,} bytes, which is the most that is read of it")


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting for the writer of a pipe, and without making a terminal this process's own."""
    try:
        return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))
    except ValueError as error:  # a null character
        raise OSError(str(error)) from None


def read_text(path: str | Path, most: int = DATA_BYTES) -> str:
    """UTF-8 text with "\\n" for every kind of line end; raises as `read_bytes`, and for bytes that are no UTF-8.

    A byte order mark, which editors on Windows write first, is no part of it.
    """
    return as_text(read_bytes(path, most), path).removeprefix("\ufeff")


def as_text(content: bytes, path: str | Path) -> str:
    """What `read_text` makes of the bytes of a file; `path` is what errors call it."""
    try:
        return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8").read()
    except UnicodeDecodeError as error:
        raise UnreadableFileError(f"{path} is not UTF-8 text: {error}") from None


def read_json(path: str | Path, most: int = CONFIG_BYTES) -> Any:
    """The parsed content of a JSON file; raises as `read_bytes`, and for what is no JSON."""
    return as_json(read_bytes(path, most), path)


def as_json(content: str | bytes, path: str | Path) -> Any:
    """What `read_json` makes of the content of a file; `path` is what errors call it.

    A key that stands twice is refused: parsers differ in which of its values they take.
    """
    try:
        return json.loads(content, object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise UnreadableFileError(f"{path} is not valid JSON: {error}") from None


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name[:60]!r} stands twice in one object")
        found[name] = value
    return found


def is_writable(path: Path) -> bool:
    """Whether `write_whole` may write there, as far as can be told before."""
    if _is_written_in_place(path):
        return not path.is_dir() and os.access(path, os.W_OK)
    target = Path(os.path.realpath(path))
    return os.access(target.parent, os.W_OK) and (not target.exists() or os.access(target, os.W_OK))


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file whole or not at all: an earlier one stays until the new one is complete, and takes its place then.

    A link is followed. What is no regular file (/dev/stdout, a pipe) is written to as it is. Raises `OSError`.
    """
    raw = content.encode("utf-8") if isinstance(content, str) else content
    path = Path(path)
    if _is_written_in_place(path):
        with naming(path):
            path.write_bytes(raw)
        return
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with naming(path), open(temporary, "xb") as file:
            file.write(raw)
        if target.exists():
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


if sys.platform == "win32":

    def _lock(file: IO[bytes]) -> None:
        """Nothing: there a lock would keep others from reading."""

else:
    import fcntl

    def _lock(file: IO[bytes]) -> None:
        with suppress(OSError):  # of a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed


def append_lines(path: Path, lines: Sequence[str]) -> None:
    """Write whole lines to the end of a file, over a last one that was cut off; raises `D3EngineError`.

    Processes that add to one file at once wait for each other.
    """
    try:
        with open(path, "a+b") as file:
            _lock(file)
            whole = file.seek(0, os.SEEK_END)
            while whole:
                start = max(0, whole - _CHUNK)
                file.seek(start)
                end = file.read(whole - start).rfind(b"\n") + 1
                whole = start + end
                if end:
                    break
            file.truncate(whole)
            file.seek(whole)
            file.write("".join(f"{line}\n" for line in lines).encode())
    except OSError as error:
        raise D3EngineError(f"{path} cannot be written: {error.strerror or error}") from error


def _is_written_in_place(path: Path) -> bool:
    is_special = path.exists() and not path.is_file()
    # A shell goes on writing to the file that it opened, so /dev/stdout is that file, whatever it is.
    return is_special or str(path.parent) in _NOT_REPLACED
