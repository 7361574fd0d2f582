"""Whoever streams gets one token a step, out of runs that the device takes by itself."""

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from batches import Request, assert_same, kv_is_back, step_as_alone
from fixture_types import MakeEngine
from multi_step import NESTED, Solo, greedy, steps_by_itself, unread

from d3engine import D3, FullDepth
from d3engine.executor.cuda_graph import GraphExecutor
from d3engine.executor.interface import Computed
from d3engine.request.outputs import RequestOutput
from d3engine.request.params import RequestOutputKind
from d3engine.scheduling.plan import Plan, RunControl
from d3engine.scheduling.sampling_mode import SamplingMode


@pytest.fixture
def controls(monkeypatch: pytest.MonkeyPatch) -> list[RunControl]:
    """Those of all runs that are followed, in the order in which they begin."""
    found: list[RunControl] = []

    def made() -> RunControl:
        found.append(RunControl())
        return found[-1]

    monkeypatch.setattr("d3engine.scheduling.multi_step.RunControl", made)
    return found


def deltas(params: Any) -> Any:
    return replace(params, output_kind=RequestOutputKind.DELTA)


def test_stream_is_few_runs_a_token_each_step(multi_step: MakeEngine, solo: Solo, controls: list[RunControl]) -> None:
    """A stream is a few runs of the device and each step brings a token."""
    request = Request(tuple(range(50, 60)), greedy(D3(0.9, 0.5), 50))
    engine = multi_step(num_scheduler_steps=12)
    found = list(engine.stream(list(request.prompt), deltas(request.params)))
    assert [len(output.outputs[0].token_ids) for output in found] == [1] * 50
    wanted = solo(request).outputs[0]
    assert [token for output in found for token in output.outputs[0].token_ids] == wanted.token_ids
    assert [depth for output in found for depth in output.outputs[0].depths] == wanted.depths
    runs = [49] if isinstance(engine.executor, GraphExecutor) else [12, 12, 12, 12]  # and one step alone
    assert [control.num_begun for control in controls] == runs
    assert kv_is_back(engine)


def test_streams_and_whole_answers_of_any_schedules_share_steps(multi_step: MakeEngine, solo: Solo) -> None:
    requests = [Request(tuple(range(40, 44 + n)), greedy(NESTED[n % 5], 25 - n)) for n in range(9)]
    engine = multi_step(max_num_seqs=5, num_scheduler_steps=7)
    asked = [unread(one.params) if nth % 3 else one.params for nth, one in enumerate(requests)]
    step_as_alone(engine, requests, solo, asked)
    assert kv_is_back(engine)


@pytest.mark.parametrize("seed", range(3))
def test_requests_coming_and_going_in_a_run_change_no_other(multi_step: MakeEngine, solo: Solo, seed: int) -> None:
    """Requests that come and go while a run is under way change nothing for the others."""
    numbers = random.Random(seed)
    requests = [Request(tuple(range(40 + n, 60 - n)), greedy(NESTED[n % 5], 30)) for n in range(8)]
    engine = multi_step(max_num_seqs=4, num_scheduler_steps=9)
    waiting, left, done = list(range(8)), set(), {}
    while waiting or engine.has_unfinished_requests():
        if waiting and numbers.random() < 0.2:
            nth = waiting.pop()
            engine.add_request(str(nth), list(requests[nth].prompt), deltas(requests[nth].params))
        for sequence in engine.scheduler.running:
            fate = numbers.random()
            if fate < 0.02:
                engine.abort_request(sequence.request_id)
                left.add(int(sequence.request_id))
            elif fate < 0.03:
                engine.scheduler._preempt(sequence)
        for output in engine.step():
            tokens = done.setdefault(int(output.request_id), [])
            assert sum(len(completion.token_ids) for completion in output.outputs) <= 1
            tokens += [token for completion in output.outputs for token in completion.token_ids]
        engine.scheduler.check_integrity()
    for nth, request in enumerate(requests):
        wanted = solo(request).outputs[0].token_ids
        assert done[nth] == (wanted[: len(done[nth])] if nth in left else wanted)
    assert 0 < len(left) < 8
    assert kv_is_back(engine)


def test_who_leaves_a_stream_ends_its_run(multi_step: MakeEngine, solo: Solo, controls: list[RunControl]) -> None:
    request = Request(tuple(range(50, 60)), greedy(FullDepth(), 45))
    engine = multi_step(num_scheduler_steps=40)
    stream = engine.stream(list(request.prompt), request.params)
    for _ in range(3):
        next(stream)
    assert not controls[0].is_ended
    assert isinstance(stream, Iterator)
    stream.close()  # type: ignore[attr-defined]
    assert controls[0].is_ended
    assert engine.stats().num_running == 0
    assert_same(engine.generate(list(request.prompt), request.params, use_tqdm=False)[0], solo(request))
    assert kv_is_back(engine)


def test_who_comes_waits_for_no_step_that_had_not_begun(multi_step: MakeEngine, controls: list[RunControl]) -> None:
    engine = multi_step(num_scheduler_steps=40)
    engine.add_request("first", [1, 2, 3], deltas(greedy(FullDepth(), 45)))
    for _ in range(3):
        engine.step()
    engine.add_request("second", [4, 5, 6], deltas(greedy(FullDepth(), 5)))
    taken, came = 2, []
    while not came:
        came = [output for output in engine.step() if output.request_id == "second"]
        taken += 1
    assert controls[0].is_ended
    assert taken - 1 <= controls[0].num_begun
    begun = steps_by_itself(engine)
    assert begun <= controls[0].num_begun + 3  # the prompts, and the step that the second has come with


