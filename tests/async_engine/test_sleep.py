"""Sleep and wake: an engine gives its memory back, and answers afterwards as before."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from loops import on_a_loop

from benchmarks.lora import write_random_adapter
from d3engine import AsyncEngine, Engine, EngineClosedError, InvalidValueError, RequestOutputKind, SamplingParams
from d3engine.errors import FailedError
from d3engine.model.config import ModelConfig
from d3engine.request.outputs import RequestOutput

QUESTION = "Question: Tom has 5 apples and buys 3 more. How many apples does Tom have?\nAnswer:"
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
CACHE_BYTES = 2**29


def running(act: Callable[[AsyncEngine], Awaitable[None]], **arguments: Any) -> None:
    """Let an engine of the bundled model act, and close it."""

    async def run() -> None:
        async with AsyncEngine("demo", **{"device": "cpu", "kv_cache_memory_bytes": 2**24, **arguments}) as engine:
            await act(engine)

    asyncio.run(run())


async def answer(engine: AsyncEngine, adapter: str | None = None) -> RequestOutput:
    *_, last = [output async for output in engine.generate(QUESTION, GREEDY, lora_request=adapter)]
    return last


def counted(engine: AsyncEngine) -> list[None]:
    """A list that grows with each start of this engine from now on."""
    starts: list[None] = []
    restart = engine._restart
    assert restart is not None

    def start() -> Any:
        starts.append(None)
        return restart()

    engine._restart = start
    return starts


@pytest.mark.parametrize("transport", ["thread", "process"])
def test_sleep_frees_memory_and_waking_keeps_bits(transport: str) -> None:
    """The KV cache leaves the address space, or the process ends; tokens and log-probabilities stay."""

    async def act(engine: AsyncEngine) -> None:
        engines = [child for child in psutil.Process().children() if "process_main" in " ".join(child.cmdline())]
        before, held = await answer(engine), psutil.Process().memory_info().vms
        stats = await engine.stats()
        await engine.sleep()
        await engine.sleep()
        assert await engine.is_sleeping()
        if transport == "thread":
            assert held - psutil.Process().memory_info().vms > CACHE_BYTES // 2
        else:
            assert [one.is_running() for one in engines] == [False]
        assert await engine.stats() == stats
        beat = engine.heartbeat()
        assert (beat.error, beat.is_working, beat.is_sleeping) == (None, False, True)
        assert await engine.chat_template() is not None
        assert await engine.chat_prompt([{"role": "user", "content": "Tom"}])
        with pytest.raises(EngineClosedError, match="the engine sleeps: wake_up loads its weights again"):
            await answer(engine)
        await engine.wake_up()
        assert not await engine.is_sleeping()
        after = await answer(engine)
        assert after.outputs[0] == before.outputs[0]
        assert (await engine.stats()).generated_tokens == GREEDY.max_tokens

    running(act, transport=transport, kv_cache_memory_bytes=CACHE_BYTES)


def test_sleep_waits_for_the_requests_in_progress() -> None:
    """A stream that has begun ends whole, although its engine is asked to sleep."""

    async def act(engine: AsyncEngine) -> None:
        expected = (await answer(engine)).outputs[0].token_ids
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        stream = engine.generate(QUESTION, params)
        found = list((await anext(stream)).outputs[0].token_ids)
        asleep = asyncio.create_task(engine.sleep())
        async for output in stream:
            assert not await engine.is_sleeping()
            found += output.outputs[0].token_ids
        await asleep
        assert found == expected

    running(act)


def test_a_sleep_that_is_cancelled_leaves_the_engine_awake() -> None:
    """A caller's time limit ends the wait for the requests in progress, and later requests are taken."""

    async def act(engine: AsyncEngine) -> None:
        stream = engine.generate(QUESTION, replace(GREEDY, max_tokens=200))
        await anext(stream)
        asleep = asyncio.create_task(engine.sleep())
        await asyncio.sleep(0)
        asleep.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asleep
        await stream.aclose()
        assert not await engine.is_sleeping()
        assert len((await answer(engine)).outputs[0].token_ids) == GREEDY.max_tokens

    running(act)


