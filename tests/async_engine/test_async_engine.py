"""An engine for many callers at once: each gets his own answer, nobody's leaving or mistake touches another's."""

import asyncio
import gc
import math
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from async_reading import DELTA, OTHER, PROMPT, Make, answer_of, last_of, nothing_runs
from batches import assert_same, some_requests
from deltas import joined
from fixture_types import MakeEngine
from loops import on_a_loop
from stepping import greedy
from watching import watch

from d3engine import AsyncEngine, EngineClosedError, EngineDeadError, InvalidValueError, RequestOutputKind
from d3engine.async_engine.async_engine import SHORT_PROMPT
from d3engine.async_engine.engine_loop import Message, Stop
from d3engine.async_engine.engine_thread import EngineThread

# -- answers ---------------------------------------------------------------------------------------------------------


@on_a_loop
async def test_64_streams_at_once_are_the_same_requests_alone(make_async: Make, make_engine: MakeEngine) -> None:
    requests = some_requests(7, 16)
    alone = make_engine(enforce_eager=True, enable_prefix_caching=False)
    want = [alone.generate(list(r.prompt), r.params, use_tqdm=False)[0] for r in requests]

    async def read(engine: AsyncEngine, nth: int) -> Any:
        request = requests[nth % 16]
        params = replace(request.params, output_kind=DELTA)
        stream = engine.generate(list(request.prompt), params, priority=request.priority)
        return joined([output async for output in stream])

    engine = make_async(max_num_seqs=8, max_num_batched_tokens=32)
    got = await asyncio.gather(*(read(engine, nth) for nth in range(64)))
    for nth in range(64):
        assert_same(got[nth], want[nth % 16])
    assert await nothing_runs(engine)


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@on_a_loop
async def test_outputs_hold_what_their_kind_says(make_async: Make, kind: RequestOutputKind) -> None:
    stream = make_async().generate(PROMPT, greedy(5, output_kind=kind))
    outputs = [output async for output in stream]
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert outputs[-1].finished
    assert sum(lengths) == 5 if kind is DELTA else lengths[-1] == 5
    assert len(outputs) == 1 or kind is not RequestOutputKind.FINAL_ONLY


@pytest.mark.parametrize("n", [1, 3])
@on_a_loop
async def test_deltas_that_wait_for_a_slow_reader_are_merged_into_one(make_async: Make, n: int) -> None:
    params = replace(greedy(20, logprobs=1, prompt_logprobs=1, output_kind=DELTA), temperature=1.0, seed=3, n=n)
    engine = make_async(num_scheduler_steps=1)  # whose tokens come one by one
    want = joined([output async for output in engine.generate(PROMPT, params)])
    stream = engine.generate(PROMPT, params)
    first = await anext(stream)
    while engine.heartbeat().is_working:  # without a turn of the event loop, which knows of nothing until then
        time.sleep(0.001)
    rest = [output async for output in stream]
    assert len(rest) == 1
    assert_same(joined([first, *rest]), want)


@on_a_loop
async def test_a_conversation_is_answered_by_its_template(make_engine: MakeEngine) -> None:
    asked = [{"role": "user", "content": "Tom has 5"}]
    template = "{{ messages[0].content }} apples"
    async with AsyncEngine("demo", device="cpu", kv_cache_memory_bytes=2**24) as engine:
        want = await engine.chat_prompt(asked, chat_template=template)
        output = await last_of(engine.chat(asked, greedy(3), chat_template=template))
        assert output.prompt_token_ids == want["prompt_token_ids"]
        assert "apples" in engine.get_tokenizer().decode(output.prompt_token_ids)
        threaded = list(engine.sync().chat(asked, greedy(3), chat_template=template))
        assert threaded[-1].outputs == output.outputs


@on_a_loop
async def test_a_prepared_request_is_run_as_it_is(make_async: Make, make_engine: MakeEngine) -> None:
    engine = make_async()
    prepared = await engine.prepare(PROMPT, greedy(), request_id="mine", priority=2)
    assert not engine.heartbeat().is_working
    output = await last_of(engine.generate(prepared))
    assert (output.request_id, output.outputs) == ("mine", answer_of(make_engine(), PROMPT))
    for wrong in ({"params": greedy()}, {"request_id": "other"}, {"priority": 1}):
        with pytest.raises(InvalidValueError, match=f"{next(iter(wrong))} must be .* beside a prepared request"):
            engine.generate(prepared, **wrong)