def test_a_stop_in_a_stream_s_run_leaves_the_tokens_beyond_it(
    multi_step: MakeEngine, solo: Solo, controls: list[RunControl]
) -> None:
    request, beside = (Request(tuple(range(n, 60)), greedy(D3(0.9, 0.5), 30)) for n in (50, 45))
    whole = solo(request).outputs[0].token_ids
    stop = next(token for place, token in enumerate(whole) if place > 5 and token not in whole[:place])
    engine = multi_step(num_scheduler_steps=32)
    engine.add_request("stops", list(request.prompt), deltas(replace(request.params, stop_token_ids=[stop])))
    engine.add_request("goes on", list(beside.prompt), beside.params)
    tokens: list[int] = []
    last: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.request_id == "stops":
                tokens += output.outputs[0].token_ids
            last[output.request_id] = output
    assert tokens == whole[: whole.index(stop) + 1]
    assert last["stops"].outputs[0].finish_reason == "stop"
    assert_same(last["goes on"], solo(beside))
    assert engine.stats().generated_tokens == len(tokens) + 30
    assert controls[0].is_ended


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_reader_of_all_done_reads_single_tokens(multi_step: MakeEngine, solo: Solo, kind: RequestOutputKind) -> None:
    """A reader takes all that is done and still reads one token after the other."""
    # Where a stop token is among them, none beyond it; and a mate's tokens wait for `step()` one by one too.
    request, beside = (Request(tuple(range(n, 60)), greedy(D3(0.9, 0.5), 40, logprobs=0)) for n in (50, 45))
    whole = solo(request).outputs[0]
    place = next(n for n, token in enumerate(whole.token_ids) if n > 20 and token not in whole.token_ids[:n])
    engine = multi_step(num_scheduler_steps=16)
    calls: list[int] = []
    run = engine.executor.run

    def run_when_done(plan: Plan) -> Computed:
        calls.append(plan.num_rows)
        followed = None if plan.multi_step is None else plan.multi_step.control
        while followed is not None and plan.multi_step and 0 < followed.num_begun < plan.multi_step.num_steps:
            if followed.is_ended:  # then no further step begins
                break
            os.sched_yield()
        return run(plan)

    if engine.executor.capabilities.choice is SamplingMode.REPORT:
        engine.executor.run = run_when_done  # type: ignore[method-assign]
    engine.add_request("beside", list(beside.prompt), deltas(beside.params))
    params = replace(request.params, stop_token_ids=[whole.token_ids[place]], output_kind=kind)
    outputs = [output.outputs[0] for output in engine.stream(list(request.prompt), params)]
    counts = [len(output.token_ids) for output in outputs]
    assert counts == ([1] * (place + 1) if kind is RequestOutputKind.DELTA else list(range(1, place + 2)))
    found = [token for output in outputs for token in output.token_ids[-1:]]
    assert found == whole.token_ids[: place + 1]
    assert [depth for output in outputs for depth in output.depths[-1:]] == whole.depths[: place + 1]
    assert outputs[-1].finish_reason == "stop"
    assert len(calls) < place // 2
    tokens: list[int] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert len(output.outputs[0].token_ids) <= 1
            tokens += output.outputs[0].token_ids
        engine.scheduler.check_integrity()
    assert tokens == solo(beside).outputs[0].token_ids
    assert kv_is_back(engine)


def test_step_of_all_that_is_done_has_an_output_a_token(multi_step: MakeEngine, solo: Solo) -> None:
    """A step that takes all that is done brings an output for each token of each request."""
    requests = [Request(tuple(range(n, 60)), greedy(D3(0.9, 0.5), 40 - n % 7, logprobs=0)) for n in (50, 45, 41)]
    engine = multi_step(num_scheduler_steps=16)
    for nth, request in enumerate(requests[:2]):
        engine.add_request(str(nth), list(request.prompt), deltas(request.params))
    tokens: dict[str, list[int]] = {"0": [], "1": [], "2": []}
    num_calls = 0
    while engine.has_unfinished_requests():
        for output in engine.step(at_once=True):
            assert len(output.outputs[0].token_ids) == 1
            tokens[output.request_id] += output.outputs[0].token_ids
        engine.scheduler.check_integrity()
        num_calls += 1
        if num_calls == 3:  # somebody comes into the middle of a run
            engine.add_request("2", list(requests[2].prompt), deltas(requests[2].params))
    assert [tokens[str(nth)] for nth in range(3)] == [solo(request).outputs[0].token_ids for request in requests]
    assert engine.stats().generated_tokens == sum(map(len, tokens.values()))
    assert kv_is_back(engine)


def test_engine_is_ahead_until_a_request_joins_or_leaves(multi_step: MakeEngine) -> None:
    """An engine is ahead within a run until a request joins or leaves it."""
    engine = multi_step(num_scheduler_steps=8)
    assert not engine.is_ahead()
    engine.add_request("one", [5, 6, 7], deltas(greedy(FullDepth(), 40)))
    found = []
    for _ in range(12):
        engine.step()
        found.append(engine.is_ahead())
    # The prompt's step, and eight of a run; only of graphs the next is planned before its end.
    assert found == [False] + [True] * 7 + [isinstance(engine.executor, GraphExecutor)] + [True] * 3
    engine.add_request("other", [8, 9], deltas(greedy(FullDepth(), 40)))
    assert not engine.is_ahead()
    while engine.stats().num_waiting:
        engine.step()
        assert not engine.is_ahead()
    engine.step()
    engine.step()
    assert engine.is_ahead()
    engine.abort_request("one")
    assert not engine.is_ahead()
