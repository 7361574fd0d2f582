"""The engine without a server, in a process of its own: answers a round for each line that it reads.

A server's requests come one by one, which is dearer for any engine than prompts that begin and end together: the last
of `WAYS` takes the very arrivals that a server has had, step by step.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

LOCKSTEP, LOOP, ASYNC, ALONE = "lockstep generate", "engine, closed loop", "AsyncEngine, closed loop", "engine alone"
"""The ways, by the names of their rows."""
WAYS = (LOCKSTEP, LOOP, ASYNC, ALONE)
SOON = 64
"""Steps: as many are hardly ever taken at once."""


@dataclass
class Load:
    """A number of streams, each of which asks anew when it was answered, until `until` on the clock.

    `arrivals` are the requests that came before each step of a server, instead of streams; `tokens` and `num_steps` are
    what came of it.
    """

    streams: int
    until: float
    params: Any
    prompts: Callable[[], str]
    arrivals: Sequence[int] = ()
    tokens: int = 0
    num_steps: int = 0

    @property
    def goes_on(self) -> bool:
        """Whether a stream asks once more."""
        return time.perf_counter() < self.until

    def count(self, output: Any) -> None:
        """Take in what is new of an answer."""
        self.tokens += sum(len(answer.token_ids) for answer in output.outputs)


def in_lockstep(engine: Any, load: Load) -> None:
    """All streams ask at once, and again when all are answered."""
    while not load.tokens or load.goes_on:
        prompts = [load.prompts() for _ in range(load.streams)]
        for output in engine.generate(prompts, load.params, use_tqdm=False):
            load.count(output)


def by_steps(engine: Any, load: Load) -> None:
    """Each stream for itself, by `add_request` and `step`, which takes what is done at once as a server's does."""
    ids = map(str, itertools.count())
    for _ in range(load.streams):
        engine.add_request(next(ids), load.prompts(), load.params)
    while engine.has_unfinished_requests():
        for output in engine.step(at_once=True):
            load.count(output)
            if output.finished and load.goes_on:
                engine.add_request(next(ids), load.prompts(), load.params)


def by_arrivals(engine: Any, load: Load) -> None:
    """Requests come by the steps by which they came to a server, whatever the clock says.

    Where some are to come soon, steps are taken one by one, so that nobody comes later than he did there.
    """
    ids, place, num_steps = map(str, itertools.count()), 0, 1
    while place < len(load.arrivals) or engine.has_unfinished_requests():
        for _ in range(sum(load.arrivals[place : place + num_steps])):
            engine.add_request(next(ids), load.prompts(), load.params)
        place += num_steps
        before = engine.scheduler.counters.steps
        for output in engine.step(at_once=not any(load.arrivals[place : place + SOON])):
            load.count(output)
        num_steps = max(1, engine.scheduler.counters.steps - before)


async def by_tasks(engine: Any, load: Load) -> None:
    """Each stream for itself, a task that reads what AsyncEngine generates."""

    async def stream() -> None:
        is_first = True
        while is_first or load.goes_on:
            is_first = False
            async for output in engine.generate(load.prompts(), load.params):
                load.count(output)

    await asyncio.gather(*(stream() for _ in range(load.streams)))


class Steps:
    """An engine whose owner steps it."""

    def __init__(self, way: str, model: str, **arguments: Any) -> None:
        from d3engine import Engine

        self._engine = Engine(model, **arguments)
        self._run = {LOCKSTEP: in_lockstep, LOOP: by_steps, ALONE: by_arrivals}[way]

    def run(self, load: Load) -> None:
        before = self._engine.stats().num_steps
        self._run(self._engine, load)
        load.num_steps = self._engine.stats().num_steps - before

    def close(self) -> None:
        """End the engine."""
        self._engine.close()


class Tasks:
    """An engine with a thread of its own, and the event loop of its readers: uvloop's, as the server's is."""

    def __init__(self, model: str, **arguments: Any) -> None:
        import uvloop

        from d3engine import AsyncEngine

        self._engine = AsyncEngine(model, transport="thread", **arguments)
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)

    def run(self, load: Load) -> None:
        self._runner.run(self._run(load))

    def close(self) -> None:
        """End the engine and the event loop."""
        with self._runner as runner:
            runner.run(self._engine.close())

    async def _run(self, load: Load) -> None:
        before = (await self._engine.stats()).num_steps
        await by_tasks(self._engine, load)
        load.num_steps = (await self._engine.stats()).num_steps - before


def main() -> None:
    """Take what `processes.Bare` gives."""
    given = json.loads(sys.argv[1])
    import torch

    from d3engine import RequestOutputKind

    torch.set_num_threads(given["threads"])
    sizes = {"max_num_seqs": given["rows"], "weight_dtype": given["weight_dtype"], "num_threads": given["threads"]}
    way, model = given["way"], given["model"]
    kind = RequestOutputKind.CUMULATIVE if way == LOCKSTEP else RequestOutputKind.DELTA
    runs = Tasks(model, device="cpu", **sizes) if way == ASYNC else Steps(way, model, device="cpu", **sizes)
    with contextlib.closing(runs):
        _answer(runs, given["tokens"], kind)


def _answer(runs: Steps | Tasks, tokens: int, kind: Any) -> None:
    """A line for each that comes."""
    from benchmarks.serving.asking import DEPTHS, prompt
    from d3engine import SamplingParams
    from d3engine.depth.policy import policy_from_dict

    numbers = itertools.count()
    for line in sys.stdin:
        streams, seconds, depth, arrivals = json.loads(line)
        params = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            depth=policy_from_dict(DEPTHS[depth]),
            output_kind=kind,
        )
        start, begun = time.perf_counter(), time.process_time()
        load = Load(streams, start + seconds, params, lambda: prompt(next(numbers)), arrivals)
        runs.run(load)
        found = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - begun}
        print(json.dumps({"tokens": load.tokens, "num_steps": load.num_steps, **found}), flush=True)


if __name__ == "__main__":
    main()
