"""Models of one server: further ones are loaded on demand and unloaded when idle, and the first may sleep."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from d3engine.errors import D3EngineError, require
from d3engine.model.config import ModelConfig
from d3engine.server.errors import RequestError
from d3engine.server.state import LATEST, AppState, ModelCard, no_such_model
from d3engine.utils.garbage import collect_now, freeze_loaded, unfreeze_loaded

if TYPE_CHECKING:
    from d3engine.async_engine.async_engine import AsyncEngine

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FurtherModel:
    """What is known of a model before it is loaded: its id, what makes its engine in a thread, about how many bytes its
    weights and its KV cache take, its files, and how long a text may be; None: the model's own length.
    """

    name: str
    load: Callable[[], AsyncEngine]
    num_bytes: int
    directory: Path
    config: ModelConfig
    max_model_len: int | None = None


@dataclass(eq=False)
class _Place:
    """One model, and the requests that use it; times are of the monotonic clock."""

    name: str
    num_bytes: int
    load: Callable[[], Awaitable[AppState]]
    unload: Callable[[AsyncEngine], Awaitable[None]]
    served: AppState | None = None
    loading: asyncio.Task[AppState] | None = None
    draining: asyncio.Task[None] | None = None
    yielding: asyncio.Task[Any] | None = None  # the loading of another, behind which its later requests wait
    num_users: int = 0
    last_used: float = 0.0
    timer: asyncio.TimerHandle | None = None


class FurtherModels:
    """The models of one server that are not always loaded.

    The first is loaded, but where `enable_sleep_mode` is set: there it may sleep, and a request wakes it. It is never
    unloaded for the sake of another.

    Args:
        models: what may be loaded beside the first.
        first: the app state of the first model, whose settings and queue the others share.
        first_bytes: what the first takes, about.
        room_bytes: what all that are loaded may take beside the first; None: no bound.
        ttl: seconds without a request after which a model is unloaded or sleeps; None: it stays until room is needed.
    """

    def __init__(
        self,
        models: Sequence[FurtherModel],
        first: AppState,
        *,
        first_bytes: int = 0,
        room_bytes: int | None = None,
        ttl: float | None = None,
    ) -> None:
        for model in models:
            allowed = "a name that is no id of a model"
            require(model.name not in first.client.lora_adapters, "lora_modules", model.name, allowed)
        self.models = models
        self._models = {model.name: model for model in models}
        self._places = {
            one.name: _Place(one.name, one.num_bytes, partial(self._new, one), lambda client: client.close())
            for one in models
        }
        self._first = first
        self._sleeper: _Place | None = None
        if first.settings.enable_sleep_mode:
            wake, sleep = partial(_woken, first), _put_to_sleep
            self._sleeper = _Place(first.models.default, first_bytes, wake, sleep, first)
        self._room_bytes = None if room_bytes is None else room_bytes + first_bytes
        self._first_bytes = first_bytes
        self._ttl = ttl
        self._created = int(time.time())
        self._turn = asyncio.Lock()  # one model is loaded at a time
        self._left = asyncio.Event()
        self._closing: set[asyncio.Task[D3EngineError | None]] = set()

    def name_of(self, given: object) -> str | None:
        """The name of a further model, with or without ":latest"; None for any other."""
        bare = given.removesuffix(LATEST) if isinstance(given, str) else ""
        return bare if bare in self._places else None

    def loaded(self) -> list[tuple[FurtherModel, AppState]]:
        return [(self._models[name], one.served) for name, one in self._places.items() if one.served is not None]

    def cards(self) -> list[ModelCard]:
        """Their entries of GET /v1/models; what a model says of its depth is known when it is loaded."""
        return [self.card(name) for name in self._places]

    def card(self, name: str) -> ModelCard:
        place = self._places[name]
        if place.served is not None:
            return place.served.models.card(name)
        model = self._models[name]
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "d3engine",
            "root": name,
            "parent": None,
            "max_model_len": model.max_model_len or model.config.max_position_embeddings,
        }

    def place_of(self, given: object) -> _Place | None:
        """Where a model has its place, None standing for the first; None for one that is always loaded or unknown."""
        name = self.name_of(given)
        if name is not None:
            return self._places[name]
        first = self._first.models
        is_first = given is None or (isinstance(given, str) and (given in first or given.removesuffix(LATEST) in first))
        return self._sleeper if is_first else None

    def begin(self) -> None:
        """Count the first model's idle seconds from now on."""
        if self._sleeper is not None:
            self._left_idle(self._sleeper)

    def is_sleeping(self, given: str | None) -> bool:
        """Whether a model is not loaded. Raises `RequestError` for an unknown one."""
        place = self._known(given)
        return place is not None and place.served is None

    async def sleep(self, given: str | None) -> None:
        """Unload a model after its requests in progress; later ones load it again. Raises as `AsyncEngine.sleep`."""
        place = self._known(given)
        assert place is not None, "the route asks whether models may sleep"
        if place.draining is None:
            place.draining = asyncio.create_task(self._drain(place))
        await asyncio.shield(place.draining)  # a client that leaves ends nothing: requests wait for it

    async def wake_up(self, given: str | None) -> None:
        """Load a model where it is not. Raises `RequestError` for an unknown one, and where it cannot be loaded."""
        place = self._known(given)
        assert place is not None, "the route asks whether models may sleep"
        async with self.use(place):
            pass

    def _known(self, given: str | None) -> _Place | None:
        place = self.place_of(given)
        if place is None and given is not None and given not in self._first.models:
            raise no_such_model(given)
        return place

    @asynccontextmanager
    async def use(self, place: _Place) -> AsyncIterator[AppState]:
        """A model, loaded, for as long as the block lasts. Raises `RequestError` where it cannot be loaded."""
        while (before := place.draining or place.yielding) is not None:
            await asyncio.wait([before])
        place.num_users += 1
        try:
            yield await self._loaded(place)
        finally:
            place.num_users -= 1
            self._left.set()
            self._left_idle(place)

    def _left_idle(self, place: _Place) -> None:
        place.last_used = time.monotonic()
        if self._ttl is not None and place.timer is None:  # one for all requests of as long a time
            place.timer = asyncio.get_running_loop().call_later(self._ttl, self._unload_if_idle, place)

    async def close(self) -> None:
        """Unload all but the first, whose engine the caller closes."""
        for place in (*self._places.values(), *filter(None, [self._sleeper])):
            if place.loading is not None:
                await asyncio.gather(place.loading, return_exceptions=True)
            if place is not self._sleeper:
                self._unload(place)
        await self._closed()

    async def _drain(self, place: _Place) -> None:
        try:
            while place.num_users:
                self._left.clear()
                await self._left.wait()
            task = self._unload(place)
            if task is not None and (error := await task) is not None:
                raise error
        finally:
            place.draining = None

    async def _loaded(self, place: _Place) -> AppState:
        if (
            place is not self._sleeper  # what has ended it, its health tells
            and place.served is not None
            and place.served.client.heartbeat().error is not None
        ):
            self._unload(place)  # its engine has ended by a fault: the next request gets a new one
        if place.served is not None:
            return place.served
        if place.loading is None:
            place.loading = asyncio.create_task(self._load(place))
        return await asyncio.shield(place.loading)  # a client that leaves ends no loading: others may wait for it

    async def _load(self, place: _Place) -> AppState:
        try:
            async with self._turn:
                await self._closed()
                await self._make_room(place)
                _log.info("loading the model %s", place.name)
                served = place.served = await place.load()
            return served
        except (D3EngineError, MemoryError, RuntimeError) as error:  # PyTorch's own where a GPU has no memory left
            _log.error("the model %s cannot be loaded: %s", place.name, error)
            message = f"The model {place.name!r} cannot be loaded; the server's log says why."
            raise RequestError(503, message, param="model", code="model_not_loaded") from None
        finally:
            for one in self._places.values():
                if one.yielding is place.loading:
                    one.yielding = None
            place.loading = None

    async def _new(self, model: FurtherModel) -> AppState:
        client = await asyncio.to_thread(model.load)
        own: dict[str, Any] = {"model_names": (model.name,), "depth_aliases": {}, "otlp_traces_endpoint": None}
        served = AppState(client, replace(self._first.settings, **own))
        served.traffic = self._first.traffic
        return served

    async def _make_room(self, place: _Place) -> None:
        """Unload the models used least recently; one in use ends its requests first, and later ones wait for this."""
        while self._room_bytes is not None:
            there = [one for one in self._places.values() if one.served is not None]
            is_first_there = place is not self._sleeper and (self._sleeper is None or self._sleeper.served is not None)
            taken = sum(one.num_bytes for one in there) + (self._first_bytes if is_first_there else 0)
            if place.num_bytes + taken <= self._room_bytes or not there:
                return
            least = min(there, key=lambda one: (one.num_users > 0, one.last_used))
            if least.num_users:
                least.yielding = place.loading  # in steady use it would never be free
                self._left.clear()
                await self._left.wait()
            else:
                self._unload(least)
                await self._closed()

    def _unload_if_idle(self, place: _Place) -> None:
        assert self._ttl is not None
        place.timer, idle = None, time.monotonic() - place.last_used
        if idle < self._ttl * 0.99:
            place.timer = asyncio.get_running_loop().call_later(self._ttl - idle, self._unload_if_idle, place)
        elif not place.num_users and place.loading is None and place.draining is None:
            self._unload(place)

    def _unload(self, place: _Place) -> asyncio.Task[D3EngineError | None] | None:
        """Forget it at once, and free what it takes in a task."""
        served, place.served = place.served, None
        if served is None:
            return None
        _log.info("unloading the model %s", place.name)
        task = asyncio.get_running_loop().create_task(_freed(place, served))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    async def _closed(self) -> None:
        """Wait until what was unloaded has given its memory back."""
        if self._closing:
            await asyncio.wait(self._closing)


