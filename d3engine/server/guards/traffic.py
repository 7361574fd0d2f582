"""Traffic: how many requests are being answered, how many may be, and whether new ones are taken at all.

The one idea: one count for an app, which its guards keep and everything else reads: the queue's limit, the end of a
drain, /ready and the metrics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from d3engine.server.errors import RequestError
from d3engine.server.guards.bodies import WITH_BODY
from d3engine.server.guards.keys import METRICS_PATH, OPEN_PATHS

RETRY_AFTER = "1"
"""Seconds after which a refused request may be tried again."""


class AdmissionControl:
    """The requests of one app that have a place in its queue or its batch: `places` of them at most."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.taken = 0
        self.is_draining = False
        self.rejections: Counter[str] = Counter()
        """Reason -> requests refused for it; the reasons are the codes of `RequestError` that guards raise."""

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


class Place:
    """What one request takes of the room."""

    def __init__(self, traffic: AdmissionControl) -> None:
        self._traffic = traffic
        self._taken = 0

    def take(self, count: int) -> None:
        """Room for `count` more sequences; raises `RequestError` (429) where too little is left.

        A request that is larger than all of the room is refused before it comes here: it would be told to come back
        for ever.
        """
        traffic = self._traffic
        if traffic.taken + count > traffic.places:
            message = "The server has as many requests as it takes; try again later."
            raise RequestError(429, message, code="queue_full", headers={"Retry-After": RETRY_AFTER})
        traffic.taken += count
        self._taken += count

    def leave(self) -> None:
        """Give all of it back."""
        self._traffic.taken -= self._taken
        self._taken = 0


class TrafficGuard:
    """Gives each request that may have a body a place, and takes no new request while the server drains."""

    def __init__(self, app: ASGIApp, traffic: AdmissionControl) -> None:
        self.app = app
        self._traffic = traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if self._traffic.is_draining and scope["path"] not in OPEN_PATHS | {METRICS_PATH}:
            headers = {"Retry-After": RETRY_AFTER}
            raise RequestError(503, "The server is shutting down.", code="draining", headers=headers)
        if scope["method"] not in WITH_BODY:
            await self.app(scope, receive, send)
            return
        with self._traffic.place() as place:
            scope["state"]["place"] = place
            await self.app(scope, receive, send)
