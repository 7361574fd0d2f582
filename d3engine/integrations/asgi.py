"""The adapters' core: an engine behind the server's app, and parameters out of JSON."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp, Receive, Scope, Send

from d3engine.async_engine.async_engine import AsyncEngine
from d3engine.errors import InvalidValueError, require
from d3engine.request.params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from d3engine.server.app import create_app
from d3engine.server.errors import RequestError
from d3engine.server.middleware.settings import GuardSettings
from d3engine.server.requests.sampling import DepthPolicies
from d3engine.server.settings import ServerSettings


def asgi_app(
    model: str | os.PathLike[str], *, settings: ServerSettings | None = None, **engine_arguments: Any
) -> Starlette:
    """All routes of `d3engine serve`, over an engine that starts and ends with the app's lifespan.

    The call itself loads nothing, so a process may make the app before it forks workers.

    Args:
        model: as for `Engine`.
        settings: as for the server; None: `embedded_settings(model)`.
        engine_arguments: as for `AsyncEngine`.
    """
    server_settings = settings or embedded_settings(model)
    running: list[ASGIApp] = []

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        engine = await asyncio.to_thread(AsyncEngine, model, **engine_arguments)
        try:
            running.append(AtRoot(create_app(engine, server_settings)))
            yield
        finally:
            running.clear()
            await engine.close()

    async def forward(scope: Scope, receive: Receive, send: Send) -> None:
        if not running:
            raise RuntimeError("the app's lifespan has not begun: its server must run it")
        await running[0](scope, receive, send)

    return Starlette(routes=[Mount("/", app=forward)], lifespan=lifespan)


def embedded_settings(model: str | os.PathLike[str], **changes: Any) -> ServerSettings:
    """Settings of an app behind another server, which controls access and host names.

    The model's name is `model`, of a directory its last component; `changes` are arguments of `ServerSettings`.
    """
    path = Path(model)
    name = path.resolve().name if path.exists() else os.fspath(model)
    guards = GuardSettings(allowed_hosts=("*",))
    return ServerSettings(**{"model_names": (name,), "guards": guards, **changes})


class AtRoot:
    """An app that is mounted under a prefix and sees paths without it, as its guards know routes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
            scope = {**scope, "path": path, "raw_path": path.encode(), "root_path": ""}
        await self._app(scope, receive, send)


DECIDED = ("output_kind", "detokenize")
"""Fields that the stack sets, and no request."""

FIELDS = tuple(field.name for field in fields(SamplingParams) if field.name not in DECIDED)


class FieldReader:
    """Reads the sampling parameters of requests to one engine; refuses unknown fields by name.

    A depth is read as by our server, so that no request names code or files.

    Args:
        client: the engine, with the defaults of absent fields.
        settings: the depths that requests may name; None: those of our server.
    """

    def __init__(self, client: AsyncEngine, settings: ServerSettings | None = None) -> None:
        self._defaults = client.default_sampling_params
        self._depths = DepthPolicies(settings or ServerSettings(model_names=("model",)), client.depth)

    def params(self, given: Mapping[str, Any], kind: RequestOutputKind, *, detokenize: bool = True) -> SamplingParams:
        """The parameters of one request; null counts as absent. Raises `InvalidValueError`."""
        require(isinstance(given, Mapping), "sampling parameters", given, "an object")
        for name, value in given.items():
            require(name in FIELDS, name, value, f"absent, since the sampling parameters are {', '.join(FIELDS)}")
        wanted = {name: value for name, value in given.items() if value is not None}
        if "depth" in wanted:
            wanted["depth"] = self._depth(wanted["depth"])
        if "structured_outputs" in wanted:
            wanted["structured_outputs"] = _structured_outputs(wanted["structured_outputs"])
        return replace(self._defaults, **wanted, output_kind=kind, detokenize=detokenize)

    def _depth(self, given: object) -> Any:
        require(isinstance(given, str | Mapping), "depth", given, 'a name, or an object with "policy"')
        try:
            return self._depths.read("", given, None)  # type: ignore[arg-type]  # it is one of the two
        except RequestError as error:
            raise InvalidValueError("depth", given, f"one that is allowed here ({error.message})") from None


def _structured_outputs(given: object) -> StructuredOutputsParams:
    require(isinstance(given, Mapping), "structured_outputs", given, "an object")
    assert isinstance(given, Mapping)
    present = {name: value for name, value in given.items() if value is not None}
    for name, value in present.items():
        names = StructuredOutputsParams.names()
        require(name in names, f"structured_outputs.{name}", value, f"absent; there are {', '.join(names)}")
    return StructuredOutputsParams(**present)
