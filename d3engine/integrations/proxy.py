"""A reverse proxy with retry before several replicas, their routing, and a replica."""

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
from d3engine.server.app import create_app
from d3engine.server.errors import ANTHROPICS_ROOT, RequestError, as_request_error, error_response, shown_message
from d3engine.server.in_process import whole
from d3engine.server.metrics import merged
from d3engine.server.middleware.access import METRICS_PATH, AccessGuard
from d3engine.server.middleware.limits import RETRY_AFTER
from d3engine.server.responses.streams import OPENAI_FORM, named_event
from d3engine.server.routes.messages import MESSAGE_FORM
from d3engine.server.routes.openapi import METRICS_TYPE
from d3engine.server.settings import ServerSettings
from d3engine.server.state import health

_log = logging.getLogger(__name__)

ATTEMPTS = 3
"""Replicas that may die during one request before it is refused."""

FORWARDED = ("type", "asgi", "http_version", "method", "scheme", "query_string", "headers", "client", "server")
"""Fields of a request's scope that a replica gets, besides its path."""


class ReplicaDiedError(FailedError):
    """A replica has ended during a request."""


Ask = Callable[[Scope, bytes], AsyncGenerator[list[Message], None]]
"""`Replica.answer` of one of the replicas. Raises `ReplicaDiedError`, or `RequestError` where none is available."""

AskAll = Callable[[Scope, bytes], Awaitable[Sequence[tuple[str, list[Message]]]]]
"""`Replica.whole_answer` of all reachable replicas. Raises `RequestError` where none is."""


class Proxy:
    """An app that forwards requests to replicas; /metrics merges those of all replicas.

    If a replica dies before its first byte of a response, another one gets the request; after that the client gets an
    error event.

    Args:
        ask: sends a request to one replica.
        ask_all: sends a request to all replicas.
        max_body_bytes: limit of a body; one more byte is read, so that a replica refuses a longer one.
        api_keys, metrics_keys: those of the replicas; without a valid one no body is read.
    """

    def __init__(
        self,
        ask: Ask,
        ask_all: AskAll,
        max_body_bytes: int,
        api_keys: Iterable[str] = (),
        metrics_keys: Iterable[str] = (),
    ) -> None:
        self._guard = AccessGuard(self, api_keys, metrics_keys)
        self._ask = ask
        self._ask_all = ask_all
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = _forwarded(scope)
        response = _ClientResponse(send, request["path"])
        try:
            self._guard.check(request)
            body = await _read(receive, self._max_body_bytes + 1)
            if request["path"] == METRICS_PATH:
                await response.write(_merged_metrics(await self._ask_all(request, body)))
            else:
                await self._forward(request, body, response)
        except Exception as error:
            await response.fail(as_request_error(error))

    async def _forward(self, request: Scope, body: bytes, response: _ClientResponse) -> None:
        for _ in range(ATTEMPTS):
            try:
                async with aclosing(self._ask(request, body)) as answer:
                    async for messages in answer:
                        await response.write(messages)
                return
            except ReplicaDiedError as error:
                _log.warning("a replica has died over %s: %s", request["path"], error)
                if response.has_begun:
                    break
        message = "The replica that wrote this answer has died; ask again."
        raise RequestError(503, message, code="replica_died", headers={"Retry-After": RETRY_AFTER})


class _ClientResponse:
    """The response to a client so far. Its head waits for the first part of the body."""

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
            self._num_events += _num_events(message.get("body", b""))
            await self._send(message)

    @property
    def _is_stream(self) -> bool:
        assert self._head is not None
        kind: bytes = dict(self._head["headers"]).get(b"content-type", b"")
        return kind.startswith(b"text/event-stream")

    async def fail(self, error: RequestError) -> None:
        """Send an error response, or the last event of a begun stream; raise `error` in any other begun response."""
        if self.has_begun:
            if not self._is_stream:
                raise error
            last = _end_of_broken_stream(error, self._path, self._num_events)
            await self._send({"type": "http.response.body", "body": last, "more_body": False})
            return
        await self.write(_messages(error_response(error, self._path)))


def _merged_metrics(answers: Sequence[tuple[str, list[Message]]]) -> list[Message]:
    """The metrics of all replicas as one response, or the first refusal."""
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
    chunks: list[bytes] = []
    length, more = 0, True
    while more and length < most:
        message = await receive()
        chunks.append(message.get("body", b""))
        length += len(chunks[-1])
        more = message.get("more_body", False)
    return b"".join(chunks)[:most]


def _forwarded(scope: Scope) -> Scope:
    """The part of a request's scope that a replica needs; the path without the mount prefix."""
    path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
    return {name: scope[name] for name in FORWARDED if name in scope} | {"path": path, "root_path": ""}


