"""What a request answers does not depend on who shares its batch, nor on how the engine cut and repeated its work."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batches import (
    BLOCK,
    LAYERS,
    MAX_LENGTH,
    POLICIES,
    WAKING,
    Request,
    assert_same,
    block_bytes,
    kv_is_back,
    preempting,
    run_together,
    some_requests,
)

from d3engine import D3, EarlyExit, Engine, FullDepth, Immediate, IntervalAdmission, LayerTable, SamplingParams
from d3engine.depth import DepthPolicy
from d3engine.request.outputs import CompletionOutput, RequestOutput


def test_every_policy_answers_otherwise_than_full_depth_so_equal_answers_mean_something(
    solo: Callable[[Request], RequestOutput],
) -> None:
    prompt = tuple(range(20, 32))
    answers: dict[tuple[int, ...], list[DepthPolicy]] = {}
    for policy in POLICIES:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, depth=policy)
        answers.setdefault(tuple(solo(Request(prompt, params)).outputs[0].token_ids), []).append(policy)
    assert all(len(set(tokens)) > 12 for tokens in answers), "an answer that repeats itself would prove little"
    together = [group for group in answers.values() if FullDepth() in group]
    assert together == [[FullDepth()]]
    assert len(answers) >= 9  # on_skip makes no difference to a nested schedule, and to the others it does
    nested = [D3(0.9, 0.5), D3(0.9, 0.5, on_skip="copy")]
    assert sum(all(policy in group for policy in nested) for group in answers.values()) == 1
    woken = [LayerTable(WAKING, on_skip="copy"), LayerTable(WAKING, on_skip="project")]
    assert not any(all(policy in group for policy in woken) for group in answers.values())
    exits = [EarlyExit(0.9), EarlyExit(0.9, on_skip="copy")]
    assert not any(all(policy in group for policy in exits) for group in answers.values())


@pytest.mark.parametrize(("rows", "seed"), [(4, 0), (9, 1), (512, 2)])
def test_a_request_answers_as_alone_whoever_comes_beside_it_and_however_prompts_are_cut(
    make_engine: Callable[..., Engine], solo: Callable[[Request], RequestOutput], seed: int, rows: int
) -> None:
    requests = some_requests(seed, 15)
    engine = make_engine(max_num_batched_tokens=rows, max_num_seqs=min(rows, 7))
    done = run_together(engine, requests, random.Random(seed))
    for nth, request in enumerate(requests):
        assert_same(done[nth], solo(request))
    stats = engine.stats()
    assert stats.cached_prompt_tokens > 0
    assert kv_is_back(engine)


@pytest.mark.parametrize("seed", range(2))
def test_a_request_answers_as_alone_when_memory_is_so_short_that_others_push_it_out(
    make_engine: Callable[..., Engine], solo: Callable[[Request], RequestOutput], seed: int
) -> None:
    requests = some_requests(seed, 12)
    blocks = LAYERS * -(-46 // BLOCK)  # one of them at most, and a little more
    engine = make_engine(kv_cache_memory_bytes=blocks * block_bytes(), max_num_batched_tokens=24)
    done = run_together(engine, requests, random.Random(seed))
    for nth, request in enumerate(requests):
        assert_same(done[nth], solo(request))
    assert engine.stats().num_preemptions > 0
    assert sum(output.metrics.num_preemptions for output in done.values()) == engine.stats().num_preemptions
    assert kv_is_back(engine)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_request_answers_as_alone_although_it_is_preempted_after_every_single_token(
    make_engine: Callable[..., Engine], solo: Callable[[Request], RequestOutput], policy: DepthPolicy
) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=11, ignore_eos=True, depth=policy, logprobs=1)
    drawn = SamplingParams(temperature=2.0, seed=5, max_tokens=9, ignore_eos=True, depth=policy)
    requests = [Request(tuple(range(40, 49)), greedy), Request(tuple(range(40, 46)), drawn)]
    engine = make_engine()
    steps: dict[str, int] = {}

    def preempt_everybody(engine: Engine) -> None:
        """Each as soon as it has a new token: more often, and a replay of several pieces would never end."""
        for sequence in engine.scheduler.running:
            if sequence.step > steps.get(sequence.request_id, 0):
                steps[sequence.request_id] = sequence.step
                engine.scheduler._preempt(sequence)

    done = run_together(engine, requests, random.Random(1), before_step=preempt_everybody)
    for nth, request in enumerate(requests):
        assert_same(done[nth], solo(request))
    assert engine.stats().num_preemptions == 10 + 8


@pytest.mark.parametrize("seed", range(2))
def test_a_request_answers_as_alone_while_random_sequences_are_preempted_and_the_prefix_cache_is_reset(
    make_engine: Callable[..., Engine], solo: Callable[[Request], RequestOutput], seed: int
) -> None:
    requests = some_requests(seed, 12)
    numbers = random.Random(seed)

    def disturb(engine: Engine) -> None:
        preempting(numbers, 0.12)(engine)
        if numbers.random() < 0.05:
            engine.reset_prefix_cache()

    engine = make_engine(max_num_batched_tokens=20)
    done = run_together(engine, requests, random.Random(seed), before_step=disturb)
    for nth, request in enumerate(requests):
        assert_same(done[nth], solo(request))
    assert engine.stats().num_preemptions > 10


def test_a_request_answers_as_alone_while_its_neighbours_are_aborted(
    make_engine: Callable[..., Engine], solo: Callable[[Request], RequestOutput]
) -> None:
    requests = some_requests(1, 15)
    numbers = random.Random(4)
    aborted: set[str] = set()

    def abort_odd_ones(engine: Engine) -> None:
        for request in {sequence.request_id for sequence in engine.scheduler.running}:
            if int(request) % 2 and numbers.random() < 0.3:
                aborted.add(request)
                engine.abort_request(request)

    engine = make_engine()
    done = run_together(engine, requests, random.Random(2), before_step=abort_odd_ones)
    assert len(aborted) >= 4
    for nth, request in enumerate(requests):
        wanted = solo(request)
        if str(nth) not in aborted:
            assert_same(done[nth], wanted)
            continue
        for one, other in zip(done[nth].outputs, wanted.outputs, strict=True):
            assert one.token_ids == other.token_ids[: len(one.token_ids)]
            assert one.finish_reason in ("abort", other.finish_reason)
    assert kv_is_back(engine)


@pytest.mark.parametrize("waves", [Immediate(), IntervalAdmission(5)], ids=repr)
def test_a_request_answers_as_alone_under_either_admission(
    make_engine: Callable[..., Engine], solo: Callable[[Request], RequestOutput], waves: Any
) -> None:
    requests = some_requests(2, 15)
    engine = make_engine(admission=waves, max_num_batched_tokens=16)
    done = run_together(engine, requests, random.Random(9))
    for nth, request in enumerate(requests):
        assert_same(done[nth], solo(request))


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_prefix_taken_from_the_cache_gives_the_answer_that_computing_it_gave(
    make_engine: Callable[..., Engine], solo: Callable[[Request], RequestOutput], policy: DepthPolicy
) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, depth=policy)
    first = Request(tuple(range(100, 116)), params)
    engine = make_engine()
    answers = [engine.generate(list(first.prompt), params, use_tqdm=False)[0] for _ in range(2)]
    # The next turn of a chat: the answer of a request that skipped layers is part of the new prompt.
    turn = Request((*first.prompt, *answers[0].outputs[0].token_ids, 3), params)
    next_turn = engine.generate(list(turn.prompt), params, use_tqdm=False)[0]
    assert [answers[0].num_cached_tokens, answers[1].num_cached_tokens, next_turn.num_cached_tokens] == [0, 12, 16]
    assert_same(answers[0], solo(first))
    assert_same(answers[1], solo(first))
    assert_same(next_turn, solo(turn))


def test_the_sequences_of_a_request_differ_from_each_other_and_answer_as_alone(
    make_engine: Callable[..., Engine], solo: Callable[[Request], RequestOutput]
) -> None:
    params = SamplingParams(n=4, temperature=2.0, seed=11, max_tokens=10, depth=D3(0.8, 0.3))
    request = Request(tuple(range(9)), params)
    engine = make_engine(max_num_seqs=2)  # so that they cannot even run together
    others = some_requests(50, 5, n=1)
    done = run_together(engine, [request, *others], random.Random(0))
    assert_same(done[0], solo(request))
    texts: Iterator[CompletionOutput] = iter(done[0].outputs)
    assert len({tuple(output.token_ids) for output in texts}) == 4
    assert [output.index for output in done[0].outputs] == [0, 1, 2, 3]


def test_a_request_of_lower_priority_number_overtakes_those_that_wait_and_nobody_answers_otherwise(
    make_engine: Callable[..., Engine], solo: Callable[[Request], RequestOutput]
) -> None:
    requests = [replace(request, priority=nth) for nth, request in enumerate(some_requests(60, 6, n=1, max_tokens=6))]
    engine = make_engine(max_num_seqs=1)
    order: list[int] = []
    for nth in reversed(range(6)):
        engine.add_request(str(nth), list(requests[nth].prompt), requests[nth].params, requests[nth].priority)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                order.append(int(output.request_id))
                assert_same(output, solo(requests[order[-1]]))
    assert order == [0, 1, 2, 3, 4, 5]


def test_generate_answers_a_list_of_mixed_policies_as_it_answers_each_alone(
    make_engine: Callable[..., Engine], solo: Callable[[Request], RequestOutput], tmp_path: Path
) -> None:
    requests = [
        Request(tuple(range(5, 5 + 3 * nth + 1)), SamplingParams(temperature=0, max_tokens=18, depth=policy))
        for nth, policy in enumerate(POLICIES)
        if 3 * nth + 19 < MAX_LENGTH
    ]
    engine = make_engine(max_num_seqs=16)
    outputs = engine.generate([list(r.prompt) for r in requests], [r.params for r in requests], use_tqdm=False)
    for output, request in zip(outputs, requests, strict=True):
        assert output.prompt_token_ids == list(request.prompt)
        assert_same(output, solo(request))
