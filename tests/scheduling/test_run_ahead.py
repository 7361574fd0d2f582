"""A device that takes several steps by itself gives the tokens that it gives when the host looks at each.

The graph executor runs here without graphs: its steps are called again instead of replayed, on the same memory and with
no number from the host in between. What only a GPU can show is in `tests/gpu`.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batches import (
    BLOCK,
    CONFIG,
    LAYERS,
    POLICIES,
    Request,
    assert_same,
    block_bytes,
    kv_is_back,
    run_together,
    some_requests,
    wide,
)

from d3engine import (
    D3,
    Engine,
    FullDepth,
    InvalidValueError,
    Lossless,
    SamplingParams,
    SelfSpeculative,
    UnifiedSkip,
    Waves,
)
from d3engine.depth import DepthPolicy
from d3engine.executor.cuda_graph import GraphExecutor, batch_sizes
from d3engine.loading import settings
from d3engine.model.config import ModelConfig
from d3engine.model.weights import random_weights
from d3engine.plan import Plan
from d3engine.request.choice import Choice
from d3engine.request.outputs import RequestOutput
from d3engine.request.params import RequestOutputKind
from d3engine.sampling.sampler import FAULT
from d3engine.scheduling.chunks import Chunks
from d3engine.scheduling.run_ahead import run_ahead
from d3engine.scheduling.running import RunningTable

# Their rows can share a run as soon as none has a layer awake above one that sleeps for a deeper row.
NESTED: list[DepthPolicy] = [FullDepth(), D3(0.9, 0.5), D3(0.8, 0.3), D3(0.7, 0.2), D3(0.9, 0.2)]
PLAIN: dict[str, Any] = {
    "n": 1,
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
Solo = Callable[[Request], RequestOutput]


@pytest.fixture
def ahead(make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """`make_engine`, with the executor that decodes by itself."""
    monkeypatch.setattr(settings, "runs_in_graphs", lambda device, enforce_eager: not enforce_eager)

    def make(**changes: Any) -> Engine:
        engine = make_engine(**changes)
        assert isinstance(engine.executor, GraphExecutor)
        return engine

    return make


def greedy(policy: DepthPolicy, max_tokens: int = 20, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, depth=policy, **changes)


def unread(params: SamplingParams) -> SamplingParams:
    """The same for a request that nobody reads along, as in generate()."""
    return replace(params, output_kind=RequestOutputKind.FINAL_ONLY)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_generate_answers_as_step_by_step(ahead: Callable[..., Engine], solo: Solo, policy: DepthPolicy) -> None:
    requests = [Request(tuple(range(30 + n, 33 + 3 * n)), greedy(policy, 10 + 5 * n)) for n in range(4)]
    engine = ahead()
    outputs = engine.generate([list(r.prompt) for r in requests], [r.params for r in requests], use_tqdm=False)
    for output, request in zip(outputs, requests, strict=True):
        assert_same(output, solo(request))
    stats = engine.stats()
    schedule = policy.schedule(LAYERS)
    runs = schedule.is_nested and schedule.on_skip == "none"
    assert (stats.graph_steps > 20) == runs
    assert stats.generated_tokens == sum(request.params.max_tokens for request in requests)
    assert kv_is_back(engine)


DRAFTING: list[DepthPolicy] = [Lossless(D3(0.9, 0.5), 3), SelfSpeculative(UnifiedSkip(2), 2)]


@pytest.mark.parametrize("policy", DRAFTING, ids=repr)
def test_drafts_and_verifications_are_launched_by_the_host(
    ahead: Callable[..., Engine], solo: Solo, policy: DepthPolicy
) -> None:
    """And whoever shares their steps; as soon as nobody drafts any more, the device goes on by itself."""
    requests = [Request(tuple(range(30, 37)), greedy(policy, 9)), Request(tuple(range(9)), greedy(D3(0.9, 0.5), 50))]
    engine = ahead()
    assert_same(engine.generate(list(requests[0].prompt), requests[0].params, use_tqdm=False)[0], solo(requests[0]))
    assert engine.stats().graph_steps == 0
    outputs = engine.generate([list(r.prompt) for r in requests], [r.params for r in requests], use_tqdm=False)
    for output, request in zip(outputs, requests, strict=True):
        assert_same(output, solo(request))
    assert 10 < engine.stats().graph_steps < 50
    assert engine.stats().verifications >= 4


@pytest.mark.parametrize("num_scheduler_steps", [1, 3, 16])
def test_mixed_schedules_share_a_run_while_their_rows_stay_in_order(
    ahead: Callable[..., Engine], solo: Solo, num_scheduler_steps: int
) -> None:
    requests = [Request(tuple(range(40, 44 + n)), greedy(NESTED[n % len(NESTED)], 22 - n)) for n in range(11)]
    engine = ahead(max_num_seqs=5, num_scheduler_steps=num_scheduler_steps)
    outputs = engine.generate([list(r.prompt) for r in requests], [r.params for r in requests], use_tqdm=False)
    for output, request in zip(outputs, requests, strict=True):
        assert_same(output, solo(request))
    assert engine.stats().graph_steps > 10


@pytest.mark.parametrize("policy", [D3(0.9, 0.5), D3(0.8, 0.3), D3(0.7, 0.2)], ids=repr)
def test_rows_of_one_schedule_share_a_run_at_whatever_ages(
    ahead: Callable[..., Engine], solo: Solo, policy: DepthPolicy
) -> None:
    """Those that have come later stay deeper for longer, also where all are at one depth when a run begins."""
    requests = [Request(tuple(range(40 + n, 56 + n)), greedy(policy, 22)) for n in range(5)]
    engine = ahead(max_num_batched_tokens=16, enable_prefix_caching=False)
    outputs = engine.generate([list(r.prompt) for r in requests], [r.params for r in requests], use_tqdm=False)
    for output, request in zip(outputs, requests, strict=True):
        assert_same(output, solo(request))
    stats = engine.stats()
    assert stats.graph_steps > 20 > stats.eager_steps


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("changes", [{}, {"max_num_batched_tokens": 8}, {"admission": Waves(5)}], ids=repr)
def test_requests_of_every_kind_answer_as_alone(
    ahead: Callable[..., Engine], solo: Solo, seed: int, changes: dict[str, Any]
) -> None:
    """Also those that a device cannot choose for (with log-probabilities, say), which make the host look."""
    plain = {"temperature": 0.0, "logprobs": None, "prompt_logprobs": None}
    requests = some_requests(seed + 70, 4, max_tokens=5)
    longer = {"n": 1, "max_tokens": 20, "ignore_eos": True, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    for nth, request in enumerate(some_requests(seed + 90, 9, **longer)):
        requests.append(replace(request, params=replace(request.params, depth=NESTED[nth % 5], **plain)))
    engine = ahead(max_num_seqs=7, **changes)
    for nth, request in enumerate(requests):
        engine.add_request(str(nth), list(request.prompt), unread(request.params), request.priority)
    done: dict[int, RequestOutput] = {}
    while engine.has_unfinished_requests():
        done |= {int(output.request_id): output for output in engine.step()}
        engine.scheduler.check_integrity()
    for nth, request in enumerate(requests):
        assert_same(done[nth], solo(request))
    assert engine.stats().graph_steps > 0
    assert kv_is_back(engine)


ASKED: dict[str, list[dict[str, Any]]] = {
    "draws": [{"temperature": 0.8}, {"temperature": 3.0}, {"temperature": 0.0}, {"temperature": 1e-38}],
    "cuts": [{"temperature": 2.0, "top_p": 0.8}, {"temperature": 3.0, "top_k": 5}, {"temperature": 2.0, "min_p": 0.1}],
    "penalties": [
        {"temperature": 2.0, "repetition_penalty": 1.5},
        {"temperature": 0.0, "frequency_penalty": 1.9, "presence_penalty": 1.5},
        {"temperature": 1.0, "top_k": 9, "presence_penalty": -1.0},
    ],
}
ASKED["all of them"] = [kind[n] for n, kind in enumerate(ASKED.values())] + [{"temperature": 0.0}]


@pytest.mark.parametrize("asked", ASKED)
def test_the_device_draws_what_the_host_draws(ahead: Callable[..., Engine], solo: Solo, asked: str) -> None:
    requests = [
        Request(tuple(range(60, 64 + n)), replace(greedy(D3(0.9, 0.5), 20 - n), seed=n, **kind))
        for n, kind in enumerate(ASKED[asked])
    ]
    requests = [
        replace(request, params=replace(request.params, n=1 if request.params.greedy else 2)) for request in requests
    ]
    engine = ahead(num_scheduler_steps=7)
    outputs = engine.generate([list(r.prompt) for r in requests], [r.params for r in requests], use_tqdm=False)
    for output, request in zip(outputs, requests, strict=True):
        assert_same(output, solo(request))
    stats = engine.stats()
    assert stats.graph_steps > 15
    assert stats.eager_steps <= 3, "only prompts need the host"
    answers = {tuple(output.outputs[0].token_ids) for output in outputs}
    plain = [solo(replace(r, params=replace(r.params, **PLAIN))).outputs[0].token_ids for r in requests]
    assert answers.isdisjoint(tuple(tokens) for tokens, kind in zip(plain, ASKED[asked], strict=True) if len(kind) > 1)


@pytest.mark.parametrize("seed", range(2))
def test_those_who_stream_get_one_token_a_step_and_the_same_answers(
    ahead: Callable[..., Engine], solo: Solo, seed: int
) -> None:
    requests = some_requests(seed + 80, 10, temperature=0.0, logprobs=None, prompt_logprobs=None, depth=D3(0.9, 0.5))
    engine = ahead(max_num_seqs=7)
    lengths: dict[tuple[str, int], int] = {}

    def nobody_jumps(engine: Engine) -> None:
        for sequence in engine.scheduler.running:
            key = (sequence.request_id, sequence.index)
            assert sequence.step - lengths.get(key, 0) in (0, 1)
            lengths[key] = sequence.step

    done = run_together(engine, requests, random.Random(seed), before_step=nobody_jumps)
    for nth, request in enumerate(requests):
        assert_same(done[nth], solo(request))
    assert engine.stats().graph_steps > 5


@pytest.mark.parametrize("seed", range(2))
def test_preemption_and_short_memory_change_nothing(ahead: Callable[..., Engine], solo: Solo, seed: int) -> None:
    numbers = random.Random(seed)
    requests = [
        Request(tuple(numbers.randrange(300) for _ in range(numbers.randint(1, 20))), greedy(NESTED[n % 5]))
        for n in range(9)
    ]
    blocks = LAYERS * -(-46 // BLOCK)
    engine = ahead(kv_cache_memory_bytes=blocks * block_bytes(), max_num_batched_tokens=24)
    ids = [str(n) for n in range(len(requests))]
    for request_id, request in zip(ids, requests, strict=True):
        engine.add_request(request_id, list(request.prompt), unread(request.params))
    done: dict[int, RequestOutput] = {}
    while engine.has_unfinished_requests():
        for sequence in engine.scheduler.running:
            if numbers.random() < 0.1:
                engine.scheduler._preempt(sequence)
        done |= {int(output.request_id): output for output in engine.step()}
        engine.scheduler.check_integrity()
    for nth, request in enumerate(requests):
        assert_same(done[nth], solo(request))
    assert engine.stats().num_preemptions > 5
    assert engine.stats().graph_steps > 20


def test_a_run_that_the_memory_has_no_room_for_is_a_single_step(ahead: Callable[..., Engine], solo: Solo) -> None:
    """Nobody waits here, and nobody is sent away before the next step itself lacks a block."""
    requests = [Request(tuple(range(n, n + 4)), greedy(FullDepth(), 36)) for n in (20, 40)]
    engine = ahead(kv_cache_memory_bytes=LAYERS * 12 * block_bytes(), enable_prefix_caching=False)
    outputs = engine.generate([list(r.prompt) for r in requests], [r.params for r in requests], use_tqdm=False)
    for output, request in zip(outputs, requests, strict=True):
        assert_same(output, solo(request))
    stats = engine.stats()
    assert stats.num_preemptions == 1
    assert stats.graph_steps > 40


def test_who_waits_while_there_is_a_place_is_not_kept_waiting_by_a_run(ahead: Callable[..., Engine]) -> None:
    engine = ahead(admission=Waves(12), num_scheduler_steps=16)

    def add(name: str) -> None:
        engine.add_request(name, [1, 2, 3], unread(greedy(FullDepth(), 40)))

    add("first")
    engine.step()
    before = engine.stats().graph_steps
    engine.step()
    assert engine.stats().graph_steps == before + 16
    add("second")
    waited = 0
    while engine.scheduler.num_waiting:
        before = engine.stats().graph_steps
        engine.step()
        waited += engine.stats().graph_steps - before
        assert engine.stats().graph_steps <= before + 1
    assert 0 < waited < 12


def test_rope_that_grows_with_the_sequence_is_known_on_the_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Answers that outgrow the trained length, beside some that have outgrown it with their prompts."""

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
    monkeypatch.setattr(settings, "runs_in_graphs", lambda device, enforce_eager: True)
    engine = make(**grown)
    for found, other in zip(engine.generate(prompts, params, use_tqdm=False), wanted, strict=True):
        assert_same(found, other)
    assert engine.stats().graph_steps > 20
    for prompt, tokens, other in zip(prompts, fixed, wanted, strict=False):
        same = 16 - len(prompt) + 1
        assert tokens[:same] == other.outputs[0].token_ids[:same]
        assert tokens != other.outputs[0].token_ids, "that the rope has grown is to be seen"


