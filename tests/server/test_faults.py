"""What can go wrong on the way of an answer, and that a client is spared it or told of it.
The engine behind these apps is real but for its model, which says what a test wants (`tests/support/scripted.py`).
The apps are called without a socket between, so that every message is seen as it leaves, and a gate before the
engine's steps decides what has happened when. Two faults are switched on, to show that the tests would see them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Container, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import on_a_loop
from scripted import CONFIG, DEMO, Scripted
from starlette.applications import Starlette

from d3engine import AsyncEngine, Engine
from d3engine.model.config import ModelConfig
from d3engine.model.weights import random_weights
from d3engine.server.app import create_app
from d3engine.server.in_process import scope_of
from d3engine.server.settings import ServerSettings
from d3engine.text import output
from d3engine.text.detokenizer import TokenTexts
from d3engine.text.tokenizer import load_tokenizer

PROMPT, OTHER = [7, 8, 9], [17, 18]
SPARKLING = " caf\u00e9 \U0001f600 \u20ac!"
STOPPED = " one ##two ### three"
HANG_SECONDS = 120.0
"""Against tests that hang: no test is judged by it."""


class Everybody(Container[str]):
    """Every request."""

    def __contains__(self, request_id: object) -> bool:
        return True


class World:
    """An app over a scripted engine; `before_step[k]` is called on the engine's thread before its step k."""

    def __init__(self, app: Starlette, engine: AsyncEngine, model: Scripted, before: dict[int, Any]) -> None:
        self.app = app
        self.engine = engine
        self.model = model
        self.before_step = before

    async def run_step_by_step(self, caller: Caller) -> None:
        """Each step waits until what the last one yielded was sent: nothing is merged on the way."""
        for step in range(2, 60):
            self.before_step[step] = partial(caller.wait_for_writes, step - 1)
        await caller.run()

    def break_after_the_first_byte(self, caller: Caller, fault: Callable[[World], None]) -> None:
        """Before step 4, when the client has got something."""

        def break_it() -> None:
            assert caller.got_bytes.wait(HANG_SECONDS)
            fault(self)

        self.before_step[4] = break_it

    async def holds_nothing(self) -> bool:
        stats = await self.engine.stats()
        return (stats.num_running, stats.num_waiting, stats.kv_blocks_in_use) == (0, 0, 0)


