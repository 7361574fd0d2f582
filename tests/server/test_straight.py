"""Between its first event and its last a stream goes straight to its socket, and reads as if it went through tasks."""

import asyncio
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from loops import on_a_loop
from starlette.types import Message

from d3engine import AsyncEngine, Engine
from d3engine.executor.interface import Computed
from d3engine.scheduling.plan import Plan
from d3engine.server.app import create_app
from d3engine.server.in_process import scope_of, whole
from d3engine.server.settings import ServerSettings

QUESTION = "Question: Tom has 5 pens. Tom finds 3. Tom buys 2. How many pens does Tom have now?\nAnswer:"
CHAT = [{"role": "user", "content": "Tom has 5 pens. Tom finds 3. How many now?"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": QUESTION, "max_tokens": 16, "return_depths": True},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 16, "stream_options": {"include_usage": True}},
    "/v1/responses": {"input": "Tom has 5 pens.", "max_output_tokens": 16},
    "/v1/messages": {"messages": CHAT, "max_tokens": 16},
}
SIZES: dict[str, Any] = {"device": "cpu", "kv_cache_memory_bytes": 2**24, "enable_prefix_caching": False}
PASSING = re.compile(rb'"(id|item_id|created|created_at|completed_at|decode_seconds)":("[^"]*"|[0-9.e-]+)')
"""What is another's in every answer."""


class InStep:
    """Before each step of the engine the event loop comes to rest, so that no two outputs are ever merged."""

    loop: asyncio.AbstractEventLoop | None = None

    def __call__(self) -> None:
        if self.loop is not None and not self.loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._turns(), self.loop).result(120)

    async def _turns(self) -> None:
        for _ in range(30):
            await asyncio.sleep(0)


@pytest.fixture(scope="module")
def in_step() -> InStep:
    return InStep()


@pytest.fixture(scope="module")
def engine(in_step: InStep) -> Iterator[AsyncEngine]:
    made = Engine("demo", num_scheduler_steps=1, **SIZES)  # no step is taken before the loop has come to rest
    engine = AsyncEngine.from_engine(made, before_step=in_step)
    yield engine
    asyncio.run(engine.close())


class FreeNowAndThen:
    """The outlet of a connection that is free when `is_free_now` says so; what comes either way is in `pieces`."""

    def __init__(self, is_free_now: Iterator[bool]) -> None:
        self._is_free_now = is_free_now
        self.pieces: list[tuple[str, bytes]] = []

    @property
    def is_free(self) -> bool:
        return next(self._is_free_now)

    def write(self, content: bytes) -> None:
        assert content, "an empty piece would end the answer"
        self.pieces.append(("straight", content))


async def stream(engine: AsyncEngine, path: str, outlet: FreeNowAndThen | None) -> list[tuple[str, bytes]]:
    """The pieces of an answer, each with the way that it went."""
    app = create_app(engine, ServerSettings(model_names=("demo",)))
    body = json.dumps({"model": "demo", "stream": True, "temperature": 0} | ASKED[path]).encode()
    scope = scope_of(path, len(body))
    pieces: list[tuple[str, bytes]] = []
    if outlet is not None:
        scope["state"]["outlet"] = outlet
        pieces = outlet.pieces

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            pieces.append(("send", message["body"]))
        else:
            assert message["status"] == 200

    await app(scope, whole(body), send)
    return pieces


@pytest.mark.parametrize("path", ASKED)
@on_a_loop
async def test_stream_is_the_same_whichever_way_its_pieces_go(engine: AsyncEngine, in_step: InStep, path: str) -> None:
    ways: dict[str, Callable[[], FreeNowAndThen | None]] = {
        "none": lambda: None,
        "free": lambda: FreeNowAndThen(itertools.repeat(True)),
        "now and then": lambda: FreeNowAndThen(itertools.cycle([True, True, False])),
    }
    in_step.loop = asyncio.get_running_loop()
    found = {name: await stream(engine, path, outlet()) for name, outlet in ways.items()}
    by_way = {name: [way for way, _ in pieces] for name, pieces in found.items()}
    assert set(by_way["none"]) == {"send"}
    assert by_way["free"][0] == by_way["free"][-1] == "send"
    assert by_way["free"].count("straight") > len(by_way["free"]) // 2
    assert {"send", "straight"} == set(by_way["now and then"][1:-2])
    texts = {name: PASSING.sub(rb"", b"".join(piece for _, piece in pieces)) for name, pieces in found.items()}
    assert texts["free"] == texts["now and then"] == texts["none"]


def taking_whole_runs(engine: Engine) -> Engine:
    """The engine; it looks at a run that goes on by itself when the last step of it has begun."""
    run = engine.executor.run

    def run_when_begun(plan: Plan) -> Computed:
        multi_step = plan.multi_step
        if multi_step is not None and multi_step.control is not None and multi_step.control.num_begun:
            while multi_step.control.num_begun < multi_step.num_steps and not multi_step.control.is_ended:
                os.sched_yield()
        return run(plan)

    engine.executor.run = run_when_begun  # type: ignore[method-assign]
    return engine


@pytest.mark.parametrize("path", ASKED)
@on_a_loop
async def test_ready_tokens_are_one_write_and_an_event_each(engine: AsyncEngine, in_step: InStep, path: str) -> None:
    """Tokens that are ready together are one write, and still an event each."""
    in_step.loop = asyncio.get_running_loop()
    one_by_one = await stream(engine, path, FreeNowAndThen(itertools.repeat(True)))
    made = Engine("demo", **SIZES)
    is_native = made.stats().executor.startswith("native")
    async with AsyncEngine.from_engine(taking_whole_runs(made), before_step=in_step) as running_ahead:
        together = await stream(running_ahead, path, FreeNowAndThen(itertools.repeat(True)))
    assert not is_native or len(together) < len(one_by_one) // 2
    texts = [PASSING.sub(rb"", b"".join(piece for _, piece in way)) for way in (one_by_one, together)]
    assert texts[0] == texts[1]


@on_a_loop
async def test_fault_of_a_direct_write_ends_the_stream_with_an_error(engine: AsyncEngine, in_step: InStep) -> None:
    """A fault of a direct write ends the stream with its error."""

    class Broken(FreeNowAndThen):
        def write(self, content: bytes) -> None:
            raise RuntimeError("/a/secret/path")

    in_step.loop = asyncio.get_running_loop()
    *_, (way, last) = await stream(engine, "/v1/completions", Broken(itertools.repeat(True)))
    async with asyncio.timeout(120):
        while (await engine.stats()).num_running:
            await asyncio.sleep(0)
    assert way == "send"
    assert b'"error"' in last
    assert b"secret" not in last
    assert last.endswith(b"data: [DONE]\n\n")