async def _freed(place: _Place, served: AppState) -> D3EngineError | None:
    """End an engine, and give its memory back: a server looks for garbage seldom. What has failed, if something has."""
    try:
        await place.unload(served.client)
    except D3EngineError as error:
        _log.error("the model %s cannot be unloaded: %s", place.name, error)
        return error
    del served
    await asyncio.to_thread(collect_now)
    return None


async def _put_to_sleep(client: AsyncEngine) -> None:
    unfreeze_loaded()
    await client.sleep()


async def _woken(served: AppState) -> AppState:
    await served.client.wake_up()
    await asyncio.to_thread(freeze_loaded)
    return served


SHOW = "/api/show"
"""Where Ollama's older clients name the model by `name`."""


class _Named(msgspec.Struct):
    """The model that a body names."""

    model: object = None
    name: object = None


class ModelRouter:
    """Gives each request with a body the state of the model that it names, loaded for as long as it is answered."""

    def __init__(self, app: ASGIApp, models: FurtherModels) -> None:
        self.app = app
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = scope.get("state", {}).get("body")
        place = None if body is None else self._models.place_of(_model_of(body, scope["path"]))
        if place is None:
            await self.app(scope, receive, send)
            return
        async with self._models.use(place) as served:
            scope["state"]["served"] = served
            await self.app(scope, receive, send)


def _model_of(body: bytes, path: str) -> object:
    """What a body has as `model`; None where it is no JSON object, which its route says."""
    try:
        found = msgspec.json.decode(body, type=_Named)
        return found.name if found.model is None and path == SHOW else found.model
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError):
        return None
