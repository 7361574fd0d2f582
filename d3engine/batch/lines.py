"""The lines of a batch file: what each asks for, or why it asks for nothing that can be run.

The one idea: a line is known by its `custom_id` and by a hash of what stands in it, so a batch that was ended can go on
where it stopped, and an answer is never taken for that of another question.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from d3engine.errors import InvalidValueError, must_be
from d3engine.files import UnreadableFileError, open_regular

URLS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
"""Where the bodies of a batch may go."""

LONGEST_LINE = 64 * 2**20
"""Bytes; nothing longer is read into memory."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a line cannot be run, in OpenAI's words for errors of a batch."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a batch.

    Attributes:
        number: of the line in its file, from 1.
        id: "batch_req_" and a hash of the line.
        custom_id: its name in the file; None where it has none, or is no JSON.
        url: the route that its body is for.
        body: JSON, as it stands in the file.
        fault: why it cannot be run; None where it can.
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
                if len(content) > LONGEST_LINE and not content.endswith(b"\n"):
                    yield _too_long(number, content)
                    while content and not content.endswith(b"\n"):
                        content = file.readline(LONGEST_LINE)
                elif content.strip():
                    yield line_of(number, content.strip())
    except UnreadableFileError as error:
        raise InvalidValueError("IN", str(path), f"a file that can be read ({error})") from None


def line_of(number: int, content: bytes) -> Line:
    """What the `number`-th line of a file asks for."""
    try:
        asked = msgspec.json.decode(content, type=_Request)
        streamed = msgspec.json.decode(asked.body, type=_Streamed)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        return _faulty(number, content, _name_of(content), "invalid_line", f"The line is no request: {error}.")
    fault = _fault_of(asked, streamed)
    if fault is not None:
        return _faulty(number, content, asked.custom_id, *fault)
    return Line(number, _id(content), asked.custom_id, asked.url, bytes(asked.body))


def _fault_of(asked: _Request, streamed: _Streamed) -> tuple[str, str] | None:
    if not asked.custom_id:
        return "invalid_custom_id", "custom_id must be a text of at least one character."
    if asked.method != "POST":
        return "invalid_method", must_be("method", asked.method, "POST") + "."
    if asked.url not in URLS:
        return "invalid_url", must_be("url", asked.url, f"one of {', '.join(URLS)}") + "."
    if streamed.stream:
        return "unsupported_parameter", must_be("stream", True, "absent or false in a batch") + "."
    return None


def _faulty(number: int, content: bytes, custom_id: str | None, code: str, message: str) -> Line:
    own = content if custom_id else b"%d %s" % (number, content)  # or equal lines without a name would be one
    return Line(number, _id(own), custom_id or None, fault=Fault(code, message))


def _too_long(number: int, beginning: bytes) -> Line:
    return _faulty(number, beginning, None, "line_too_long", f"The line has more than {LONGEST_LINE:,} bytes.")


def _name_of(content: bytes) -> str | None:
    """Of a line that is no request."""
    try:
        return msgspec.json.decode(content, type=_Named).custom_id
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None


def _id(content: bytes) -> str:
    return f"batch_req_{hashlib.sha256(content).hexdigest()[:32]}"
