"""A tap takes outputs as they come, without waking who reads them; all that it does not take, the reader gets."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from async_reading import DELTA, PROMPT, Make, nothing_runs
from fixture_types import MakeEngine
from loops import on_a_loop
from stepping import greedy

from d3engine import RequestOutput
from d3engine.async_engine.dispatcher import LoopWaker, ReplyFuture

PARAMS = replace(greedy(12), output_kind=DELTA)


async def read_all(stream: Any, into: list[tuple[str, RequestOutput]]) -> None:
    async for output in stream:
        into.append(("reader", output))


async def let_go_when_he_waits(gate: Any) -> None:
    """The first output comes alone, since the engine makes no further step before."""
    await asyncio.to_thread(gate.wait_until_held)
    gate.open()


def test_output_that_a_tap_leaves_and_the_last_are_the_readers(
    make_async: Make, make_engine: MakeEngine, gate: Any
) -> None:
    """An output that a tap does not take is the reader's, and so is the last one."""
    found: list[tuple[str, RequestOutput]] = []

    def every_other(outputs: Sequence[RequestOutput]) -> int:
        takes = len(found) % 2 == 0
        if takes:
            found.append(("tap", outputs[0]))
        return int(takes)

    async def main() -> None:
        engine = make_async()
        gate.shut(after=1)
        stream = engine.generate(PROMPT, PARAMS)
        stream.tap(every_other)
        reading = asyncio.create_task(read_all(stream, found))
        await let_go_when_he_waits(gate)
        await reading
        assert await nothing_runs(engine)

    asyncio.run(main())
    (want,) = make_engine().generate([PROMPT], greedy(12), use_tqdm=False)
    assert [token for _, output in found for token in output.outputs[0].token_ids] == want.outputs[0].token_ids
    assert found[0][0] == "tap"
    assert [who for who, output in found if output.finished] == ["reader"]


@on_a_loop
async def test_tap_that_raises_ends_its_request_and_its_reader(make_async: Make, gate: Any) -> None:
    """An exception of a tap ends its request and is raised to the reader."""
    engine = make_async()
    gate.shut(after=1)
    stream = engine.generate(PROMPT, PARAMS)
    stream.tap(lambda outputs: int(1 / 0))
    reading = asyncio.create_task(read_all(stream, []))
    await let_go_when_he_waits(gate)
    with pytest.raises(ZeroDivisionError):
        await reading
    assert await nothing_runs(engine)


@on_a_loop
async def test_error_behind_an_output_of_the_tap_reaches_the_reader() -> None:
    """An error behind an output that the tap takes reaches the reader."""
    notifier = LoopWaker(asyncio.get_running_loop())
    slot = ReplyFuture(1, notifier)
    reading = asyncio.create_task(notifier.take(slot, len))
    await asyncio.sleep(0)
    assert slot.put(["an output"])
    slot.put([ZeroDivisionError()])
    notifier.wake([slot])
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(reading, 60)