PREFIX_BYTES = 256
"""Bytes of a prompt's beginning that identify a shared prefix."""

_SEARCHED_BYTES = 65536
_PROMPTS = [re.compile(rb'"(?:%s)"\s*:\s*' % names) for names in (b"system|instructions", b"prompt|messages|input")]
"""Fields that a prompt begins with; no text inside JSON can look like one of them."""

Busy = Mapping[str, int]
"""Replica, at least one -> its unfinished requests."""


class Routing(Protocol):
    """Chooses a replica for each request, in order of arrival."""

    def choose(self, now: float, prefix: bytes, busy: Busy) -> str:
        """The replica for a request that arrives at `now` (seconds) and begins with these bytes."""


@dataclass
class RoundRobin:
    """Each replica in turn."""

    _next: int = 0

    def choose(self, now: float, prefix: bytes, busy: Busy) -> str:
        chosen = sorted(busy)[self._next % len(busy)]
        self._next += 1
        return chosen


class LeastLoaded:
    """The replica with the fewest requests; of equal ones the first."""

    def choose(self, now: float, prefix: bytes, busy: Busy) -> str:
        return least_loaded(busy)


@dataclass
class ByPrefix:
    """Each prefix has a home replica, whose cache holds it; above `bound` times the average load another one is used.

    When replicas come or go, only the prefixes of those that left, and a fair share for each new one, move (highest
    random weight: Thaler and Ravishankar, "A Name-Based Mapping Scheme for Rendezvous", 1996).
    """

    bound: float = 1.25

    def choose(self, now: float, prefix: bytes, busy: Busy) -> str:
        home = max(busy, key=lambda name: blake2b(prefix, key=blake2b(name.encode()).digest(), digest_size=8).digest())
        return least_loaded(busy) if is_overloaded(busy, home, self.bound) else home


@dataclass
class ByCohort:
    """Requests that arrive within `window` seconds go to one replica; the next window takes the least loaded one.

    So the sequences of a replica are of one age, and replicas without new ones stay shallow.
    """

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
    """Whether a replica would have, with the new request, more than `bound` times the average and one."""
    total = sum(busy.values()) + 1
    return (busy[name] + 1) * len(busy) > bound * total + len(busy)


def beginning(body: bytes) -> bytes:
    """The beginning of a request's prompt, as in its JSON; without a prompt that of the body.

    A system prompt counts first, wherever it is in the body. The body is not parsed, so a prompt in two JSON spellings
    has two beginnings.
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
"""Name -> factory of a routing, given the window of a cohort in seconds. `benchmarks.cluster` simulates the same."""


class Replica:
    """One engine behind the server's app, for a proxy in another process; loaded when the constructor returns.

    Args:
        name: unique among the replicas.
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
        """The app's ASGI messages in response to a request; messages that wait come together.

        Closing the generator, or cancelling its reader, ends the request.
        """
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        answering = asyncio.create_task(self._app(scope, whole(body), sent.put))
        answering.add_done_callback(lambda _: sent.put_nowait(None))
        messages: list[Message] = []
        try:
            while (message := await sent.get()) is not None:
                messages.append(message)
                if sent.empty():
                    yield messages
                    messages = []
            if messages:
                yield messages
            await answering
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    async def whole_answer(self, scope: Scope, body: bytes) -> tuple[str, list[Message]]:
        """The name of the replica and all messages of `answer`, for requests to every replica."""
        async with aclosing(self.answer(scope, body)) as answer:
            return self._name, [message async for messages in answer for message in messages]

    async def check_health(self) -> None:
        """Raise `EngineDeadError` where the engine has ended or hangs; Ray then replaces the replica."""
        found = health(self._engine.heartbeat(), self._app.state.traffic, self._stall_seconds)
        if not found.is_ok:
            raise EngineDeadError(found.reason)

    async def close(self) -> None:
        await self._engine.close()


RESPONSES = "/v1/responses"


def _num_events(content: bytes) -> int:
    """How many named events it holds; JSON has no line breaks, so none is mistaken for one."""
    return (b"\n" + content).count(b"\nevent: ")


def _end_of_broken_stream(error: RequestError, path: str, seen: int) -> bytes:
    """The last event, after `seen` named ones."""
    if path == ANTHROPICS_ROOT:
        return MESSAGE_FORM.failed(error)
    if path == RESPONSES:
        said = {"code": error.code, "message": shown_message(error), "param": None}
        return named_event({"type": "error", **said, "sequence_number": seen})
    return OPENAI_FORM.failed(error)
