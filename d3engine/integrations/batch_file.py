"""The files of a batch: lines of requests, and results from which a batch resumes."""

from __future__ import annotations

import codecs
import hashlib
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec
import orjson

from d3engine.errors import InvalidValueError, must_be, require
from d3engine.utils.files import UnreadableFileError, naming, open_regular

if sys.platform == "win32":
    import msvcrt

    def _lock(file: IO[bytes]) -> None:
        file.seek(2**40)  # beyond the end, as locked bytes cannot be read
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        file.seek(0)

else:
    import fcntl

    def _lock(file: IO[bytes]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


BEGINS = b'{"id":"batch_req_'
"""The beginning of every line of a batch's results."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a line: `status` and `body` of the route's response; both are empty for a faulty line."""

    line: Line
    status: int = 0
    request_id: str = ""
    body: bytes = b""

    @property
    def is_answer(self) -> bool:
        return self.status == 200

    def written(self) -> bytes:
        """A line of OpenAI's output file, its line feed included."""
        line = self.line
        response: dict[str, Any] | None = None
        error: dict[str, str] | None = None
        if line.fault is None:
            body = orjson.Fragment(self.body)
            response = {"status_code": self.status, "request_id": self.request_id, "body": body}
        else:
            error = {"code": line.fault.code, "message": line.fault.message}
        content = {"id": line.id, "custom_id": line.custom_id, "response": response, "error": error}
        return orjson.dumps(content, option=orjson.OPT_APPEND_NEWLINE)


class _Written(msgspec.Struct):
    id: str
    custom_id: str | None


class Results:
    """An open file of results, locked against other batches.

    A line is written whole when its response is complete. Lines that are there when a batch begins are not requested
    again; an incomplete last line is.
    """

    def __init__(self, path: Path, file: Any) -> None:
        self._path = path
        self._file = file
        self._of_names: dict[str, str] = {}
        self._ids: set[str] = set()

    def has(self, line: Line) -> bool:
        """Whether the file has a result of this line.

        Raises `InvalidValueError` where it has one of another line with the same name: the file is another batch's.
        """
        if line.custom_id is None:
            return line.id in self._ids
        known = self._of_names.get(line.custom_id, line.id)
        if known != line.id:
            allowed = f"a new file, or the results of this very batch, but it answers another line {line.custom_id!r}"
            raise InvalidValueError("OUT", str(self._path), allowed)
        return line.custom_id in self._of_names

    def add(self, result: Result) -> None:
        """Write a result. Raises `OSError`."""
        with naming(self._path):
            self._file.write(result.written())
            self._file.flush()

    def read(self) -> None:
        """Read the results that are there; cut off an incomplete last line."""
        end = 0
        for content in self._file:
            if not content.endswith(b"\n"):
                if not (content.startswith(BEGINS) or BEGINS.startswith(content)):
                    raise self._other_file_error()
                break
            self._record(content)
            end += len(content)
        self._file.truncate(end)
        self._file.seek(end)

    def _record(self, content: bytes) -> None:
        try:
            found = msgspec.json.decode(content, type=_Written)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise self._other_file_error() from None
        if not content.startswith(BEGINS):
            raise self._other_file_error()
        if found.custom_id is None:
            self._ids.add(found.id)
        else:
            self._of_names[found.custom_id] = found.id

    def _other_file_error(self) -> InvalidValueError:
        allowed = "a new file, or the results of a batch that d3engine has begun; what is in it stays as it is"
        return InvalidValueError("OUT", str(self._path), allowed)


@contextmanager
def open_results(path: Path) -> Iterator[Results]:
    """The results at `path`; new ones are appended.

    Raises `InvalidValueError` for a file of another kind, for one that cannot be written, and while another batch
    writes to it.
    """
    try:
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        file = os.fdopen(os.open(path, flags, 0o666), "r+b")
    except OSError as error:
        raise InvalidValueError("OUT", str(path), f"a file that can be written ({error.strerror})") from None
    try:
        is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
        require(is_regular, "OUT", str(path), "a regular file, since it is read before it is written")
        try:
            _lock(file)
        except (BlockingIOError, PermissionError):
            raise InvalidValueError("OUT", str(path), "a file that no other batch is writing to") from None
        results = Results(path, file)
        with naming(path):
            results.read()
        yield results
    finally:
        with naming(path):  # flushes, which fails on a full disk
            file.close()


URLS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
"""The routes of a batch's bodies."""

LONGEST_LINE = 64 * 2**20
"""Limit of a line in bytes; a longer one is not read into memory."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a line cannot be run, as OpenAI's batches report errors."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a batch.

    Attributes:
        number: of the line in its file, from 1.
        id: "batch_req_" and a hash of the line.
        custom_id: its name in the file; None where it has none, or is no JSON.
        url: the route of its body.
        body: JSON, as in the file.
        fault: why it cannot be run, or None.
    """

    number: int
    id: str
    custom_id: str | None
    url: str = ""
    body: bytes = b""
    fault: Fault | None = None


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Named(msgspec.Struct):
    custom_id: str | None = None


class _Streamed(msgspec.Struct):
    stream: bool | None = None


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of a file that are not empty. Raises `InvalidValueError` for a file that cannot be read."""
    try:
        with open_regular(path) as file:
            number = 0
            while content := file.readline(LONGEST_LINE + 1):
                number += 1
                if number == 1:
                    content = content.removeprefix(codecs.BOM_UTF8)  # of an editor on Windows
                if len(content) > LONGEST_LINE and not content.endswith(b"\n"):
                    message = f"The line has more than {LONGEST_LINE:,} bytes."
                    yield _faulty(number, content, None, "line_too_long", message)
                    while content and not content.endswith(b"\n"):
                        content = file.readline(LONGEST_LINE)
                elif content.strip():
                    yield line_of(number, content.strip())
    except UnreadableFileError as error:
        raise InvalidValueError("IN", str(path), f"a file that can be read ({error})") from None


def line_of(number: int, content: bytes) -> Line:
    """The request of the `number`-th line of a file, or its fault."""
    try:
        request = msgspec.json.decode(content, type=_Request)
        streamed = msgspec.json.decode(request.body, type=_Streamed)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        return _faulty(number, content, _name_of(content), "invalid_line", f"The line is no request: {error}.")
    fault = _fault_of(request, streamed)
    if fault is not None:
        return _faulty(number, content, request.custom_id, *fault)
    return Line(number, _id(content), request.custom_id, request.url, bytes(request.body))


def _fault_of(request: _Request, streamed: _Streamed) -> tuple[str, str] | None:
    if not request.custom_id:
        return "invalid_custom_id", "custom_id must be a text of at least one character."
    if request.method != "POST":
        return "invalid_method", must_be("method", request.method, "POST") + "."
    if request.url not in URLS:
        return "invalid_url", must_be("url", request.url, f"one of {', '.join(URLS)}") + "."
    if streamed.stream:
        return "unsupported_parameter", must_be("stream", True, "absent or false in a batch") + "."
    return None


def _faulty(number: int, content: bytes, custom_id: str | None, code: str, message: str) -> Line:
    own = content if custom_id else b"%d %s" % (number, content)  # tells equal lines without a name apart
    return Line(number, _id(own), custom_id or None, fault=Fault(code, message))


def _name_of(content: bytes) -> str | None:
    """The custom_id of a line that is no request, if it has one."""
    try:
        return msgspec.json.decode(content, type=_Named).custom_id
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None


def _id(content: bytes) -> str:
    return f"batch_req_{hashlib.sha256(content).hexdigest()[:32]}"
