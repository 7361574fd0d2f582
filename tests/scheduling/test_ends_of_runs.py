"""A run of steps ends where it must: at a stop, a fault, the end of memory, and at a request that waits."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batches import (
    CONFIG,
    LAYERS,
    Request,
    assert_same,
    block_bytes,
    generate_as_alone,
    kv_is_back,
    step_as_alone,
    wide,
)
from fixture_types import MakeEngine
from multi_step import Solo, greedy, not_finite, steps_by_itself, unread

from d3engine import D3, Engine, FullDepth, IntervalAdmission, InvalidValueError, SamplingParams, UnifiedSkip
from d3engine.engine import resolve
from d3engine.executor import cuda_graph
from d3engine.executor.cuda_graph import GraphExecutor
from d3engine.executor.graph_shapes import batch_sizes
from d3engine.executor.sampler import FAULT
from d3engine.model.config import ModelConfig
from d3engine.model.weights import random_weights
from d3engine.scheduling.multi_step import run_ahead
from d3engine.scheduling.plan import ExecutorCapabilities, Plan
from d3engine.scheduling.running import Chunks, RunningTable, Trait
from d3engine.scheduling.sampling_mode import SamplingMode

GREEDY, REPORT = SamplingMode.GREEDY, SamplingMode.REPORT


def test_a_run_that_the_memory_has_no_room_for_is_a_single_step(multi_step: MakeEngine, solo: Solo) -> None:
    """Nobody waits here, and nobody is sent away before the next step itself lacks a block."""
    requests = [Request(tuple(range(n, n + 4)), greedy(FullDepth(), 36)) for n in (20, 40)]
    engine = multi_step(kv_cache_memory_bytes=LAYERS * 12 * block_bytes(), enable_prefix_caching=False)
    generate_as_alone(engine, requests, solo)
    stats = engine.stats()
    assert stats.num_preemptions == 1
    assert steps_by_itself(engine) > 40


def test_waiting_request_with_a_place_ends_a_run(multi_step: MakeEngine) -> None:
    """A request that waits while there is a place is not kept waiting by a run."""
    engine = multi_step(admission=IntervalAdmission(12), num_scheduler_steps=16)

    def add(name: str) -> None:
        engine.add_request(name, [1, 2, 3], unread(greedy(FullDepth(), 40)))

    add("first")
    engine.step()
    before = steps_by_itself(engine)
    while steps_by_itself(engine) < before + 16:  # of graphs the host takes one after another
        engine.step()
    assert steps_by_itself(engine) == before + 16
    add("second")
    waited = 0
    while engine.scheduler.num_waiting:
        before = steps_by_itself(engine)
        engine.step()
        if engine.scheduler.num_waiting:
            waited += steps_by_itself(engine) - before
            assert steps_by_itself(engine) <= before + 1
    assert 0 < waited < 12


def test_request_that_waits_for_memory_ends_no_run(multi_step: MakeEngine, solo: Solo) -> None:
    """While a request waits for memory the others go on in runs, and it joins when they have given it back."""
    prompts = tuple(range(20, 28)), tuple(range(100, 144))
    requests = [Request(prompt, greedy(FullDepth(), most)) for prompt, most in zip(prompts, (32, 4), strict=True)]
    engine = multi_step(kv_cache_memory_bytes=LAYERS * 12 * block_bytes(), enable_prefix_caching=False)
    ahead: list[bool] = []

    def look(engine: Engine) -> None:
        if engine.scheduler.num_waiting:
            ahead.append(engine.is_ahead())

    step_as_alone(engine, requests, solo, [request.params for request in requests], look)
    assert 16 < len(ahead) <= 34
    assert sum(ahead) > 16
    assert engine.stats().num_preemptions == 0


def test_rope_that_grows_is_known_on_the_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rope that grows with the sequence is known on the device."""
    # Answers that outgrow the trained length, beside some that have outgrown it with their prompts.

    def make(**config: Any) -> Engine:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | config))
        shape = ModelConfig.from_directory(tmp_path)
        weights = wide(random_weights(shape, dtype=torch.float32, device="cpu", seed=3))
        return Engine(tmp_path, weights=weights, skip_tokenizer_init=True, device="cpu", max_model_len=64)

    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    grown: dict[str, Any] = {"max_position_embeddings": 16, "rope_scaling": rope}
    params = greedy(D3(0.8, 0.3), 24)
    prompts = [list(range(50 + length, 50 + 2 * length)) for length in (3, 9, 15, 16, 17, 30)]
    wanted = [make(**grown).generate(prompt, params, use_tqdm=False)[0] for prompt in prompts]
    fixed = [make().generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts[:2]]
    monkeypatch.setattr(resolve, "executor_for", lambda *given: "graphs")
    engine = make(**grown)
    for found, other in zip(engine.generate(prompts, params, use_tqdm=False), wanted, strict=True):
        assert_same(found, other)
    assert steps_by_itself(engine) > 20
    for prompt, tokens, other in zip(prompts, fixed, wanted, strict=False):
        same = 16 - len(prompt) + 1
        assert tokens[:same] == other.outputs[0].token_ids[:same]
        assert tokens != other.outputs[0].token_ids, "that the rope has grown is to be seen"


