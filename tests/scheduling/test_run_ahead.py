"""A device that takes several steps by itself gives the tokens that it gives when the host looks at each."""

import random
from dataclasses import replace
from typing import Any

import pytest
from batches import (
    BLOCK,
    LAYERS,
    POLICIES,
    Request,
    assert_same,
    block_bytes,
    generate_as_alone,
    kv_is_back,
    preempting,
    run_together,
    some_requests,
    step_as_alone,
)
from fixture_types import MakeEngine
from multi_step import NESTED, PLAIN, Solo, greedy, steps_by_itself, unread

from d3engine import D3, DraftAndVerify, Engine, IntervalAdmission, Lossless, SelfSpeculative, UnifiedSkip
from d3engine.depth import DepthPolicy, Nested


@pytest.mark.parametrize("policy", [*POLICIES, Nested(0.8, [(1, 3), (4, 5), (3, 4)])], ids=repr)
def test_generate_answers_as_step_by_step(multi_step: MakeEngine, solo: Solo, policy: DepthPolicy) -> None:
    requests = [Request(tuple(range(30 + n, 33 + 3 * n)), greedy(policy, 10 + 5 * n)) for n in (0, 3)]
    engine = multi_step()
    generate_as_alone(engine, requests, solo)
    stats = engine.stats()
    schedule = policy.schedule(LAYERS)
    runs = schedule.is_nested and schedule.on_skip == "none"
    assert steps_by_itself(engine) > 20 if runs else stats.graph_steps == 0
    assert stats.generated_tokens == sum(request.params.max_tokens for request in requests)
    assert kv_is_back(engine)


DRAFTING: list[DepthPolicy] = [
    Lossless(D3(0.9, 0.5), 3),
    SelfSpeculative(UnifiedSkip(2), 2),
    DraftAndVerify([2, 4], [3], 3, 0.0, None),
]


@pytest.mark.parametrize("policy", DRAFTING, ids=repr)
def test_drafts_and_verifications_are_launched_by_the_host(
    multi_step: MakeEngine, solo: Solo, policy: DepthPolicy
) -> None:
    """And whoever shares their steps; as soon as nobody drafts any more, the device goes on by itself."""
    requests = [Request(tuple(range(30, 37)), greedy(policy, 9)), Request(tuple(range(9)), greedy(D3(0.9, 0.5), 50))]
    engine = multi_step()
    assert_same(engine.generate(list(requests[0].prompt), requests[0].params, use_tqdm=False)[0], solo(requests[0]))
    assert engine.stats().graph_steps == 0
    generate_as_alone(engine, requests, solo)
    assert steps_by_itself(engine) > 10
    assert engine.stats().graph_steps < 50
    assert engine.stats().verifications >= 4


@pytest.mark.parametrize("num_scheduler_steps", [1, 3, 16])
def test_mixed_schedules_in_order_share_a_run(multi_step: MakeEngine, solo: Solo, num_scheduler_steps: int) -> None:
    """Mixed schedules share a run while their rows stay in order."""
    requests = [Request(tuple(range(40, 44 + n)), greedy(NESTED[n % len(NESTED)], 22 - n)) for n in range(11)]
    engine = multi_step(max_num_seqs=5, num_scheduler_steps=num_scheduler_steps)
    generate_as_alone(engine, requests, solo)
    assert steps_by_itself(engine) > 10


@pytest.mark.parametrize("policy", [D3(0.9, 0.5), D3(0.8, 0.3), D3(0.7, 0.2)], ids=repr)
def test_rows_of_one_schedule_share_a_run_at_any_age(multi_step: MakeEngine, solo: Solo, policy: DepthPolicy) -> None:
    """Those that have come later stay deeper for longer, also where all are at one depth when a run begins."""
    requests = [Request(tuple(range(40 + n, 56 + n)), greedy(policy, 22)) for n in range(5)]
    engine = multi_step(max_num_batched_tokens=16, enable_prefix_caching=False)
    generate_as_alone(engine, requests, solo)
    stats = engine.stats()
    assert steps_by_itself(engine) > 20 > stats.eager_steps


