"""A request that is left, in whatever way, ends with the step that is running, and ends no other request."""

import asyncio
import gc
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from async_reading import OTHER, PROMPT, Make, answer_of, last_of, nothing_runs
from fixture_types import MakeEngine
from loops import on_a_loop
from stepping import greedy


async def break_off(stream: Any) -> None:
    async for _ in stream:
        break


async def forget(stream: Any) -> None:
    await anext(stream)


async def close(stream: Any) -> None:
    await anext(stream)
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def run_out_of_time(stream: Any) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(last_of(stream), timeout=0.01)


async def be_cancelled(stream: Any) -> None:
    await anext(stream)
    task = asyncio.create_task(last_of(stream))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def fail(stream: Any) -> None:
    with suppress(ZeroDivisionError):
        async for _ in stream:
            1 / 0


@pytest.mark.parametrize("leave", [break_off, forget, close, run_out_of_time, be_cancelled, fail])
@on_a_loop
async def test_leaving_ends_the_request_with_the_step_that_is_running(
    make_async: Make, gate: Any, make_engine: MakeEngine, leave: Callable[[Any], Awaitable[None]]
) -> None:
    engine = make_async(num_scheduler_steps=1)  # no step is taken before the gate lets it through
    gate.shut(after=3)
    await leave(engine.generate(PROMPT, greedy(50)))
    gc.collect()  # an exception's traceback may hold the iterator
    gate.open()
    assert await nothing_runs(engine)
    assert gate.num_steps <= 5  # the last computes nothing: it hands out the end, which is not read
    assert (await last_of(engine.generate(PROMPT, greedy()))).outputs == answer_of(make_engine(), PROMPT)


@on_a_loop
async def test_an_id_may_be_used_again_as_soon_as_its_reader_has_left(make_async: Make) -> None:
    engine = make_async()
    for _ in range(3):
        await break_off(engine.generate(PROMPT, greedy(50), request_id="a"))
    assert (await last_of(engine.generate(OTHER, greedy(2), request_id="a"))).prompt_token_ids == OTHER
    assert await nothing_runs(engine)


@on_a_loop
async def test_a_reader_is_let_go_when_another_task_closes(make_async: Make, gate: Any) -> None:
    engine = make_async()
    gate.shut()
    stream = engine.generate(PROMPT, greedy(50))
    reader = asyncio.create_task(last_of(stream))
    await asyncio.to_thread(gate.wait_until_held)
    with pytest.raises(RuntimeError, match="one reader at a time"):
        await anext(stream)
    await stream.aclose()
    assert await reader is None
    gate.open()
    assert await nothing_runs(engine)


@on_a_loop
async def test_an_aborted_request_has_a_last_output_that_says_so(make_async: Make, gate: Any) -> None:
    engine = make_async(num_scheduler_steps=1)
    gate.shut(after=1)
    stream = engine.generate(PROMPT, greedy(50), request_id="a")
    await anext(stream)
    await engine.abort("unknown")
    await engine.abort("a")
    gate.open()
    assert (await last_of(stream)).outputs[0].finish_reason == "abort"
    assert await nothing_runs(engine)


@pytest.mark.parametrize("num_steps", [1, 3])
@on_a_loop
async def test_closed_event_loop_takes_only_its_own_requests(
    make_async: Make, gate: Any, make_engine: MakeEngine, num_steps: int
) -> None:
    """A closed event loop takes its own requests with it and no others."""
    engine, kept = make_async(num_scheduler_steps=1), []

    async def begin_and_forget() -> None:
        stream = engine.generate(PROMPT, greedy(50))
        await anext(stream)
        kept.append(stream)  # so that nothing but the closed loop ends it

    gate.shut(after=num_steps)
    await asyncio.to_thread(asyncio.run, begin_and_forget())
    gate.open()
    mine = await last_of(engine.generate(OTHER, greedy(10)))
    assert mine.outputs == answer_of(make_engine(), OTHER, 10)
    while not await nothing_runs(engine):
        await asyncio.sleep(0)
    assert gate.num_steps < 50