def test_an_answer_ends_at_its_stop_token_in_the_middle_of_a_run(multi_step: MakeEngine, solo: Solo) -> None:
    prompt = tuple(range(50, 60))
    whole = solo(Request(prompt, greedy(D3(0.9, 0.5)))).outputs[0].token_ids
    stop = next(token for place, token in enumerate(whole) if place > 4 and token not in whole[:place])
    neighbour = Request(tuple(range(9)), greedy(FullDepth()))
    params = greedy(D3(0.9, 0.5), stop_token_ids=[stop])
    engine = multi_step()
    found, beside = engine.generate([list(prompt), list(neighbour.prompt)], [params, neighbour.params], use_tqdm=False)
    assert found.outputs[0].token_ids == whole[: whole.index(stop) + 1]
    assert (found.outputs[0].finish_reason, found.outputs[0].stop_reason) == ("stop", stop)
    assert len(found.outputs[0].depths) == len(found.outputs[0].token_ids)
    assert_same(beside, solo(neighbour))
    assert engine.stats().generated_tokens == len(found.outputs[0].token_ids) + 20


def test_stop_string_ends_an_answer_in_the_middle_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer ends at its stop string in the middle of a run."""
    prompt = "Question: Nina has 23 marbles. Nina loses 11 of them. How many marbles does Nina have now?\nAnswer:"
    params = SamplingParams(temperature=0, max_tokens=40, stop=["23 - 11"])
    plain = Engine("demo", device="cpu").generate(prompt, params, use_tqdm=False)[0].outputs[0]
    assert (plain.finish_reason, plain.stop_reason) == ("stop", "23 - 11")
    monkeypatch.setattr(resolve, "executor_for", lambda *given: "graphs")
    engine = Engine("demo", device="cpu")
    found = engine.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    assert (found.text, found.token_ids, found.depths) == (plain.text, plain.token_ids, plain.depths)
    assert (found.finish_reason, found.stop_reason) == ("stop", "23 - 11")
    assert steps_by_itself(engine) == len(found.token_ids) - 1, "no step beyond the stop is taken"
    assert engine.stats().kv_blocks_in_use == 0


def test_row_that_is_not_finite_ends_alone_with_its_tokens(multi_step: MakeEngine, solo: Solo) -> None:
    """A row whose logits are not finite ends alone with the tokens it had."""
    prompt, beside = tuple(range(50, 60)), Request(tuple(range(9)), greedy(D3(0.8, 0.3)))
    whole = solo(Request(prompt, greedy(FullDepth()))).outputs[0].token_ids
    others = {*prompt, *beside.prompt, *solo(beside).outputs[0].token_ids}
    place = next(n for n, token in enumerate(whole) if n > 2 and token not in {*others, *whole[:n]})
    engine = multi_step()
    with not_finite(engine, whole[place]):
        found, healthy = engine.generate(
            [list(prompt), list(beside.prompt)], [greedy(FullDepth()), beside.params], use_tqdm=False
        )
    assert found.outputs[0].token_ids == whole[: place + 1]
    assert (found.outputs[0].finish_reason, found.outputs[0].stop_reason) == ("abort", FAULT)
    assert_same(healthy, solo(beside))
    assert kv_is_back(engine)


def test_host_writes_between_steps_of_a_run_are_not_read(graphs: MakeEngine, solo: Solo) -> None:
    """What the host writes between the steps of a run is not read."""
    # The proof that a step takes nothing from the host: all that the host knows is spoilt after the first.
    request = Request(tuple(range(50, 60)), greedy(D3(0.9, 0.5)))
    engine = graphs()
    executor = engine.executor
    assert isinstance(executor, GraphExecutor)
    original = executor._graph

    def graph(shape: Any) -> Callable[[], None]:
        step = original(shape)

        def step_and_spoil() -> None:
            step()
            executor._from_host.fill_(-1)
            executor._tables._tensor.fill_(-1)

        return step_and_spoil

    executor._graph = graph  # type: ignore[method-assign]
    executor._tables._update = lambda plan, columns: _all_anew(executor, plan)  # type: ignore[method-assign]
    assert_same(engine.generate(list(request.prompt), request.params, use_tqdm=False)[0], solo(request))
    assert steps_by_itself(engine) == 19


def _all_anew(executor: GraphExecutor, plan: Plan) -> bool:
    executor._tables._tensor.copy_(torch.from_numpy(plan.tables))
    return True


def test_a_graph_is_captured_once_for_each_depth_and_size(graphs: MakeEngine) -> None:
    engine = graphs(max_num_seqs=8)
    params = greedy(D3(0.9, 0.5), 40)
    depths = {int(depth) for depth in D3(0.9, 0.5).schedule(LAYERS).depths(40)[1:]}
    for batch, sizes in ((1, 1), (1, 1), (3, 2), (4, 2), (5, 3)):
        engine.generate([[n, n + 1] for n in range(batch)], params, use_tqdm=False)
        assert engine.stats().graphs_captured == sizes * len(depths)
    assert engine.stats().graph_capture_seconds > 0


def test_graphs_used_longest_ago_go_and_return(graphs: MakeEngine, solo: Solo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of too many graphs those used longest ago go, and come again when they are needed."""
    # A single run needs more of them than are kept here.
    monkeypatch.setattr(cuda_graph, "MAX_GRAPHS", 2)
    engine, captured = graphs(max_num_seqs=8, num_scheduler_steps=40), []
    assert isinstance(engine.executor, GraphExecutor)
    for policy in (D3(0.9, 0.5), FullDepth(), FullDepth(), D3(0.9, 0.5)):
        request = Request((5, 6, 7), greedy(policy, 40))
        assert_same(engine.generate([5, 6, 7], request.params, use_tqdm=False)[0], solo(request))
        assert len(engine.executor._graphs) <= 2
        captured.append(engine.stats().graphs_captured)
    assert captured[0] > 2
    assert captured[1] == captured[2] < captured[3]


