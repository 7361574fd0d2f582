"""A door before several replicas: passes requests on, and knows what to say when one of them dies.

The one idea: what has not been said can be asked again. Until a replica's first word its request goes to another one if
it dies; after that the client is told that the stream is broken.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from d3engine.async_engine.async_engine import AsyncEngine
from d3engine.errors import EngineDeadError, FailedError
from d3engine.server.answering.broken_stream import end_of_broken_stream, num_events
from d3engine.server.app import create_app
from d3engine.server.errors import RequestError, as_request_error, error_response
from d3engine.server.guards.keys import METRICS_PATH, KeyGuard
from d3engine.server.guards.traffic import RETRY_AFTER
from d3engine.server.health import health
from d3engine.server.in_process import whole
from d3engine.server.metrics.merged import merged
from d3engine.server.routes.operation import METRICS_TYPE
from d3engine.server.settings import ServerSettings

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


PREFIX_BYTES = 256
"""Of a prompt, by which it is told whether others begin alike."""

_SEARCHED_BYTES = 65536
_PROMPTS = [re.compile(rb'"(?:%s)"\s*:\s*' % names) for names in (b"system|instructions", b"prompt|messages|input")]
"""The fields that a prompt begins with, where they stand in a body. No text in JSON can look like one of them."""

Busy = Mapping[str, int]
"""The name of each replica, of which there is one at least -> the requests that it has been given and not finished."""


class Routing(Protocol):
    """Chooses a replica for each request, in order of arrival."""

    def choose(self, now: float, prefix: bytes, busy: Busy) -> str:
        """The replica for a request that arrives at `now` (seconds) and begins with these bytes."""


@dataclass
class RoundRobin:
    """One after the other."""

    _next: int = 0

    def choose(self, now: float, prefix: bytes, busy: Busy) -> str:
        chosen = sorted(busy)[self._next % len(busy)]
        self._next += 1
        return chosen


class LeastLoaded:
    """The one with the fewest requests; of equal ones the first."""

    def choose(self, now: float, prefix: bytes, busy: Busy) -> str:
        return least_loaded(busy)


@dataclass
class ByPrefix:
    """Each prefix has a home, whose cache then holds it; a home with `bound` times the average sends others away.

    Where replicas come or go, only the prefixes of those that have gone, and a fair share for each that has come, move
    (highest random weight: Thaler and Ravishankar, "A Name-Based Mapping Scheme for Rendezvous", 1996).
    """

    bound: float = 1.25

    def choose(self, now: float, prefix: bytes, busy: Busy) -> str:
        home = max(busy, key=lambda name: blake2b(prefix, key=blake2b(name.encode()).digest(), digest_size=8).digest())
        return least_loaded(busy) if is_overloaded(busy, home, self.bound) else home


@dataclass
class ByCohort:
    """All that arrive within `window` seconds go to one replica, so that its answers are of one age and the other
    replicas, to which nobody young comes, stay shallow. The next window's is the least loaded one."""

    window: float
    bound: float = 1.25
    _current: str = ""
    _until: float = float("-inf")

    def choose(self, now: float, prefix: bytes, busy: Busy) -> str:
        is_over = now >= self._until or self._current not in busy
        if is_over or is_overloaded(busy, self._current, self.bound):
            self._current = least_loaded(busy)
            self._until = now + self.window
        return self._current


def least_loaded(busy: Busy) -> str:
    """The first of those with the fewest requests."""
    return min(busy, key=lambda name: busy[name])


def is_overloaded(busy: Busy, name: str, bound: float) -> bool:
    """Whether a replica would have more than `bound` times the average, the new request counted, and one to spare."""
    total = sum(busy.values()) + 1
    return (busy[name] + 1) * len(busy) > bound * total + len(busy)


def beginning(body: bytes) -> bytes:
    """How the prompt of a request begins, as it stands in its JSON; of one without a prompt, how its body begins.

    What is said to the model before all else counts, wherever it stands. The body is not read as JSON, so a prompt that
    is written in two ways has two beginnings.
    """
    for prompt in _PROMPTS:
        if found := prompt.search(body, 0, _SEARCHED_BYTES):
            return body[found.end() : found.end() + PREFIX_BYTES]
    return body[:PREFIX_BYTES]


ROUTINGS: dict[str, Callable[[float], Routing]] = {
    "round robin": lambda window: RoundRobin(),
    "least loaded": lambda window: LeastLoaded(),
    "by prefix": lambda window: ByPrefix(),
    "by depth cohort": lambda window: ByCohort(window),
}
"""Name -> a new routing, given the seconds of a cohort's window."""


class Replica:
    """One engine, which is loaded when this returns, and the server's app before it.

    Args:
        name: tells it from the others.
        model: as for `Engine`.
        settings: of the app.
        engine_arguments: as for `Engine`.
    """

    def __init__(self, name: str, model: str, settings: ServerSettings, engine_arguments: Mapping[str, Any]) -> None:
        self._name = name
        self._engine = AsyncEngine(model, **engine_arguments)
        self._app = create_app(self._engine, settings)
        self._stall_seconds = settings.guards.health_stall_seconds

    async def answer(self, scope: Scope, body: bytes) -> AsyncGenerator[list[Message], None]:
        """The messages by which the app answers a request, as ASGI has them; those that wait come together.

        Closing it, or cancelling who reads it, ends the request.
        """
        batcher = _Outbox()
        answering = asyncio.create_task(self._app(scope, whole(body), batcher.send))
        answering.add_done_callback(batcher.end)
        try:
            while messages := await batcher.take():
                yield messages
            await answering
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    async def whole_answer(self, scope: Scope, body: bytes) -> tuple[str, list[Message]]:
        """The name of the replica, and all messages of `answer`: for what every replica is asked."""
        async with aclosing(self.answer(scope, body)) as answer:
            return self._name, [message async for messages in answer for message in messages]

    async def check_health(self) -> None:
        """Raise `EngineDeadError` where the engine has ended or hangs, so that the replica is replaced."""
        found = health(self._engine.heartbeat(), self._app.state.traffic, self._stall_seconds)
        if not found.is_ok:
            raise EngineDeadError(found.reason)

    async def close(self) -> None:
        """End the engine. Idempotent."""
        await self._engine.close()


class _Outbox:
    """What an app has sent and nobody has taken yet."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._news = asyncio.Event()
        self._is_over = False

    async def send(self, message: Message) -> None:
        self._messages.append(message)
        self._news.set()

    def end(self, _: object) -> None:
        self._is_over = True
        self._news.set()

    async def take(self) -> list[Message]:
        """All that waits, as soon as something does; empty once nothing can come any more."""
        await self._news.wait()
        if not self._is_over:
            self._news.clear()
        taken, self._messages = self._messages, []
        return taken
