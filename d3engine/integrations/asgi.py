"""The server's routes as an ASGI app that brings its own engine: for servers that start their workers themselves.

The one idea: nothing is loaded when the app is made, so a program may make one in a process that forks others; the
engine comes with the app's lifespan, in the process that serves.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp, Receive, Scope, Send

from d3engine.async_engine.async_engine import AsyncEngine
from d3engine.server.app import create_app
from d3engine.server.middleware.settings import GuardSettings
from d3engine.server.settings import ServerSettings


def asgi_app(
    model: str | os.PathLike[str], *, settings: ServerSettings | None = None, **engine_arguments: Any
) -> Starlette:
    """All routes of `d3engine serve`, over an engine that starts and ends with the app.

    Args:
        model: as for `Engine`.
        settings: as for the server; None: `embedded_settings(model)`.
        engine_arguments: as for `AsyncEngine`.
    """
    return _WithEngine(model, settings or embedded_settings(model), engine_arguments).app


def embedded_settings(model: str | os.PathLike[str], **changes: Any) -> ServerSettings:
    """Settings of an app behind somebody else's server, which says who may call and by what name.

    The model is called what it was named by, a directory by its last name; `changes` are arguments of `ServerSettings`.
    """
    path = Path(model)
    name = path.resolve().name if path.exists() else os.fspath(model)
    guards = GuardSettings(allowed_hosts=("*",))
    return ServerSettings(**{"model_names": (name,), "guards": guards, **changes})


class AtRoot:
    """An app wherever it is mounted: it sees paths as if nothing stood before them, by which its guards know routes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
            scope = {**scope, "path": path, "raw_path": path.encode(), "root_path": ""}
        await self._app(scope, receive, send)


class _WithEngine:
    def __init__(self, model: str | os.PathLike[str], settings: ServerSettings, arguments: dict[str, Any]) -> None:
        self._model = model
        self._settings = settings
        self._arguments = arguments
        self._inner: ASGIApp | None = None
        self.app = Starlette(routes=[Mount("/", app=self._pass_on)], lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        engine = await asyncio.to_thread(AsyncEngine, self._model, **self._arguments)
        try:
            self._inner = AtRoot(create_app(engine, self._settings))
            yield
        finally:
            self._inner = None
            await engine.close()

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._inner is None:
            raise RuntimeError("the app's lifespan has not begun: its server must run it")
        await self._inner(scope, receive, send)
