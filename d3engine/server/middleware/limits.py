"""How many requests an app takes: places in its queue, the drain at its end, and deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from d3engine.server.errors import RequestError, failed_events
from d3engine.server.middleware.access import METRICS_PATH, OPEN_PATHS
from d3engine.server.middleware.bodies import WITH_BODY

RETRY_AFTER = "1"
"""Seconds after which a refused request may be tried again."""


class AdmissionControl:
    """The requests of one app that have a place in its queue or its batch: `places` of them at most."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.taken = 0
        self.is_draining = False
        self.is_cut = False
        """Whether the drain's time is over."""
        self.deadlines: set[asyncio.Timeout] = set()
        """Of the requests in progress."""

    @property
    def is_full(self) -> bool:
        """Whether the next request would be refused."""
        return self.taken >= self.places

    @contextmanager
    def place(self) -> Iterator[Place]:
        """A place for as long as the block lasts; raises `RequestError` (429) where none is free."""
        place = Place(self)
        place.take(1)
        try:
            yield place
        finally:
            place.leave()

    def cut(self) -> None:
        """End the requests in progress, each with an error that its client can read."""
        self.is_cut = True
        now = asyncio.get_running_loop().time()
        for deadline in self.deadlines:
            if not deadline.expired():
                deadline.reschedule(now)


def draining(message: str) -> RequestError:
    """What a client gets of a server that is shutting down."""
    return RequestError(503, message, code="draining", headers={"Retry-After": RETRY_AFTER})


class Place:
    """What one request takes of the room."""

    def __init__(self, traffic: AdmissionControl) -> None:
        self._traffic = traffic
        self._taken = 0

    def take(self, count: int) -> None:
        """Room for `count` more sequences; raises `RequestError` (429) where too little is left."""
        traffic = self._traffic
        if traffic.taken + count > traffic.places:
            message = "The server has as many requests as it takes; try again later."
            raise RequestError(429, message, code="queue_full", headers={"Retry-After": RETRY_AFTER})
        traffic.taken += count
        self._taken += count

    def leave(self) -> None:
        self._traffic.taken -= self._taken
        self._taken = 0


class TrafficGuard:
    """Gives each request that may have a body a place, and takes no new request while the server drains."""

    def __init__(self, app: ASGIApp, traffic: AdmissionControl) -> None:
        self.app = app
        self._traffic = traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_http = scope["type"] == "http"
        if is_http and self._traffic.is_draining and scope["path"] not in OPEN_PATHS | {METRICS_PATH}:
            raise draining("The server is shutting down.")
        if not is_http or scope["method"] not in WITH_BODY:
            await self.app(scope, receive, send)
            return
        with self._traffic.place() as place:
            scope["state"]["place"] = place
            await self.app(scope, receive, send)


class DeadlineGuard:
    """Ends requests that take longer than `request_timeout` or than a drain, or whose client stops reading for
    `write_timeout`."""

    def __init__(
        self, app: ASGIApp, traffic: AdmissionControl, request_timeout: float | None, write_timeout: float
    ) -> None:
        self.app = app
        self._traffic = traffic
        self._request_timeout = request_timeout
        self._write_timeout = write_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        writes = _WatchedWrites(send, self._write_timeout)
        limit = asyncio.timeout(self._request_timeout)
        try:
            async with limit:
                self._traffic.deadlines.add(limit)
                await self.app(scope, receive, writes)
        except TimeoutError:
            if not limit.expired():
                raise
            await self._say(scope, writes, send)
        except asyncio.CancelledError:
            if not writes.has_stalled:
                raise
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            abort = scope["state"].get("abort_connection")
            if abort is not None:
                abort()
        finally:
            self._traffic.deadlines.discard(limit)
            writes.end()

    async def _say(self, scope: Scope, writes: _WatchedWrites, send: Send) -> None:
        """The request took too long: as a status where nothing was sent, as the last event of a stream that began."""
        if self._traffic.is_cut:
            error = draining("The server has shut down before the answer was complete.")
        else:
            message = f"The answer was not complete within the {self._request_timeout:g} seconds that it may take."
            error = RequestError(504, message, code="request_timeout")
        if not writes.has_begun:
            raise error
        if writes.is_stream and not writes.is_complete:
            scope["state"]["stream_error"] = error
            failed = scope["state"].get("stream_failed", failed_events)  # a stream knows how such streams end
            await send({"type": "http.response.body", "body": failed(error), "more_body": False})


class _WatchedWrites:
    """`send`, watched: cancels the task that made it where one call takes longer than `timeout`."""

    def __init__(self, send: Send, timeout: float) -> None:
        self._send = send
        self._timeout = timeout
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        self._num_waiting = 0  # a stream and what keeps it alive may write at the same time
        self._timer = self._loop.call_later(timeout, self._look)
        self.has_stalled = False
        self.has_begun = False
        self.is_complete = False
        self.is_stream = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = True
            kind = dict(message["headers"]).get(b"content-type", b"")
            self.is_stream = kind.startswith((b"text/event-stream", b"application/x-ndjson"))
        elif not message.get("more_body", False):
            self.is_complete = True
        self._num_waiting += 1
        if self._num_waiting == 1:
            self._since = self._loop.time()
        await self._send(message)
        self._num_waiting -= 1
        if not self._num_waiting:
            self._since = None

    def _look(self) -> None:
        now = self._loop.time()
        waits = 0.0 if self._since is None else now - self._since
        if waits >= self._timeout and self._task is not None:
            self.has_stalled = True
            self._task.cancel()
        else:
            self._timer = self._loop.call_later(self._timeout - waits, self._look)

    def end(self) -> None:
        self._timer.cancel()
