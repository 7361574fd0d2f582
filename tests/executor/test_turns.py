"""How often a device with graphs waits for the host: steps and turns take their time by a made-up clock."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from batches import LAYERS, block_bytes
from fixture_types import MakeEngine
from watching import watch

from d3engine import D3, SamplingParams
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
def clock(graphs: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def greedy(max_tokens: int, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **changes)


def test_a_device_waits_for_the_host_once_in_64_steps(clock: Clock, make_engine: MakeEngine) -> None:
    """For a batch as for a stream: 60 steps after the prompt are one run, within which no step waits."""
    engine = make_engine(max_num_seqs=2, depth=D3(0.8, 0.3))
    outputs = engine.generate([[1, 2], [3, 4, 5]], greedy(61), use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [61, 61]
    assert (clock.num_launched, clock.num_idle) == (60, 1)
    streamed = list(engine.stream([1, 2], greedy(61)))
    assert streamed[-1].outputs[0].token_ids == outputs[0].outputs[0].token_ids
    assert (clock.num_launched, clock.num_idle) == (120, 2)


@pytest.mark.parametrize("params", [greedy(61), greedy(61, presence_penalty=1.5)], ids=["greedy", "penalised"])
def test_no_step_waits_for_a_plan_of_the_same_batch(
    clock: Clock, make_engine: MakeEngine, params: SamplingParams
) -> None:
    """60 steps in runs of 8, which are planned while the last steps of others are under way, wait for one turn."""
    policies = {"max_num_seqs": 2, "depth": D3(0.97, 0.3)}  # whose layers fall asleep in runs that are under way
    single = make_engine(num_scheduler_steps=1, **policies)
    wanted = single.generate([[1, 2], [3, 4, 5]], params, use_tqdm=False)
    assert (clock.num_launched, clock.num_idle) == (60, 60)
    engine = make_engine(num_scheduler_steps=8, **policies)
    outputs = engine.generate([[1, 2], [3, 4, 5]], params, use_tqdm=False)
    assert (clock.num_launched, clock.num_idle) == (120, 61)
    for found, one in zip(outputs, wanted, strict=True):
        assert (found.outputs[0].token_ids, found.outputs[0].depths) == (
            one.outputs[0].token_ids,
            one.outputs[0].depths,
        )


def test_a_stop_anywhere_drops_what_was_planned_beyond(clock: Clock, make_engine: MakeEngine) -> None:
    """The other answers of the batch are the same, wherever in a run of 8 steps, or in the next, one ends."""
    prompts, drawn = [[1, 2], [3, 4, 5]], replace(greedy(40), temperature=5.0, seed=3)
    engine = make_engine(max_num_seqs=2, num_scheduler_steps=8)
    wanted = [one.outputs[0].token_ids for one in engine.generate(prompts, drawn, use_tqdm=False)]
    lengths = [n + 1 for n, token in enumerate(wanted[0][:24]) if n >= 8 and token not in wanted[0][:n]]
    assert len({length % 8 for length in lengths}) == 8
    for length in lengths:
        clock.num_launched = 0
        asked = [replace(drawn, stop_token_ids=[wanted[0][length - 1]]), drawn]
        outputs = engine.generate(prompts, asked, use_tqdm=False)
        assert [one.outputs[0].token_ids for one in outputs] == [wanted[0][:length], wanted[1]]
        assert 39 <= clock.num_launched <= 39 + LAUNCHED_AHEAD
        assert engine.stats().kv_blocks_in_use == 0


def test_a_request_joins_before_what_was_planned_beyond(clock: Clock, make_engine: MakeEngine) -> None:
    """A request that comes while the next run is planned waits for the steps under way alone."""
    engine = make_engine(max_num_seqs=2, num_scheduler_steps=8)
    wanted = [engine.generate([prompt], greedy(40), use_tqdm=False)[0].outputs[0] for prompt in ([1, 2], [3, 4, 5])]
    clock.num_launched = 0
    engine.add_request("first", [1, 2], greedy(40))
    for _ in range(8):
        engine.step()
    launched = clock.num_launched
    assert launched > 8, "steps of the next run are under way"
    engine.add_request("second", [3, 4, 5], greedy(40))
    last: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        outputs = {output.request_id: output.outputs[0].token_ids for output in engine.step()}
        if "second" in outputs and "second" not in last:
            assert clock.num_launched <= launched
        last |= outputs
        engine.scheduler.check_integrity()
    assert list(last.values()) == [one.token_ids for one in wanted]


def test_without_memory_no_run_is_planned_beyond(clock: Clock, make_engine: MakeEngine) -> None:
    """Answers are the same where there is room for one of them alone, and the steps of a run are planned at its end."""
    prompts = [[1, 2], [3, 4, 5]]
    roomy = make_engine(max_num_seqs=2, enable_prefix_caching=False)
    wanted = roomy.generate(prompts, greedy(36), use_tqdm=False)
    before = clock.num_idle
    memory = LAYERS * 12 * block_bytes()
    engine = make_engine(
        max_num_seqs=2, enable_prefix_caching=False, num_scheduler_steps=8, kv_cache_memory_bytes=memory
    )
    outputs = engine.generate(prompts, greedy(36), use_tqdm=False)
    assert engine.stats().num_preemptions == 1
    assert clock.num_idle - before > 2
    for found, one in zip(outputs, wanted, strict=True):
        assert found.outputs[0].token_ids == one.outputs[0].token_ids


def test_an_answer_that_ends_in_a_run_ends_the_run(clock: Clock, make_engine: MakeEngine) -> None:
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
    make_engine: MakeEngine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(max_num_seqs=3)
    copies = watch(monkeypatch, torch.Tensor, "copy_", lambda *_, **options: options.get("non_blocking", False))
    list(engine.stream([1, 2], greedy(20)))
    assert sum(copies) == clock.num_launched == 19
