"""An engine behind the server's app, for a door in another process: a request comes whole, its answer goes in messages.

Nothing here knows what carries them; `ray_serve` lets Ray do it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.types import Message, Scope

from d3engine.async_engine.async_engine import AsyncEngine
from d3engine.errors import EngineDeadError
from d3engine.server.app import create_app
from d3engine.server.in_process import whole
from d3engine.server.settings import ServerSettings
from d3engine.server.state import health


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
