"""Bodies as they come: their framing, their length, and how deep their JSON nests, counted before any parser, which
would recurse into it or grow over it, sees it. The passes take time in proportion to the text and nothing else."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from starlette.types import ASGIApp, Receive, Scope, Send

from d3engine.errors import InvalidValueError
from d3engine.server.errors import RequestError, as_request_error, invalid, shown_message

Bytes: TypeAlias = npt.NDArray[np.uint8]

MAX_DEPTH = 64
MAX_DIGITS = 64
MAX_VALUES = 2**19
MAX_CONTAINERS = 2**16
MAX_MEMBERS = 2**16
"""A parser holds the interpreter while it works: so much of the dearest kind takes it a twentieth of a second."""

SHORT = 2**13
"""Bytes of a text of which it is worth while to count first what it could hold at most."""
SLICE_BYTES = 2**16
"""Looked at in one go, which takes one or two thousandths of a second."""

LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (MAX_DIGITS + 1))
LAST_DIGITS = re.compile(rb"[0-9]{0,%d}\Z" % MAX_DIGITS)
QUOTE = ord('"')
STEP_OF = np.zeros(256, np.int8)
STEP_OF[list(b"[{")] = 1
STEP_OF[list(b"]}")] = -1


class JsonBounds:
    """Goes through one text, in whatever pieces it comes."""

    def __init__(self) -> None:
        self._is_in_string = False
        self._backslash = b""
        self._digits = b""
        self._depth = 0
        self._values = self._containers = self._members = 0

    def read(self, piece: bytes) -> Iterator[None]:
        """Look at the next piece, and stop after each slice of it, where others may have their turn.

        Raises `RequestError` for a text that nests deeper than 64, has a number of more than 64 digits in a row, or
        holds more values, objects and lists, or members of objects than are allowed.
        """
        for start in range(0, len(piece), SLICE_BYTES):
            self._look_at(piece[start : start + SLICE_BYTES])
            yield

    def _look_at(self, text: bytes) -> None:
        steps_and_marks = self._outside_of_strings(text)
        bare = self._digits + steps_and_marks.tobytes()
        if LONG_NUMBER.search(bare):
            raise _unfit(f"a number has more than {MAX_DIGITS} digits")
        found = LAST_DIGITS.search(bare)
        bare, self._digits = bare[len(self._digits) :], found[0] if found else b""
        steps = STEP_OF[steps_and_marks]
        depths = self._depth + np.cumsum(steps[steps != 0], dtype=np.int32)
        if len(depths):
            if depths.max() > MAX_DEPTH:
                raise _unfit(f"it nests deeper than {MAX_DEPTH} objects and lists")
            self._depth = int(depths[-1])
        opened = bare.count(b"[") + bare.count(b"{")
        self._values += bare.count(b",") + opened
        self._containers += opened
        self._members += bare.count(b":")
        for number, most, kind in (
            (self._values, MAX_VALUES, "values"),
            (self._containers, MAX_CONTAINERS, "objects and lists"),
            (self._members, MAX_MEMBERS, "members of objects"),
        ):
            if number > most:
                raise _unfit(f"it holds more than {most} {kind}")

    def _outside_of_strings(self, text: bytes) -> Bytes:
        """What stands outside of strings, and the quotation marks that end them."""
        text = self._backslash + text
        self._backslash = b"\\" if (len(text) - len(text.rstrip(b"\\"))) % 2 else b""  # it escapes what is to come
        marks = text.removesuffix(self._backslash)
        if b"\\" in marks:
            marks = marks.replace(b"\\\\", b"").replace(b'\\"', b"")
        characters = np.frombuffer(marks, np.uint8)
        # Of a count of quotation marks only the last bit is looked at.
        is_inside = (np.cumsum(characters == QUOTE, dtype=np.uint8) + np.uint8(self._is_in_string)) & 1
        if len(is_inside):
            self._is_in_string = bool(is_inside[-1])
        bare: Bytes = characters[is_inside == 0]
        return bare


def is_within_bounds(text: bytes) -> bool:
    """Whether a whole text is so short and plain that it keeps all bounds even if none of it stands in strings."""
    is_flat = len(text) <= SHORT and text.count(b"[") + text.count(b"{") <= MAX_DEPTH
    return is_flat and LONG_NUMBER.search(text) is None


def _unfit(why: str) -> RequestError:
    return invalid(None, f"The body is JSON that this server does not read: {why}.", "json_out_of_bounds")


WITH_BODY = frozenset({"POST"})
"""Methods of requests whose body is read; no route takes a body by another, and the router refuses those unread."""

LONG_BODY = 2**16
"""Bytes from which on it is remembered that a body was refused: to find out may have taken long."""
MOST_REFUSED = 256


def check_framing(headers: Collection[tuple[bytes, bytes]]) -> None:
    """Raise `RequestError` where servers may differ on where the body ends, or it has a coding that none here reads."""
    codings = [
        coding.strip().lower()
        for name, value in headers
        if name == b"transfer-encoding"
        for coding in value.split(b",")
    ]
    if not codings:
        return
    if any(name == b"content-length" for name, _ in headers):
        raise RequestError(400, "Send Content-Length or Transfer-Encoding, not both.", code="invalid_framing")
    if codings != [b"chunked"]:
        status = 501 if codings.count(b"chunked") == 1 and codings[-1] == b"chunked" else 400
        given = b", ".join(codings).decode("latin-1")
        raise RequestError(status, f"Transfer-Encoding must be chunked; got {given!r}.", code="invalid_framing")


class BodyGuard:
    """Reads the bodies of requests to `paths`, None: to all; of others the router refuses a body unread."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout: float, paths: frozenset[str] | None = None) -> None:
        self.app = app
        self._paths = paths
        self._max_bytes = max_bytes
        self._timeout = timeout
        self._refused: dict[bytes, Callable[[], RequestError]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        takes_one = self._paths is None or scope.get("path") in self._paths
        if scope["type"] != "http" or scope["method"] not in WITH_BODY or not takes_one:
            await self.app(scope, receive, send)
            return
        self._check_head(scope)
        has_come = scope["state"].get("has_come_whole")  # as most have, which then need no timer
        try:
            async with asyncio.timeout(None if has_come else self._timeout):
                body = await self._read(receive)
        except TimeoutError:
            late = f"The body did not come whole within {self._timeout:g} seconds."
            raise RequestError(408, late, code="body_timeout") from None
        if body is None:
            return  # the client has left
        scope["state"]["body"] = body
        if len(body) < LONG_BODY:
            await self.app(scope, receive, send)
        else:
            await self._answer_long(body, scope, receive, send)

    async def _answer_long(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request with a long body, unless it was refused before: what is wrong with it is remembered."""
        name = await asyncio.to_thread(_digest, scope, body)
        if name in self._refused:
            raise self._refused[name]()
        try:
            await self.app(scope, receive, send)
        except (RequestError, InvalidValueError) as error:
            if (refused := as_request_error(error)).status == 400:
                code, param = refused.code, refused.param
                self._refused[name] = partial(RequestError, 400, shown_message(refused), param=param, code=code)
                if len(self._refused) > MOST_REFUSED:
                    del self._refused[next(iter(self._refused))]
            raise

    def _check_head(self, scope: Scope) -> None:
        check_framing(scope["headers"])
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        if not length.isdigit():
            raise RequestError(400, "Content-Length must be a number of bytes.", code="invalid_content_length")
        if len(length) > 18 or int(length) > self._max_bytes:
            raise self._too_long()
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        encoding = headers.get(b"content-encoding", b"identity").strip().lower()
        if kind != b"application/json" or encoding != b"identity":
            message = "Send JSON as `Content-Type: application/json`, without a Content-Encoding."
            raise RequestError(415, message, code="unsupported_media_type")

    async def _read(self, receive: Receive) -> bytes | None:
        """The whole body; None where the client left before its end."""
        pieces: list[bytes] = []
        length, bounds = 0, JsonBounds()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            piece: bytes = message.get("body", b"")
            length += len(piece)
            if length > self._max_bytes:
                raise self._too_long()
            is_last = not message.get("more_body", False)
            if is_last and not pieces and is_within_bounds(piece):
                return piece
            pieces.append(piece)
            for _ in bounds.read(piece):
                await asyncio.sleep(0)
            if is_last:
                return b"".join(pieces)

    def _too_long(self) -> RequestError:
        message = f"The body is longer than the {self._max_bytes} bytes that this server reads."
        return RequestError(413, message, code="body_too_long")


def _digest(scope: Scope, body: bytes) -> bytes:
    """A name for a request, by all that its answer depends on."""
    depth = [value for name, value in scope["headers"] if name == b"x-d3-depth"]
    return hashlib.sha256(repr((scope["path"], depth)).encode() + body).digest()
