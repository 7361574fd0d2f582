"""A route of the server behind LitServe: each of its workers has an engine."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec

from d3engine.async_engine.async_engine import AsyncEngine
from d3engine.errors import MissingExtraError, require
from d3engine.integrations.asgi import embedded_settings
from d3engine.server.app import create_app
from d3engine.server.in_process import messages_of
from d3engine.server.settings import ServerSettings

try:
    from litserve import LitAPI
except ImportError as error:
    raise MissingExtraError("litserve", "litserve", "d3engine.integrations.litserve") from error

ROUTES = ("/v1/completions", "/v1/chat/completions")


class D3LitAPI(LitAPI):  # type: ignore[misc, unused-ignore]
    """Streams of OpenAI's completions or chats, with our server's events, by an engine in each of LitServe's workers.

    A refusal is the stream's only event: LitServe has already sent a 200. LitServe does not tell a worker that a client
    has left, so its request runs to the end.

    Args:
        model: as for `Engine`.
        api_path: the server's route.
        settings: limits of requests; None: those of `d3engine serve`.
        engine_arguments: as for `AsyncEngine`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        api_path: str = ROUTES[0],
        settings: ServerSettings | None = None,
        **engine_arguments: Any,
    ) -> None:
        require(api_path in ROUTES, "api_path", api_path, f"one of {', '.join(ROUTES)}")
        super().__init__(api_path=api_path, stream=True, enable_async=True)
        self._model = model
        self._settings = settings or embedded_settings(model)
        self._arguments = engine_arguments

    def setup(self, device: str) -> None:
        self.engine = AsyncEngine(self._model, **self._arguments)
        self._app = create_app(self.engine, self._settings)

    # LitServe reads the annotations of these two: without any it passes the body on unchanged.

    async def decode_request(self, request):  # type: ignore[no-untyped-def]
        """The body for our route, with `stream` set."""
        body = {**request, "stream": True} if isinstance(request, dict) else request
        return msgspec.json.encode(body)

    async def predict(self, body: bytes) -> AsyncIterator[str]:
        """The events of the response, or one event with the refusal."""
        is_stream = True
        async with aclosing(messages_of(self._app, self.api_path, body)) as messages:
            async for message in messages:
                if message["type"] == "http.response.start":
                    is_stream = message["status"] == 200
                elif text := message.get("body", b"").decode():
                    yield text if is_stream else f"data: {text}\n\ndata: [DONE]\n\n"

    async def encode_response(self, output):  # type: ignore[no-untyped-def]
        async for text in output:
            yield text