def test_batch_sizes_reach_what_is_asked_and_waste_little() -> None:
    for most in (1, 2, 3, 5, 8, 64, 65, 300):
        sizes = batch_sizes(most)
        assert sizes == sorted(set(sizes))
        assert most <= sizes[-1]
        assert len(sizes) == 1 or sizes[-2] < most
        for rows in range(1, most + 1):
            assert next(size for size in sizes if size >= rows) <= max(2 * rows, rows + 31)


def test_run_ends_where_rows_leave_their_order() -> None:
    """A run ends where the rows of a layer would no longer come first."""
    # Rows of two schedules: the first is deeper at once and sleeps sooner.
    table = RunningTable(2, 3, 32)
    cutoffs = np.array([[100, 100, 6], [100, 100, 9]])
    table.cutoffs[:] = cutoffs
    table.num_tokens[:], table.max_length[:] = [8, 3], 30
    steps = np.array([3, 1])
    starts = table.num_tokens - 1
    chunks = Chunks(np.arange(2), starts, starts + 1, steps, steps[:, None] < cutoffs, traits=0)

    def found(limit: int = 16, *capabilities: Any) -> tuple[int, SamplingMode, bool] | None:
        """The steps of a run, how it chooses, and whether the host takes its steps one by one."""
        run = run_ahead(chunks, table, limit, ExecutorCapabilities(*capabilities))
        return None if run is None else (run.num_steps, run.choice, run.control is not None)

    assert found() == (3, GREEDY, False)  # at steps 6 and 4 the second row alone runs layer 2
    table.cutoffs[1] = cutoffs[0]
    assert found() == (3, GREEDY, False)
    chunks = chunks.deepest_first()
    assert chunks.steps.tolist() == [1, 3], "both are at one depth, so the younger comes first"
    assert found() == (16, GREEDY, False)
    table.max_length[1] = 7
    assert found() == (4, GREEDY, False)
    chunks = replace(chunks, traits=Trait.STREAMS)
    assert found() == (4, GREEDY, True)
    table.choice[1] = SamplingMode.PENALISE
    assert found() == (4, SamplingMode.PENALISE, True)
    table.choice[1] = REPORT
    assert found() is None
    for logits, most in ((0, 1), (3, 3), (100, 4)):  # rows of logits in one run
        assert found(16, REPORT, logits) == (most, REPORT, most > 1)
    table.choice[0] = REPORT
    assert found(16, REPORT, 3) == (1, REPORT, False), "two rows of logits at each step"
    table.choice[1] = SamplingMode.HOST
    assert found(16, REPORT) is None
    assert found(0) is None


def test_steps_of_the_scheduler_are_refused_without_graphs(make_engine: MakeEngine) -> None:
    for steps in (0, 257, 2.5, True):
        with pytest.raises(InvalidValueError, match="num_scheduler_steps"):
            make_engine(num_scheduler_steps=steps)
    with pytest.raises(InvalidValueError, match=r"num_scheduler_steps must be 1 without CUDA graphs.*; got 4"):
        make_engine(num_scheduler_steps=4, enforce_eager=True)
    assert make_engine(num_scheduler_steps=1, enforce_eager=True).stats().graph_steps == 0


def test_an_engine_that_must_be_eager_captures_nothing(multi_step: MakeEngine, make_engine: MakeEngine) -> None:
    engine = make_engine(enforce_eager=True)
    engine.generate([1, 2, 3], greedy(UnifiedSkip(2), 5), use_tqdm=False)
    assert not isinstance(engine.executor, GraphExecutor)
    assert (engine.stats().graphs_captured, steps_by_itself(engine)) == (0, 0)