@pytest.mark.parametrize(
    ("changes", "seed"),
    [({}, 0), ({"max_num_batched_tokens": 8}, 1), ({"admission": IntervalAdmission(5)}, 0)],
    ids=repr,
)
def test_requests_of_any_kind_are_as_alone(
    multi_step: MakeEngine, solo: Solo, seed: int, changes: dict[str, Any]
) -> None:
    """Also those that a device cannot choose for (with log-probabilities, say), which make the host look."""
    plain = {"temperature": 0.0, "logprobs": None, "prompt_logprobs": None}
    requests = some_requests(seed + 70, 4, max_tokens=5)
    longer = {"n": 1, "max_tokens": 20, "ignore_eos": True, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    for nth, request in enumerate(some_requests(seed + 90, 9, **longer)):
        requests.append(replace(request, params=replace(request.params, depth=NESTED[nth % 5], **plain)))
    engine = multi_step(max_num_seqs=7, **changes)
    step_as_alone(engine, requests, solo, [unread(request.params) for request in requests])
    assert steps_by_itself(engine) > 0
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
def test_the_device_draws_what_the_host_draws(multi_step: MakeEngine, solo: Solo, asked: str) -> None:
    requests = [
        Request(tuple(range(60, 64 + n)), replace(greedy(D3(0.9, 0.5), 20 - n), seed=n, **kind))
        for n, kind in enumerate(ASKED[asked])
    ]
    requests = [replace(one, params=replace(one.params, n=1 if one.params.greedy else 2)) for one in requests]
    engine = multi_step(num_scheduler_steps=7)
    outputs = generate_as_alone(engine, requests, solo)
    stats = engine.stats()
    assert steps_by_itself(engine) > 15
    assert stats.eager_steps <= 3, "only prompts need the host"
    answers = {tuple(output.outputs[0].token_ids) for output in outputs}
    plain = [solo(replace(r, params=replace(r.params, **PLAIN))).outputs[0].token_ids for r in requests]
    assert answers.isdisjoint(tuple(tokens) for tokens, kind in zip(plain, ASKED[asked], strict=True) if len(kind) > 1)


@pytest.mark.parametrize("seed", range(2))
def test_streams_get_one_token_a_step_and_the_same_answers(multi_step: MakeEngine, solo: Solo, seed: int) -> None:
    """Streams get one token a step and the same answers."""
    requests = some_requests(seed + 80, 10, temperature=0.0, logprobs=None, prompt_logprobs=None, depth=D3(0.9, 0.5))
    engine = multi_step(max_num_seqs=7)
    lengths: dict[tuple[str, int], int] = {}

    def nobody_jumps(engine: Engine) -> None:
        for sequence in engine.scheduler.running:
            key = (sequence.request_id, sequence.index)
            assert sequence.step - lengths.get(key, 0) in (0, 1)
            lengths[key] = sequence.step

    done = run_together(engine, requests, random.Random(seed), before_step=nobody_jumps)
    for nth, request in enumerate(requests):
        assert_same(done[nth], solo(request))
    assert steps_by_itself(engine) > 5


@pytest.mark.parametrize("seed", range(2))
def test_preemption_and_short_memory_change_nothing(multi_step: MakeEngine, solo: Solo, seed: int) -> None:
    numbers = random.Random(seed)
    requests = [
        Request(tuple(numbers.randrange(300) for _ in range(numbers.randint(1, 20))), greedy(NESTED[n % 5]))
        for n in range(9)
    ]
    blocks = LAYERS * -(-46 // BLOCK)
    engine = multi_step(kv_cache_memory_bytes=blocks * block_bytes(), max_num_batched_tokens=24)
    step_as_alone(engine, requests, solo, [unread(request.params) for request in requests], preempting(numbers, 0.1))
    assert engine.stats().num_preemptions > 5
    assert steps_by_itself(engine) > 20
