"""A door before several replicas: passes requests on, and knows what to say when one of them dies.

The one idea: what has not been said can be asked again. Until a replica's first word its request goes to another one if
it dies; after that the client is told that the stream is broken.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from d3engine.errors import FailedError
from d3engine.server.errors import RequestError, as_request_error, error_response
from d3engine.server.metrics import merged
from d3engine.server.middleware.access import METRICS_PATH, KeyGuard
from d3engine.server.middleware.limits import RETRY_AFTER
from d3engine.server.responses.broken_stream import end_of_broken_stream, num_events
from d3engine.server.routes.openapi import METRICS_TYPE

_log = logging.getLogger(__name__)

ATTEMPTS = 3
"""Replicas that may die over one request before it is refused."""

PASSED_ON = ("type", "asgi", "http_version", "method", "scheme", "query_string", "headers", "client", "server")
"""Of a request's scope, beside its path."""


class ReplicaDiedError(FailedError):
    """A replica has ended while it answered."""


Ask = Callable[[Scope, bytes], AsyncGenerator[list[Message], None]]
"""`Replica.answer` of one of the replicas. Raises `ReplicaDiedError`, or `RequestError` where none takes requests."""

AskAll = Callable[[Scope, bytes], Awaitable[Sequence[tuple[str, list[Message]]]]]
"""`Replica.whole_answer` of all that answer. Raises `RequestError` where none does."""


class Proxy:
    """An app that lets replicas answer; /metrics are those of all of them.

    Args:
        ask: one of them.
        ask_all: all of them.
        max_body_bytes: of a body so much is read, and one byte more, by which a replica sees that it is too long.
        api_keys, metrics_keys: those of the replicas, without which nothing of a body is read.
    """

    def __init__(
        self,
        ask: Ask,
        ask_all: AskAll,
        max_body_bytes: int,
        api_keys: Iterable[str] = (),
        metrics_keys: Iterable[str] = (),
    ) -> None:
        self._keys = KeyGuard(self, api_keys, metrics_keys)
        self._ask = ask
        self._ask_all = ask_all
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = _plain(scope)
        written = _Written(send, asked["path"])
        try:
            self._keys.check(asked)
            body = await _read(receive, self._max_body_bytes + 1)
            if asked["path"] == METRICS_PATH:
                await written.write(_of_all(await self._ask_all(asked, body)))
            else:
                await self._pass_on(asked, body, written)
        except Exception as error:
            await written.fail(as_request_error(error))

    async def _pass_on(self, asked: Scope, body: bytes, written: _Written) -> None:
        for _ in range(ATTEMPTS):
            try:
                async with aclosing(self._ask(asked, body)) as answer:
                    async for messages in answer:
                        await written.write(messages)
                return
            except ReplicaDiedError as error:
                _log.warning("a replica has died over %s: %s", asked["path"], error)
                if written.has_begun:
                    break
        message = "The replica that wrote this answer has died; ask again."
        raise RequestError(503, message, code="replica_died", headers={"Retry-After": RETRY_AFTER})


class _Written:
    """What a client has been sent so far. The head of an answer waits for the first piece of its body."""

    def __init__(self, send: Send, path: str) -> None:
        self._send = send
        self._path = path
        self._head: Message | None = None
        self._num_events = 0
        self.has_begun = False

    async def write(self, messages: Iterable[Message]) -> None:
        for message in messages:
            if message["type"] == "http.response.start":
                self._head = message
                continue
            if not self.has_begun:
                assert self._head is not None
                self.has_begun = True
                await self._send(self._head)
            self._num_events += num_events(message.get("body", b""))
            await self._send(message)

    @property
    def _is_stream(self) -> bool:
        assert self._head is not None
        kind: bytes = dict(self._head["headers"]).get(b"content-type", b"")
        return kind.startswith(b"text/event-stream")

    async def fail(self, error: RequestError) -> None:
        """Say it by a status, or by the last event of a stream that has begun; any other answer can only be cut off."""
        if self.has_begun:
            if not self._is_stream:
                raise error
            last = end_of_broken_stream(error, self._path, self._num_events)
            await self._send({"type": "http.response.body", "body": last, "more_body": False})
            return
        await self.write(_messages(error_response(error, self._path)))


def _of_all(answers: Sequence[tuple[str, list[Message]]]) -> list[Message]:
    """Their metrics as one answer; the first refusal where there is one."""
    for _, (start, *rest) in answers:
        if start["status"] != 200:
            return [start, *rest]
    texts = {name: b"".join(part.get("body", b"") for part in rest).decode() for name, (_, *rest) in answers}
    return _messages(Response(merged(texts), media_type=METRICS_TYPE))


def _messages(response: Response) -> list[Message]:
    return [
        {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers},
        {"type": "http.response.body", "body": response.body, "more_body": False},
    ]


async def _read(receive: Receive, most: int) -> bytes:
    """The body, or its first `most` bytes."""
    pieces: list[bytes] = []
    length, more = 0, True
    while more and length < most:
        message = await receive()
        pieces.append(message.get("body", b""))
        length += len(pieces[-1])
        more = message.get("more_body", False)
    return b"".join(pieces)[:most]


def _plain(scope: Scope) -> Scope:
    """What a replica must know of a request; the path as if nothing stood before it."""
    path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
    return {name: scope[name] for name in PASSED_ON if name in scope} | {"path": path, "root_path": ""}
