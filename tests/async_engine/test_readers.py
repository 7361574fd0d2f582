"""While long texts and forms are read, short requests are read and answered, and the event loop goes on."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from async_reading import Make, last_of
from loops import on_a_loop
from stepping import greedy

from d3engine import SamplingParams
from d3engine.async_engine.async_engine import _READERS, LONG_WORK, SHORT_PROMPT, _kind_of, work_of
from d3engine.request.params import StructuredOutputsParams

HANG_SECONDS = 120.0


class SlowReading:
    """Holds what reads long requests until it is let go; `begun` counts those that have begun."""

    def __init__(self, engine: Any) -> None:
        self.go = threading.Event()
        self.begun = threading.Semaphore(0)
        self._prepare = engine._front.prepare
        engine._front.prepare = self

    def __call__(self, prompt: Any, params: Any = None, *others: Any, **named: Any) -> Any:
        if _kind_of(prompt, params) != "short":
            self.begun.release()
            assert self.go.wait(HANG_SECONDS)
            prompt, params = [11, 12], greedy(1)
        return self._prepare(prompt, params, *others, **named)


@pytest.mark.parametrize(
    "slow",
    [
        ("w5 " * LONG_WORK, None),
        ([5] * LONG_WORK, None),
        ([5], SamplingParams(bad_words=["x" * 1000] * 60)),
        ([5], SamplingParams(allowed_token_ids=[5] * LONG_WORK)),
        ([5], SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))),
    ],
    ids=["text", "ids", "bad words", "allowed", "form"],
)
@on_a_loop
async def test_short_requests_do_not_wait_for_long_ones(make_async: Make, slow: tuple[Any, Any]) -> None:
    engine = make_async()
    reading = SlowReading(engine)
    long = [asyncio.create_task(last_of(engine.generate(*slow))) for _ in range(3 * _READERS)]
    for _ in range(_READERS):
        assert await asyncio.to_thread(reading.begun.acquire, timeout=HANG_SECONDS)
    # Read by the loop itself, and by threads.
    for prompt in ([11, 12, 13], [11] * 20, {"prompt_token_ids": [11] * 20}):
        assert (await last_of(engine.generate(prompt, greedy(3)))).finished
    biased = SamplingParams(max_tokens=2, temperature=0, logit_bias={5: 1.0})
    assert (await last_of(engine.generate([11, 12], biased))).finished
    assert not any(task.done() for task in long)
    reading.go.set()
    assert all(output.finished for output in await asyncio.gather(*long))


@on_a_loop
async def test_what_waits_to_be_read_is_not_once_its_caller_has_left(make_async: Make) -> None:
    engine = make_async()
    reading = SlowReading(engine)
    tasks = [asyncio.create_task(engine.prepare([5] * LONG_WORK)) for _ in range(_READERS + 5)]
    for _ in range(_READERS):
        assert await asyncio.to_thread(reading.begun.acquire, timeout=HANG_SECONDS)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    reading.go.set()
    await engine.prepare([5] * LONG_WORK)  # behind all that waited
    assert reading.begun.acquire(timeout=HANG_SECONDS)
    assert not reading.begun.acquire(blocking=False), "the others have never begun"


def test_work_is_counted_through_all_that_a_request_holds() -> None:
    assert work_of("abc") == 3
    assert work_of([5, 6]) == 2
    assert work_of(None) == work_of(5) == 0
    messages = [{"role": "user", "content": [{"type": "text", "text": "x" * 100}]}]
    assert 100 < work_of((messages, {"tools": None})) < 120
    assert work_of([["x" * LONG_WORK] * 1000] * 1000) < 2 * LONG_WORK + 3000, "no further than it takes to know"
    assert SHORT_PROMPT < LONG_WORK


@on_a_loop
async def test_a_long_conversation_is_long_work(make_async: Make) -> None:
    engine, seen = make_async(), list[str]()

    async def in_pool(kind: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        seen.append(kind)
        return {"prompt_token_ids": [5]}

    engine._in_pool = in_pool  # type: ignore[method-assign]
    await engine.chat_prompt([{"role": "user", "content": "Tom"}])
    await engine.chat_prompt([{"role": "user", "content": "Tom " * LONG_WORK}])
    await engine.chat_prompt([{"role": "user", "content": "Tom"}], tools=[{"description": "x" * LONG_WORK}])
    assert seen == ["short", "long", "long"]
