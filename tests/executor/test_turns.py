"""How often a device with graphs waits for the host: steps and turns take their time by a made-up clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from d3engine import D3, Engine, SamplingParams
from d3engine.engine import resolve
from d3engine.executor.cuda_graph import GraphExecutor
from d3engine.executor.graph_shapes import Repeats, Step
from d3engine.executor.streaming import LAUNCHED_AHEAD, HostTokens

STEP, TURN = 1.0, 0.5
"""Seconds of a step on the device, and of what the host does between two plans or two steps that it takes."""


class Clock:
    """A device that takes its steps one after another while the host goes on, and waits where it has none left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.done_at = 0.0
        self.num_launched = self.num_idle = self.num_turns = 0
        record, fetch, download, run = Repeats.record, HostTokens.fetch, GraphExecutor._download, GraphExecutor.run

        def recorded(recorder: Repeats, step: Step) -> Step:
            repeat = record(recorder, step)

            def launched() -> None:
                repeat()
                self.num_launched += 1
                self.num_idle += self.now > self.done_at
                self.done_at = max(self.now, self.done_at) + STEP

            return launched

        def fetched(tokens: HostTokens, taken: int) -> Callable[[], None]:
            fetch(tokens, taken)
            done_at = self.done_at
            return lambda: self.wait(done_at)

        def downloaded(*given: Any) -> Any:
            self.wait(self.done_at)
            return download(*given)

        def ran(*given: Any) -> Any:
            self.num_turns += 1
            self.now += TURN
            return run(*given)

        monkeypatch.setattr(Repeats, "record", recorded)
        monkeypatch.setattr(HostTokens, "fetch", fetched)
        monkeypatch.setattr(GraphExecutor, "_download", downloaded)
        monkeypatch.setattr(GraphExecutor, "run", ran)

    def wait(self, until: float) -> None:
        self.now = max(self.now, until)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(resolve, "executor_for", lambda device, dtype, eager, backend: "graphs")
    return Clock(monkeypatch)


def greedy(max_tokens: int, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **changes)


def test_a_device_waits_for_the_host_once_in_64_steps(clock: Clock, make_engine: Callable[..., Engine]) -> None:
    """For a batch as for a stream: 60 steps after the prompt are one run, within which no step waits."""
    engine = make_engine(max_num_seqs=2, depth=D3(0.8, 0.3))
    outputs = engine.generate([[1, 2], [3, 4, 5]], greedy(61), use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [61, 61]
    assert (clock.num_launched, clock.num_idle) == (60, 1)
    streamed = list(engine.stream([1, 2], greedy(61)))
    assert streamed[-1].outputs[0].token_ids == outputs[0].outputs[0].token_ids
    assert (clock.num_launched, clock.num_idle) == (120, 2)


def test_an_answer_that_ends_in_a_run_ends_the_run(clock: Clock, make_engine: Callable[..., Engine]) -> None:
    """Of steps whose tokens are for no request there are no more than the device has been given ahead."""
    engine = make_engine(max_num_seqs=1)
    wanted = engine.generate([[1, 2]], greedy(60), use_tqdm=False)[0].outputs[0].token_ids
    stop = next(token for place, token in enumerate(wanted) if place > 20 and token not in wanted[:place])
    length = wanted.index(stop) + 1
    clock.num_launched = 0
    params = replace(greedy(60), stop_token_ids=[stop])
    assert engine.generate([[1, 2]], params, use_tqdm=False)[0].outputs[0].token_ids == wanted[:length]
    assert clock.num_launched <= length - 1 + LAUNCHED_AHEAD


def test_the_tokens_and_scores_of_a_step_come_in_one_copy(
    make_engine: Callable[..., Engine], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    copies: list[int] = []
    copy = torch.Tensor.copy_

    def counted(target: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
        copies.append(options.get("non_blocking", False))
        return copy(target, *given, **options)

    engine = make_engine(max_num_seqs=3)
    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    list(engine.stream([1, 2], greedy(20)))
    assert sum(copies) == clock.num_launched == 19