def test_an_answer_ends_at_its_stop_token_in_the_middle_of_a_run(ahead: Callable[..., Engine], solo: Solo) -> None:
    prompt = tuple(range(50, 60))
    whole = solo(Request(prompt, greedy(D3(0.9, 0.5)))).outputs[0].token_ids
    stop = next(token for place, token in enumerate(whole) if place > 4 and token not in whole[:place])
    neighbour = Request(tuple(range(9)), greedy(FullDepth()))
    params = greedy(D3(0.9, 0.5), stop_token_ids=[stop])
    engine = ahead()
    found, beside = engine.generate([list(prompt), list(neighbour.prompt)], [params, neighbour.params], use_tqdm=False)
    assert found.outputs[0].token_ids == whole[: whole.index(stop) + 1]
    assert (found.outputs[0].finish_reason, found.outputs[0].stop_reason) == ("stop", stop)
    assert len(found.outputs[0].depths) == len(found.outputs[0].token_ids)
    assert_same(beside, solo(neighbour))
    assert engine.stats().generated_tokens == len(found.outputs[0].token_ids) + 20


def test_an_answer_ends_at_its_stop_string_in_the_middle_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = "Question: Nina has 23 marbles. Nina loses 11 of them. How many marbles does Nina have now?\nAnswer:"
    params = SamplingParams(temperature=0, max_tokens=40, stop=["23 - 11"])
    plain = Engine("demo", device="cpu").generate(prompt, params, use_tqdm=False)[0].outputs[0]
    assert (plain.finish_reason, plain.stop_reason) == ("stop", "23 - 11")
    monkeypatch.setattr(settings, "runs_in_graphs", lambda device, enforce_eager: True)
    engine = Engine("demo", device="cpu")
    found = engine.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    assert (found.text, found.token_ids, found.depths) == (plain.text, plain.token_ids, plain.depths)
    assert (found.finish_reason, found.stop_reason) == ("stop", "23 - 11")
    assert engine.stats().graph_steps > len(found.token_ids), "the run was to go on beyond the stop"
    assert engine.stats().kv_blocks_in_use == 0