# -- faults ----------------------------------------------------------------------------------------------------------


@on_a_loop
async def test_a_mistake_of_one_caller_is_raised_to_him_alone(
    make_async: Make, gate: Any, make_engine: MakeEngine
) -> None:
    engine = make_async(num_scheduler_steps=1)  # the first is not done before its mates come
    gate.shut(after=1)
    first = engine.generate(PROMPT, greedy(), request_id="a")
    await anext(first)
    with pytest.raises(InvalidValueError, match="prompt_token_ids must be"):
        await anext(engine.generate([10**6], greedy()))
    taken = asyncio.create_task(anext(engine.generate(OTHER, greedy(), request_id="a")))
    while not (taken.done() or engine._transport._loop.inbox.qsize()):
        await asyncio.sleep(0)
    gate.open()
    with pytest.raises(InvalidValueError, match="request_id must be an id of no unfinished request"):
        await taken
    assert (await last_of(first)).outputs == answer_of(make_engine(), PROMPT)


@on_a_loop
async def test_what_is_no_sampling_params_or_timeout_is_refused(make_async: Make) -> None:
    engine = make_async()
    for params in ({"max_tokens": 3}, 5, [greedy()]):
        with pytest.raises(InvalidValueError, match="sampling_params must be SamplingParams"):
            await anext(engine.generate(PROMPT, params))
    for timeout in ("5", -1, math.nan):
        with pytest.raises(InvalidValueError, match="timeout must be a finite number"):
            await engine.drain(timeout)
    assert (await last_of(engine.generate(PROMPT, greedy(1)))).finished


@on_a_loop
async def test_dead_engine_raises_for_present_and_later_callers(make_async: Make, gate: Any) -> None:
    """A dead engine raises for every caller at once, and for those that come later."""
    engine = make_async()
    gate.shut()
    readers = [asyncio.create_task(last_of(engine.generate(PROMPT, greedy(50)))) for _ in range(5)]
    await asyncio.to_thread(gate.wait_until_held)
    asked = asyncio.create_task(engine.stats())
    await asyncio.sleep(0)
    threaded = engine.sync()
    gate.fault = ZeroDivisionError("in the middle of a step")
    gate.open()
    told = await asyncio.gather(*readers, asked, return_exceptions=True)
    later: list[Any] = [last_of(engine.generate(PROMPT)), engine.stats(), engine.prepare(PROMPT), engine.abort("a")]
    told += await asyncio.gather(*later, asyncio.to_thread(threaded.stats), return_exceptions=True)
    assert {type(error) for error in told} == {EngineDeadError}
    assert {error.__cause__ for error in told} == {gate.fault}
    assert len(set(map(id, told))) == len(told)
    heartbeat = engine.heartbeat()
    assert "in the middle of a step" in str(heartbeat.error)
    assert not heartbeat.is_working


@on_a_loop
async def test_heartbeat_tells_a_hung_engine_from_a_rested_one(make_async: Make, gate: Any) -> None:
    """The heartbeat tells a hung engine from one that has rested."""
    engine = make_async()
    assert not engine.heartbeat().is_working
    gate.shut()
    before = time.monotonic()
    task = asyncio.create_task(last_of(engine.generate(PROMPT, greedy(3))))
    await asyncio.to_thread(gate.wait_until_held)
    hung = engine.heartbeat()
    assert hung.is_working
    assert hung.error is None
    assert before <= hung.last_turn <= time.monotonic()
    assert engine.heartbeat() == hung  # time goes on, the engine does not
    gate.open()
    await task
    await engine.stats()
    rested = engine.heartbeat()
    assert not rested.is_working
    assert rested.last_turn > hung.last_turn


@on_a_loop
async def test_an_engine_that_hangs_is_left_behind_by_close(make_async: Make, gate: Any, monkeypatch: Any) -> None:
    engine = make_async()
    gate.shut()
    task = asyncio.create_task(last_of(engine.generate(PROMPT, greedy())))
    await asyncio.to_thread(gate.wait_until_held)
    await asyncio.to_thread(engine._transport.stop, 0)
    with pytest.raises(EngineDeadError, match="has not ended within 0 seconds"):
        await task


# -- the end ---------------------------------------------------------------------------------------------------------