def test_calls_at_once_stop_and_start_the_engine_once() -> None:
    """Sleeping and waking by several callers at a time do each once."""

    async def act(engine: AsyncEngine) -> None:
        starts = counted(engine)
        await asyncio.gather(*(engine.sleep() for _ in range(3)))
        await asyncio.gather(*(engine.wake_up() for _ in range(3)))
        assert len(starts) == 1
        assert len((await answer(engine)).outputs[0].token_ids) == GREEDY.max_tokens

    running(act)


def test_the_prefix_cache_file_is_written_and_read(tmp_path: Path) -> None:
    """A prompt from before the sleep is found in the prefix cache after it."""

    async def act(engine: AsyncEngine) -> None:
        assert (await answer(engine)).num_cached_tokens == 0
        await engine.sleep()
        assert (tmp_path / "prefixes").exists()
        await engine.wake_up()
        assert (await answer(engine)).num_cached_tokens > 0

    running(act, prefix_cache_file=tmp_path / "prefixes")


def test_adapters_are_after_a_sleep_what_they_were(tmp_path: Path) -> None:
    """One that was loaded at run time is there again, and one that was unloaded is not."""
    for seed, name in enumerate(("first", "second")):
        (tmp_path / name).mkdir()
        write_random_adapter(tmp_path / name, ModelConfig.from_directory("d3engine/demo_model"), 8, seed=seed, size=0.3)

    async def act(engine: AsyncEngine) -> None:
        await engine.load_lora_adapter("second", tmp_path / "second")
        await engine.unload_lora_adapter("first")
        before = (await answer(engine, "second")).outputs[0]
        await engine.sleep()
        assert list(engine.lora_adapters) == ["second"]
        await engine.wake_up()
        assert list(engine.lora_adapters) == ["second"]
        assert (await answer(engine, "second")).outputs[0] == before != (await answer(engine)).outputs[0]

    running(act, lora_modules=[f"first={tmp_path / 'first'}"])


@pytest.mark.parametrize("transport", ["thread", "process"])
def test_a_wake_that_is_cancelled_loses_no_adapter(tmp_path: Path, transport: str) -> None:
    """A caller's time limit ends no waking half way, and an adapter that is gone is missing alone."""
    for name in ("gone", "kept"):
        (tmp_path / name).mkdir()
        write_random_adapter(tmp_path / name, ModelConfig.from_directory("d3engine/demo_model"), 8, seed=0, size=0.3)

    async def act(engine: AsyncEngine) -> None:
        for name in ("gone", "kept"):
            await engine.load_lora_adapter(name, tmp_path / name)
        before = (await answer(engine, "kept")).outputs[0]
        await engine.sleep()
        shutil.rmtree(tmp_path / "gone")
        starts, waking = counted(engine), asyncio.create_task(engine.wake_up())
        while not starts:
            await asyncio.sleep(0)
        waking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waking
        await engine.wake_up()
        assert list(engine.lora_adapters) == ["kept"]
        assert (await answer(engine, "kept")).outputs[0] == before

    running(act, transport=transport)


@on_a_loop
async def test_an_engine_that_is_closed_asleep_stays_closed() -> None:
    """Closing ends a sleep for good."""
    engine = AsyncEngine("demo", device="cpu", kv_cache_memory_bytes=2**24)
    await engine.sleep()
    await engine.close()
    await engine.close()
    with pytest.raises(EngineClosedError):
        await engine.wake_up()


def test_a_failed_wake_leaves_the_engine_asleep() -> None:
    """What cannot be loaded now may be later."""

    async def act(engine: AsyncEngine) -> None:
        await engine.sleep()
        restart = engine._restart

        def fail() -> Any:
            raise FailedError("no memory is left")

        engine._restart = fail
        with pytest.raises(FailedError, match="no memory is left"):
            await engine.wake_up()
        assert await engine.is_sleeping()
        engine._restart = restart
        await engine.wake_up()
        assert len((await answer(engine)).outputs[0].token_ids) == GREEDY.max_tokens

    running(act)


@on_a_loop
async def test_what_no_sleep_can_do_is_refused() -> None:
    """Another level than 1, and weights that no file holds."""
    async with AsyncEngine.from_engine(Engine("demo", device="cpu", kv_cache_memory_bytes=2**24)) as engine:
        with pytest.raises(InvalidValueError, match="level must be 1: weights and KV cache are freed; got 2"):
            await engine.sleep(level=2)
        with pytest.raises(FailedError, match="its weights are no files"):
            await engine.sleep()
        assert len((await answer(engine)).outputs[0].token_ids) == GREEDY.max_tokens