def test_a_row_whose_logits_are_not_finite_ends_alone_with_the_tokens_it_had(
    ahead: Callable[..., Engine], solo: Solo
) -> None:
    prompt, beside = tuple(range(50, 60)), Request(tuple(range(9)), greedy(D3(0.8, 0.3)))
    whole = solo(Request(prompt, greedy(FullDepth()))).outputs[0].token_ids
    others = {*prompt, *beside.prompt, *solo(beside).outputs[0].token_ids}
    place = next(n for n, token in enumerate(whole) if n > 2 and token not in {*others, *whole[:n]})
    engine = ahead()
    embedding = engine.executor._model.weights.embedding
    before = embedding[whole[place]].clone()
    embedding[whole[place]] = math.nan
    try:
        found, healthy = engine.generate(
            [list(prompt), list(beside.prompt)], [greedy(FullDepth()), beside.params], use_tqdm=False
        )
    finally:
        embedding[whole[place]] = before
    assert found.outputs[0].token_ids == whole[: place + 1]
    assert (found.outputs[0].finish_reason, found.outputs[0].stop_reason) == ("abort", FAULT)
    assert_same(healthy, solo(beside))
    assert kv_is_back(engine)


def test_what_the_host_writes_between_the_steps_of_a_run_is_not_read(ahead: Callable[..., Engine], solo: Solo) -> None:
    """The proof that a step takes nothing from the host: all that the host knows is spoilt after the first."""
    request = Request(tuple(range(50, 60)), greedy(D3(0.9, 0.5)))
    engine = ahead()
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
    assert engine.stats().graph_steps == 19