@on_a_loop
async def test_draining_takes_no_more_and_waits_for_the_last_reader(make_async: Make, gate: Any) -> None:
    engine = make_async()
    gate.shut(after=1)
    stream = engine.generate(PROMPT, greedy(5))
    await anext(stream)
    assert not await engine.drain(timeout=0)
    with pytest.raises(EngineClosedError, match="takes no more requests"):
        await anext(engine.generate(OTHER, greedy()))
    drained = asyncio.create_task(engine.drain())
    gate.open()
    assert len((await last_of(stream)).outputs[0].token_ids) == 5
    assert await drained
    assert await engine.drain(timeout=0)


@on_a_loop
async def test_closing_ends_all_that_still_wait(make_async: Make, gate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    send, is_told = EngineThread.send, threading.Event()

    def tell(thread: EngineThread, message: Message) -> None:
        send(thread, message)
        if isinstance(message, Stop):
            is_told.set()

    monkeypatch.setattr(EngineThread, "send", tell)
    engine = make_async()
    gate.shut()
    task = asyncio.create_task(last_of(engine.generate(PROMPT, greedy())))
    await asyncio.to_thread(gate.wait_until_held)
    closing = asyncio.create_task(engine.close())
    assert await asyncio.to_thread(is_told.wait, 120)  # or the answer might be there first
    gate.open()
    await closing
    with pytest.raises(EngineClosedError, match="the engine is closed"):
        await task
    await engine.close()
    with pytest.raises(EngineClosedError):
        await anext(engine.generate(PROMPT))


def test_an_engine_without_a_holder_ends_its_thread(make_engine: MakeEngine) -> None:
    engine = AsyncEngine.from_engine(make_engine())
    thread, gone = engine._transport._thread, weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    thread.join(120)
    assert not thread.is_alive()


def test_signal_handlers_stay_as_they_were(make_async: Make) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    async def main() -> None:
        during = [signal.getsignal(number) for number in (signal.SIGTERM,)]
        engine = make_async()
        await last_of(engine.generate(PROMPT, greedy()))
        assert [signal.getsignal(signal.SIGTERM)] == during
        await engine.close()

    asyncio.run(main())
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


# -- threads ---------------------------------------------------------------------------------------------------------


def test_threads_block_for_the_same_answers(make_async: Make, make_engine: MakeEngine) -> None:
    engine, prompts = make_async().sync(), [[10 + k, 20 + k] for k in range(8)]

    def read(prompt: list[int]) -> Any:
        return joined(list(engine.generate(prompt, greedy(output_kind=DELTA)))).outputs

    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(read, prompts))
    alone = make_engine()
    assert got == [answer_of(alone, prompt) for prompt in prompts]


def test_a_thread_that_leaves_ends_its_request(make_async: Make, gate: Any) -> None:
    engine = make_async(num_scheduler_steps=1).sync()
    with engine.generate(PROMPT, greedy(50)) as stream:
        next(stream)
    for _ in engine.generate(PROMPT, greedy(50)):
        break
    prepared = engine.prepare(PROMPT, greedy(50), request_id="a")
    stream = engine.generate(prepared)
    next(stream)
    engine.abort("a")
    assert list(stream)[-1].outputs[0].finish_reason == "abort"
    assert engine.stats().num_running == engine.stats().kv_blocks_in_use == 0


@pytest.mark.parametrize(
    ("prompt", "params", "by_thread"),
    [
        (PROMPT, None, False),
        ({"prompt_token_ids": PROMPT}, greedy(4), False),
        ([11] * (SHORT_PROMPT + 1), greedy(4), True),
        (tuple(PROMPT), greedy(4), True),
        (PROMPT, replace(greedy(4), allowed_token_ids=list(range(30))), True),
        (PROMPT, replace(greedy(4), logit_bias={5: 1.0}), True),
    ],
    ids=["ids", "in a mapping", "long", "of another kind", "allowed ids", "biases"],
)
@on_a_loop
async def test_short_input_is_read_at_once_and_long_by_a_thread(
    make_async: Make, monkeypatch: pytest.MonkeyPatch, prompt: Any, params: Any, by_thread: bool
) -> None:
    """A short input is read at once, and anything else by a thread."""
    engine = make_async()
    readers = watch(monkeypatch, engine._front, "prepare", lambda *given, **named: threading.current_thread())
    with suppress(InvalidValueError):  # the long one is too long for this model
        await engine.prepare(prompt, params)
    assert [reader is not threading.current_thread() for reader in readers] == [by_thread]
