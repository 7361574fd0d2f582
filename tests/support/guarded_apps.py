"""A small app behind all guards, called without a network: every message that goes in or comes out is at hand."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from d3engine.server.app import guards
from d3engine.server.in_process import scope_of
from d3engine.server.middleware.limits import AdmissionControl
from d3engine.server.middleware.request_log import RequestLog
from d3engine.server.middleware.settings import GuardSettings

JSON = {"content-type": "application/json"}
LOCAL = {"host": "127.0.0.1:8000"}
Endpoint = Callable[[Request], Awaitable[Response]]


async def hello(request: Request) -> Response:
    return PlainTextResponse("hello")


async def echo(request: Request) -> Response:
    return JSONResponse(json.loads(request.scope["state"]["body"]))


async def fail(request: Request) -> Response:
    raise RuntimeError("/a/secret/path")


@dataclass
class Answer:
    """What came back; `messages` are all of ASGI's."""

    messages: list[Any] = field(default_factory=list)

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.messages[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    @property
    def code(self) -> str | None:
        found: str | None = json.loads(self.body)["error"]["code"]
        return found


class GuardedApp:
    """An app behind guards: GET /hello and /health, POST /echo and /fail, and further routes as they are given."""

    def __init__(self, settings: GuardSettings | None = None, places: int = 8, **posted: Endpoint) -> None:
        self.traffic = AdmissionControl(places)
        self.exchanges: list[RequestLog] = []
        self.app = Starlette(
            routes=[
                *(Route(path, hello) for path in ("/hello", "/health", "/ready", "/metrics", "/v1/models")),
                *(
                    Route(f"/{name}", endpoint, methods=["POST"])
                    for name, endpoint in {"echo": echo, "fail": fail, **posted}.items()
                ),
            ],
            middleware=guards(settings or GuardSettings(), self.traffic, self.exchanges.append),
        )

    def call(self, *arguments: Any, **named: Any) -> Answer:
        """As `answer`, from outside of an event loop."""
        return asyncio.run(self.answer(*arguments, **named))

    async def answer(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str | None] = MappingProxyType({}),
        pieces: Iterable[bytes] | AsyncIterator[bytes] = (b"",),
        send: Callable[[Any], Awaitable[None]] | None = None,
    ) -> Answer:
        """One request with a body in pieces; the client leaves when they are used up and a message is asked for."""
        # A header of None is not sent.
        answer = Answer()
        source = _messages(pieces)

        async def receive() -> Any:
            return await anext(source)

        async def keep(message: Any) -> None:
            answer.messages.append(message)
            if send is not None:
                await send(message)

        given = LOCAL | {name.lower(): value for name, value in dict(headers).items()}
        encoded = [(name.encode(), value.encode()) for name, value in given.items() if value is not None]
        scope = scope_of(path, 0) | {"method": method, "headers": encoded}
        await self.app(scope, receive, keep)
        return answer


async def _messages(pieces: Iterable[bytes] | AsyncIterator[bytes]) -> AsyncIterator[Any]:
    if isinstance(pieces, AsyncIterator):
        async for piece in pieces:
            yield {"type": "http.request", "body": piece, "more_body": True}
    else:
        pieces = list(pieces)
        for number, piece in enumerate(pieces, start=1):
            yield {"type": "http.request", "body": piece, "more_body": number < len(pieces)}
        if not pieces or pieces[-1] == b"leaves":
            yield {"type": "http.disconnect"}
    await asyncio.Event().wait()  # a client that stays and says nothing more