def _all_anew(executor: GraphExecutor, plan: Plan) -> bool:
    executor._tables._tensor.copy_(torch.from_numpy(plan.tables))
    return True


def test_a_graph_is_captured_once_for_each_depth_and_size(ahead: Callable[..., Engine]) -> None:
    engine = ahead(max_num_seqs=8)
    params = greedy(D3(0.9, 0.5), 40)
    depths = {int(depth) for depth in D3(0.9, 0.5).schedule(LAYERS).depths(40)[1:]}
    for batch, sizes in ((1, 1), (1, 1), (3, 2), (4, 2), (5, 3)):
        engine.generate([[n, n + 1] for n in range(batch)], params, use_tqdm=False)
        assert engine.stats().graphs_captured == sizes * len(depths)
    assert engine.stats().graph_capture_seconds > 0


def test_batch_sizes_reach_what_is_asked_and_waste_little() -> None:
    for most in (1, 2, 3, 5, 8, 64, 65, 300):
        sizes = batch_sizes(most)
        assert sizes == sorted(set(sizes))
        assert most <= sizes[-1]
        assert len(sizes) == 1 or sizes[-2] < most
        for rows in range(1, most + 1):
            assert next(size for size in sizes if size >= rows) <= max(2 * rows, rows + 31)


def test_a_run_ends_where_the_rows_of_a_layer_would_no_longer_come_first() -> None:
    """Rows of two schedules: the first is deeper at once and sleeps sooner."""
    table = RunningTable(2, 3, 32)
    cutoffs = np.array([[100, 100, 6], [100, 100, 9]])
    table.cutoffs[:] = cutoffs
    table.num_tokens[:], table.max_length[:] = [8, 3], 30
    steps = np.array([3, 1])
    starts = table.num_tokens - 1
    chunks = Chunks(np.arange(2), starts, starts + 1, steps, steps[:, None] < cutoffs)
    found = run_ahead(chunks, table, 16)
    assert found is not None
    assert found.num_steps == 3  # at steps 6 and 4 the second row alone runs layer 2
    table.cutoffs[1] = cutoffs[0]
    older_first = run_ahead(chunks, table, 16)
    assert older_first is not None
    assert older_first.num_steps == 3
    chunks = chunks.deepest_first()
    assert chunks.steps.tolist() == [1, 3], "both are at one depth, so the younger comes first"
    alike = run_ahead(chunks, table, 16)
    assert alike is not None
    assert alike.num_steps == 16
    table.max_length[1] = 7
    short = run_ahead(chunks, table, 16)
    assert short is not None
    assert short.num_steps == 4
    table.streams[0] = True
    streamed = run_ahead(chunks, table, 16)
    assert streamed is not None
    assert streamed.num_steps == 1
    table.choice[1] = Choice.PENALISE
    penalised = run_ahead(chunks, table, 16)
    assert penalised is not None
    assert (streamed.choice, penalised.choice) == (Choice.GREEDY, Choice.PENALISE)
    table.choice[1] = Choice.HOST
    assert run_ahead(chunks, table, 16) is None
    assert run_ahead(chunks, table, 0) is None


def test_steps_of_the_scheduler_are_refused_without_graphs(make_engine: Callable[..., Engine]) -> None:
    for steps in (0, 257, 2.5, True):
        with pytest.raises(InvalidValueError, match="num_scheduler_steps"):
            make_engine(num_scheduler_steps=steps)
    with pytest.raises(InvalidValueError, match=r"num_scheduler_steps must be 1 without CUDA graphs.*; got 4"):
        make_engine(num_scheduler_steps=4)
    assert make_engine(num_scheduler_steps=1).stats().graph_steps == 0


def test_an_engine_that_must_be_eager_captures_nothing(
    ahead: Callable[..., Engine], make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(enforce_eager=True)
    engine.generate([1, 2, 3], greedy(UnifiedSkip(2), 5), use_tqdm=False)
    assert not isinstance(engine.executor, GraphExecutor)
    assert (engine.stats().graphs_captured, engine.stats().graph_steps) == (0, 0)