class Caller:
    """One request to an app, as a server would hand it over, from a client who may leave."""

    def __init__(self, world: World, **body: Any) -> None:
        asked = {"prompt": PROMPT, "temperature": 0, "max_tokens": 40, "stream": True} | body
        self.messages: list[dict[str, Any]] = []
        self.got_bytes = threading.Event()
        self._num_writes = 0
        self._written = threading.Condition()
        self._left = asyncio.Event()
        self._body: bytes | None = json.dumps(asked).encode()
        self._app = world.app

    async def run(self) -> Caller:
        assert self._body is not None
        scope = scope_of("/v1/completions", len(self._body))
        async with asyncio.timeout(HANG_SECONDS):
            await self._app(scope, self._receive, self._send)
        return self

    def leave(self) -> None:
        self._left.set()

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.messages.append(message)
        if message.get("body"):
            self.got_bytes.set()
            with self._written:
                self._num_writes += 1
                self._written.notify_all()

    def wait_for_writes(self, count: int) -> None:
        """For the engine's thread: so long until so much was sent."""
        with self._written:
            assert self._written.wait_for(lambda: self._num_writes >= count, HANG_SECONDS)

    @property
    def status(self) -> int:
        status: int = self.messages[0]["status"]
        return status

    @property
    def content(self) -> str:
        return b"".join(message.get("body", b"") for message in self.messages).decode()

    @property
    def events(self) -> list[Any]:
        """What came as events; comments are none."""
        lines = [line.removeprefix("data: ") for line in self.content.split("\n\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    @property
    def texts(self) -> list[str]:
        return [one["choices"][0]["text"] for one in self.events if "choices" in one]


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    """`make_world(text, **settings)`: a world whose model answers every prompt with this text."""
    made = []

    def make(text: str, **settings: Any) -> World:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        weights = random_weights(ModelConfig.from_directory(tmp_path), dtype=torch.float32, device="cpu", seed=0)
        engine = Engine(tmp_path, weights=weights, tokenizer=DEMO, device="cpu", enforce_eager=True)
        script = engine.get_tokenizer().encode(text.strip(), add_special_tokens=False)  # a space goes before it
        model = Scripted({tuple(prompt): script for prompt in (PROMPT, OTHER)})
        engine.executor = model  # type: ignore[assignment]
        before: dict[int, Any] = {}
        num_steps = iter(range(1, 10_000))
        client = AsyncEngine.from_engine(engine, before_step=lambda: before.get(next(num_steps), bool)())
        made.append(client)
        return World(create_app(client, ServerSettings(model_names=("m",), **settings)), client, model, before)

    yield make
    for client in made:
        asyncio.run(client.close())


Make = Callable[..., World]


def show_each_token_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that is easily made: a token's bytes are made text without those of its neighbours."""
    texts = TokenTexts(load_tokenizer(DEMO))

    class Hasty(output.Detokenizer):
        def append(self, token_id: int) -> str:
            super().append(token_id)
            return texts.of(token_id)[0]

    monkeypatch.setattr(output, "Detokenizer", Hasty)


def hold_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another: text is shown before it is known whether it begins a stop string."""

    class Hasty(output.Detokenizer):
        def _take(self, settled: str) -> str:
            super()._take(settled)
            return settled

    monkeypatch.setattr(output, "Detokenizer", Hasty)


@pytest.mark.parametrize("is_broken", [False, True])
@on_a_loop
async def test_a_character_that_tokens_cut_is_never_sent_in_halves(
    make_world: Make, monkeypatch: pytest.MonkeyPatch, is_broken: bool
) -> None:
    if is_broken:
        show_each_token_by_itself(monkeypatch)
    world = make_world(SPARKLING)
    caller = Caller(world, return_token_ids=True)
    await world.run_step_by_step(caller)
    choices = [one["choices"][0] for one in caller.events[:-1]]
    assert sum(len(one["token_ids"]) for one in choices) > len(SPARKLING) + 2  # characters were cut
    assert ("".join(caller.texts) == SPARKLING) != is_broken
    assert any("\ufffd" in text for text in caller.texts) == is_broken


@on_a_loop
async def test_a_character_that_tokens_cut_has_one_place_in_the_text(make_world: Make) -> None:
    caller = await Caller(make_world(SPARKLING), logprobs=0).run()
    logprobs = [one["choices"][0]["logprobs"] for one in caller.events[:-1]]
    places = [place for one in logprobs for place in one["text_offset"]]
    assert places == sorted(places)
    assert places[-1] == len(SPARKLING)
    assert places.count(SPARKLING.index("\U0001f600")) > 1


@pytest.mark.parametrize("is_broken", [False, True])
@on_a_loop
async def test_beginning_of_a_stop_string_is_held_back(
    make_world: Make, monkeypatch: pytest.MonkeyPatch, is_broken: bool
) -> None:
    """The beginning of a stop string is not sent before it is known to be none."""
    if is_broken:
        hold_nothing_back(monkeypatch)
    world = make_world(STOPPED)
    caller = Caller(world, stop=["###"], return_token_ids=True)
    await world.run_step_by_step(caller)
    assert len(caller.events) > 6  # it came in pieces
    assert "".join(caller.texts) == (" one ##two ###" if is_broken else " one ##two ")
    assert await world.holds_nothing()


# -- errors ----------------------------------------------------------------------------------------------------------


def the_engine_dies(world: World) -> None:
    world.model.fault = RuntimeError("in /a/secret/path")


def the_request_fails(world: World) -> None:
    world.model.poisoned = Everybody()  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("fault", "status", "code"), [(the_engine_dies, 503, "engine_dead"), (the_request_fails, 500, "request_failed")]
)
@pytest.mark.parametrize("stream", [True, False])
@on_a_loop
async def test_an_error_before_the_first_byte_is_a_status(
    make_world: Make, fault: Any, status: int, code: str, stream: bool
) -> None:
    world = make_world(SPARKLING)
    fault(world)
    caller = await Caller(world, stream=stream).run()
    assert caller.status == status
    error = json.loads(caller.content)["error"]
    assert (error["type"], error["code"]) == ("server_error", code)
    assert "secret" not in caller.content


@pytest.mark.parametrize(("fault", "code"), [(the_engine_dies, "engine_dead"), (the_request_fails, "request_failed")])
@on_a_loop
async def test_an_error_after_the_first_byte_is_an_event_and_then_done(make_world: Make, fault: Any, code: str) -> None:
    world = make_world(SPARKLING)
    caller = Caller(world)
    world.break_after_the_first_byte(caller, fault)
    await caller.run()
    *chunks, error, done = caller.events
    assert caller.status == 200
    assert chunks
    assert all("choices" in chunk for chunk in chunks)
    assert done == "[DONE]"
    assert set(error) == {"error"}
    assert (error["error"]["type"], error["error"]["code"]) == ("server_error", code)
    assert "secret" not in caller.content
    if code == "request_failed":
        assert await world.holds_nothing()


@pytest.mark.parametrize("nth", [0, 1])
@on_a_loop
async def test_stream_with_a_fault_of_one_answer_ends_with_an_error(make_world: Make, nth: int) -> None:
    """A fault of one of two answers ends the stream, whichever it is."""
    world = make_world(SPARKLING)
    world.model.poisoned_answer = nth
    caller = Caller(world, n=2, temperature=1, top_k=1)
    world.break_after_the_first_byte(caller, the_request_fails)
    await caller.run()
    *_, error, done = caller.events
    assert (error["error"]["code"], done) == ("request_failed", "[DONE]")
    assert await world.holds_nothing()


@on_a_loop
async def test_failing_prompt_ends_the_others_of_its_request(make_world: Make) -> None:
    """Of several prompts, the others end with the one that fails."""
    world = make_world(SPARKLING)
    world.before_step[3] = lambda: the_request_fails(world)
    caller = await Caller(world, prompt=[PROMPT, OTHER], stream=False).run()
    assert caller.status == 500
    assert await world.holds_nothing()


@on_a_loop
async def test_a_request_that_fails_takes_nobody_along(make_world: Make) -> None:
    """Row 7 of the security list: the fault of one request is its own."""

    class First(Container[str]):
        """The request that is asked for first."""

        request_id: object = None

        def __contains__(self, request_id: object) -> bool:
            self.request_id = self.request_id or request_id
            return request_id == self.request_id

    world = make_world(SPARKLING)
    world.model.poisoned = First()  # type: ignore[assignment]
    one, other = Caller(world), Caller(world, prompt=OTHER)
    await asyncio.gather(one.run(), other.run())
    failed, answered = sorted((one, other), key=lambda caller: -caller.status)
    assert (failed.status, answered.status) == (500, 200)
    assert "".join(answered.texts) == SPARKLING
    assert await world.holds_nothing()


# -- clients that leave or wait --------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [PROMPT, [PROMPT, OTHER]], ids=["one prompt", "two prompts"])
@pytest.mark.parametrize("stream", [True, False])
@on_a_loop
async def test_a_client_that_leaves_takes_its_requests_along(make_world: Make, stream: bool, prompt: Any) -> None:
    world = make_world(SPARKLING * 2)
    caller = Caller(world, prompt=prompt, stream=stream)
    loop, has_left = asyncio.get_running_loop(), threading.Event()

    def wait_until_left() -> None:
        loop.call_soon_threadsafe(caller.leave)
        assert has_left.wait(HANG_SECONDS)

    world.before_step[4] = wait_until_left
    await caller.run()
    has_left.set()
    assert "[DONE]" not in caller.content
    assert world.app.state.traffic.taken == 0
    assert await world.holds_nothing()


@on_a_loop
async def test_a_silent_stream_says_that_it_is_alive_and_goes_on(make_world: Make) -> None:
    world = make_world(SPARKLING, sse_keep_alive_seconds=0.01)
    caller = Caller(world)
    world.before_step[1] = lambda: caller.got_bytes.wait(HANG_SECONDS)
    await caller.run()
    assert caller.content.startswith(": ")
    assert "".join(caller.texts) == SPARKLING
    assert caller.events[-1] == "[DONE]"
