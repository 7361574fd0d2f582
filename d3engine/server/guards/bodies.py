"""Bodies: no longer, no slower and no deeper than allowed, and JSON.

The one idea: a body is read here and nowhere else, whole, before a route sees its request, which finds it in
`scope["state"]["body"]`. What Content-Length says too much is refused unread; what comes in pieces is counted and
looked through as it comes, with turns for everybody else between.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Collection
from functools import partial

from starlette.types import ASGIApp, Receive, Scope, Send

from d3engine.errors import InvalidValueError
from d3engine.server.errors import RequestError, as_request_error, shown_message
from d3engine.server.guards.json_bounds import JsonBounds, is_within_bounds

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
    """Reads the bodies of all requests that may have one.

    `paths` are those that take one, None: all; of any other a body is not even looked at, since the router refuses it.
    """

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
        body = await (self._read(receive) if has_come else self._read_in_time(receive))
        if body is None:
            return  # the client has left, and there is nobody to answer
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

    async def _read_in_time(self, receive: Receive) -> bytes | None:
        """As `_read`, for a body that has yet to come."""
        try:
            async with asyncio.timeout(self._timeout):
                return await self._read(receive)
        except TimeoutError:
            late = f"The body did not come whole within {self._timeout:g} seconds."
            raise RequestError(408, late, code="body_timeout") from None

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
