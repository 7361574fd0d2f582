"""Further models of one server: loaded when a request names one, unloaded for another's sake or after a silence."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from d3engine.errors import D3EngineError
from d3engine.model.config import ModelConfig
from d3engine.server.errors import RequestError
from d3engine.server.settings import ServerSettings
from d3engine.server.state import AppState, ModelCard
from d3engine.utils.garbage import collect_now

if TYPE_CHECKING:
    from d3engine.async_engine.async_engine import AsyncEngine

_log = logging.getLogger(__name__)

LATEST = ":latest"
"""What Ollama's clients put behind a name without a tag."""


@dataclass(frozen=True)
class FurtherModel:
    """What is known of a model before it is loaded.

    Attributes:
        name: the id by which requests name it.
        load: makes its engine, in a thread.
        num_bytes: what its weights and its KV cache take, about.
        directory: where its files are.
        config: its sizes.
    """

    name: str
    load: Callable[[], AsyncEngine]
    num_bytes: int
    directory: Path
    config: ModelConfig


class _Place:
    """One model, and who uses it. Times are of the monotonic clock."""

    def __init__(self, model: FurtherModel) -> None:
        self.model = model
        self.served: AppState | None = None
        self.loading: asyncio.Task[AppState] | None = None
        self.num_users = 0
        self.last_used = 0.0


class FurtherModels:
    """The models of one server beside its first, which is always loaded.

    Args:
        models: what may be loaded.
        first: the app state of the first model, whose settings and queue the others share.
        room_bytes: what all that are loaded may take beside the first; None: no bound.
        ttl: seconds without a request after which a model is unloaded; None: it stays until room is needed.
    """

    def __init__(
        self,
        models: Sequence[FurtherModel],
        first: AppState,
        *,
        room_bytes: int | None = None,
        ttl: float | None = None,
    ) -> None:
        self._places: Mapping[str, _Place] = {model.name: _Place(model) for model in models}
        self._first = first
        self._room_bytes = room_bytes
        self._ttl = ttl
        self._created = int(time.time())
        self._turn = asyncio.Lock()  # one model is loaded at a time
        self._left = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()

    def name_of(self, given: object) -> str | None:
        """The name of a further model, with or without ":latest"; None for any other."""
        bare = given.removesuffix(LATEST) if isinstance(given, str) else ""
        return bare if bare in self._places else None

    @property
    def models(self) -> list[FurtherModel]:
        """All of them, loaded or not."""
        return [place.model for place in self._places.values()]

    def loaded(self) -> list[tuple[FurtherModel, AppState]]:
        """Those that are loaded now."""
        return [(place.model, place.served) for place in self._places.values() if place.served is not None]

    def cards(self) -> list[ModelCard]:
        """Their entries of GET /v1/models; what a model says of its depth is known when it is loaded."""
        return [self.card(name) for name in self._places]

    def card(self, name: str) -> ModelCard:
        """The entry of one of them."""
        place = self._places[name]
        if place.served is not None:
            return place.served.models.card(name)
        length = place.model.config.max_position_embeddings
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "d3engine",
            "root": name,
            "parent": None,
            "max_model_len": length,
        }

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[AppState]:
        """A model, loaded, for as long as the block lasts. Raises `RequestError` where it cannot be loaded."""
        place = self._places[name]
        place.num_users += 1
        try:
            yield await self._loaded(place)
        finally:
            place.num_users -= 1
            place.last_used = time.monotonic()
            self._left.set()
            if self._ttl is not None:
                asyncio.get_running_loop().call_later(self._ttl, self._unload_if_idle, place)

    async def close(self) -> None:
        """Unload all."""
        for place in self._places.values():
            if place.loading is not None:
                await asyncio.gather(place.loading, return_exceptions=True)
            self._unload(place)
        await asyncio.gather(*self._closing)

    async def _loaded(self, place: _Place) -> AppState:
        if place.served is not None and place.served.client.heartbeat().error is not None:
            self._unload(place)  # its engine has ended by a fault: the next request gets a new one
        if place.served is not None:
            return place.served
        if place.loading is None:
            place.loading = asyncio.create_task(self._load(place))
        return await asyncio.shield(place.loading)  # a client that leaves ends no loading: others may wait for it

    async def _load(self, place: _Place) -> AppState:
        model = place.model
        try:
            async with self._turn:
                await self._make_room(model)
                _log.info("loading the model %s", model.name)
                client = await asyncio.to_thread(model.load)
            served = AppState(client, self._settings_of(model))
            served.traffic = self._first.traffic
            place.served = served
            return served
        except D3EngineError as error:
            _log.error("the model %s cannot be loaded: %s", model.name, error)
            message = f"The model {model.name!r} cannot be loaded; the server's log says why."
            raise RequestError(503, message, param="model", code="model_not_loaded") from None
        finally:
            place.loading = None

    def _settings_of(self, model: FurtherModel) -> ServerSettings:
        return replace(self._first.settings, model_names=(model.name,), depth_aliases={}, otlp_traces_endpoint=None)

    async def _make_room(self, model: FurtherModel) -> None:
        """Unload the models that were used least recently, and wait while those that are left are in use."""
        while self._room_bytes is not None:
            there = [place for place in self._places.values() if place.served is not None]
            if model.num_bytes + sum(place.model.num_bytes for place in there) <= self._room_bytes or not there:
                return
            idle = [place for place in there if not place.num_users]
            if idle:
                self._unload(min(idle, key=lambda place: place.last_used))
                await asyncio.gather(*self._closing)
            else:
                self._left.clear()
                await self._left.wait()

    def _unload_if_idle(self, place: _Place) -> None:
        assert self._ttl is not None
        is_over = time.monotonic() - place.last_used >= self._ttl * 0.99
        if is_over and not place.num_users and place.loading is None:
            self._unload(place)

    def _unload(self, place: _Place) -> None:
        """Forget it at once, and close its engine in a task."""
        served, place.served = place.served, None
        if served is not None:
            _log.info("unloading the model %s", place.model.name)
            task = asyncio.get_running_loop().create_task(_close(served.client))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


async def _close(client: AsyncEngine) -> None:
    """End an engine, and give its memory back: a server looks for garbage seldom."""
    await client.close()
    del client
    await asyncio.to_thread(collect_now)


class _Named(msgspec.Struct):
    """The model that a body names."""

    model: object = None


class ModelRouter:
    """Gives each request whose body names a further model that model's state, for as long as it is answered."""

    def __init__(self, app: ASGIApp, models: FurtherModels) -> None:
        self.app = app
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = self._models.name_of(_model_of(scope.get("state", {}).get("body")))
        if name is None:
            await self.app(scope, receive, send)
            return
        async with self._models.use(name) as served:
            scope["state"]["served"] = served
            await self.app(scope, receive, send)


def _model_of(body: bytes | None) -> object:
    """What a body has as `model`; None where it is no JSON object, which its route says."""
    if not body:
        return None
    try:
        return msgspec.json.decode(body, type=_Named).model
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError):
        return None
