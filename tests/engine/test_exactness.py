"""What a request answers does not depend on who shares its batch, nor on how the engine cut and repeated its work."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any

import pytest
from batches import (
    MAX_LENGTH,
    POLICIES,
    WAKING,
    Request,
    assert_same,
    generate_as_alone,
    kv_is_back,
    preempting,
    run_together,
    some_requests,
)
from fixture_types import MakeEngine, Solo
from kinds_of_engine import KINDS, Given, Kind, same_tokens

from d3engine import D3, EarlyExit, Engine, FullDepth, IntervalAdmission, LayerTable, SamplingParams
from d3engine.depth import DepthPolicy
from d3engine.request.outputs import CompletionOutput, RequestOutput

BeforeStep = Callable[[Engine], None]


@pytest.fixture(scope="module")
def kinds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Kind]:
    """`kinds(name)`: made once."""

    @cache
    def kind(name: str) -> Kind:
        fixtures = (request.getfixturevalue(name) for name in ("make_engine", "tiny_llama"))
        return KINDS[name](Given(*fixtures, tmp_path_factory.mktemp("kind")))

    return kind


Alone = Callable[[str, Request], RequestOutput]


@pytest.fixture(scope="module")
def alone(kinds: Callable[[str], Kind]) -> Iterator[Alone]:
    """`alone(kind, request)`: the answer of a request by itself, its prompt computed anew."""
    engines: dict[str, Engine] = {}

    def engine_of(name: str) -> Engine:
        if name not in engines:
            given = {"max_num_seqs": 4, "enable_prefix_caching": False} | (kinds(name).alone or {})
            engines[name] = kinds(name).make(**given)
        return engines[name]

    known: dict[tuple[str, str], RequestOutput] = {}

    def answer(name: str, request: Request) -> RequestOutput:
        key = name, repr(request)
        if key not in known:
            asked = kinds(name).asked_alone(request)
            with kinds(name).within():
                (known[key],) = engine_of(name).generate(
                    list(asked.prompt), asked.params, use_tqdm=False, lora_request=asked.lora
                )
        return known[key]

    yield answer
    for engine in engines.values():
        engine.close()


def nothing(numbers: random.Random) -> BeforeStep:
    return lambda engine: None


def preempt_and_forget(numbers: random.Random) -> BeforeStep:
    """Now and then, and forget the shared prompts."""
    preempt = preempting(numbers, 0.12)

    def disturb(engine: Engine) -> None:
        preempt(engine)
        if numbers.random() < 0.05:
            engine.reset_prefix_cache()

    return disturb


@dataclass(frozen=True)
class Trial:
    """Arguments of the engine, and what is done between its steps; `is_short` has memory for the largest request, and
    little more."""

    changes: dict[str, Any] = field(default_factory=dict)
    disturb: Callable[[random.Random], BeforeStep] = nothing
    is_short: bool = False
    seed: int = 0


TRIALS = {
    "4 rows": Trial({"max_num_batched_tokens": 4, "max_num_seqs": 4}),
    "12 rows": Trial({"max_num_batched_tokens": 12, "max_num_seqs": 4}, seed=1),
    "512 rows": Trial({"max_num_batched_tokens": 512}, seed=2),
    "short of memory": Trial({"max_num_batched_tokens": 30}, is_short=True),
    "short of memory again": Trial({"max_num_batched_tokens": 30}, is_short=True, seed=1),
    "preempted": Trial({"max_num_batched_tokens": 24}, preempt_and_forget),
    "preempted again": Trial({"max_num_batched_tokens": 24}, preempt_and_forget, seed=1),
    "preempted, 9 rows": Trial({"max_num_batched_tokens": 9, "max_num_seqs": 7}, preempt_and_forget),
    "at intervals": Trial({"max_num_batched_tokens": 16, "admission": IntervalAdmission(5)}, seed=2),
    "single steps": Trial({"num_scheduler_steps": 1}),
    "one thread": Trial({"num_threads": 1}),
    "no prefix cache": Trial({"enable_prefix_caching": False}),
}
CASES = [
    *product(["policies"], ["4 rows", "12 rows", "512 rows", "short of memory", "short of memory again"]),
    *product(["policies"], ["preempted", "preempted again", "at intervals"]),
    *product(["8-bit cache"], ["12 rows", "512 rows"]),
    *product(["batch-invariant", "batch-invariant, 8-bit cache", "batch-invariant students"], ["preempted, 9 rows"]),
    *product(["bridges by PyTorch", "bridges", "students by PyTorch", "students"], ["preempted"]),
    *product(["drafts by own layers", "drafts by a second model"], ["12 rows", "short of memory", "preempted"]),
    *product(["drafts by parts of layers", "drafts by students"], ["12 rows", "preempted"]),
    *product(["drafts by EAGLE-3"], ["512 rows", "preempted"]),
    *product(["adapters", "hidden states"], ["12 rows", "512 rows", "short of memory", "single steps", "one thread"]),
    *product(["hidden states"], ["no prefix cache"]),
    *product(["hidden states by PyTorch"], ["512 rows"]),
    *product(["embeddings by PyTorch", "embeddings"], ["12 rows", "512 rows", "preempted"]),
    *product(["everything"], ["12 rows", "short of memory", "preempted"]),
]


DRAFTERS = ("own layers", "parts of layers", "students", "a second model")


def short_memory(kind: Kind, requests: list[Request], changes: dict[str, Any]) -> int:
    """Bytes of cache for the longest request, and a little more."""
    with kind.make(**changes) as probe:
        cache, block_bytes = probe.scheduler.cache, probe.settings.block_bytes
    longest = max(len(one.prompt) + (one.params.max_tokens or 0) for one in requests)
    return int(1.25 * cache.num_layers * cache.blocks_for(longest)) * block_bytes


@pytest.mark.parametrize(("name", "trial"), CASES, ids=lambda one: one)
def test_answer_in_a_batch_is_that_alone(kinds: Callable[[str], Kind], alone: Alone, name: str, trial: str) -> None:
    """Requests of a kind come one after the other, in every trial."""
    kind, given = kinds(name), TRIALS[trial]
    requests, changes, numbers = kind.requests(given.seed), dict(given.changes), random.Random(given.seed)
    if given.is_short:
        changes["kv_cache_memory_bytes"] = short_memory(kind, requests, changes)
    with kind.within(), kind.make(**changes) as engine:
        done = run_together(engine, requests, numbers, before_step=given.disturb(numbers))
        stats = engine.stats()
        assert kv_is_back(engine)
        assert engine.scheduler._second is None or engine.scheduler._second.cache.pool.num_held == 0
    assert sum(output.metrics.num_preemptions for output in done.values()) == stats.num_preemptions
    if given.is_short or given.disturb is not nothing:
        assert stats.num_preemptions > 0
    if name.startswith("drafts"):
        assert 0 < (stats.acceptance_rate or 0) < 1
    elif trial.endswith("rows") or trial.startswith("preempted"):
        assert stats.cached_prompt_tokens > 0
    if name.startswith("batch-invariant"):
        assert stats.eager_steps == 0
    for nth, request in enumerate(requests):
        kind.same(done[nth], alone(name, request), request)


@pytest.mark.parametrize("name", [f"drafts by {what}" for what in DRAFTERS])
def test_drafting_request_answers_as_full_depth(kinds: Callable[[str], Kind], alone: Alone, name: str) -> None:
    """Greedy or drawn."""
    drafting = [one for one in kinds(name).requests(0) if one.params.depth is None or one.params.depth.drafts]
    assert len(drafting) > 4
    for request in drafting:
        deep = replace(request, params=replace(request.params, depth=FullDepth()))
        same_tokens(alone(name, request), alone(name, deep))


@pytest.mark.parametrize("name", ["adapters", "hidden states"])
def test_stream_ends_with_the_answer_alone(kinds: Callable[[str], Kind], alone: Alone, name: str) -> None:
    """The last output of a stream is the whole answer; hidden states come with it alone."""
    with kinds(name).make() as engine:
        for request in kinds(name).requests(0):
            *before, last = engine.stream(list(request.prompt), request.params, lora_request=request.lora)
            assert all(output.outputs[0].hidden_states is None for output in before)
            kinds(name).same(last, alone(name, request), request)


def test_policy_answers_otherwise_than_full_depth(solo: Solo) -> None:
    """So equal answers mean something."""
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


@pytest.mark.parametrize(("name", "every"), [("policies", 1), ("8-bit cache", 2)])
def test_policies_preempted_at_every_token_answer_as_alone(
    kinds: Callable[[str], Kind], alone: Alone, name: str, every: int
) -> None:
    """As soon as there are `every` new tokens: more often, and a replay of several pieces would never end."""
    requests = []
    for policy in POLICIES:
        greedy = SamplingParams(temperature=0, max_tokens=11, ignore_eos=True, depth=policy, logprobs=1)
        drawn = SamplingParams(temperature=2.0, seed=5, max_tokens=9, ignore_eos=True, depth=policy)
        requests += [Request(tuple(range(40, 49)), greedy), Request(tuple(range(40, 46)), drawn)]
    steps: dict[str, int] = {}

    def preempt(engine: Engine) -> None:
        for sequence in engine.scheduler.running:
            if sequence.step >= steps.get(sequence.request_id, 0) + every:
                steps[sequence.request_id] = sequence.step
                engine.scheduler._preempt(sequence)

    with kinds(name).within():
        engine = kinds(name).make()
        done = run_together(engine, requests, random.Random(1), before_step=preempt)
    for nth, request in enumerate(requests):
        assert_same(done[nth], alone(name, request))
    assert engine.stats().num_preemptions == len(POLICIES) * (10 // every + 8 // every)


def test_eight_bits_change_what_is_answered(make_engine: MakeEngine, alone: Alone) -> None:
    """So equal answers over them mean something."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
    wide = make_engine(enforce_eager=True).generate(list(range(20, 40)), params, use_tqdm=False)[0]
    narrow = alone("8-bit cache", Request(tuple(range(20, 40)), params))
    wide_first, narrow_first = (next(iter(one.outputs[0].logprobs[0].values())) for one in (wide, narrow))
    assert abs(wide_first.logprob - narrow_first.logprob) > 0.01


def test_request_beside_aborted_ones_answers_as_alone(make_engine: MakeEngine, solo: Solo) -> None:
    """Those that are aborted have the beginning of their answer."""
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


def test_cached_prefix_answers_as_a_computed_one(make_engine: MakeEngine, solo: Solo) -> None:
    """Under each policy, and also in the next turn of a chat."""
    engine = make_engine()
    for policy in POLICIES:
        engine.reset_prefix_cache()
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, depth=policy)
        first = Request(tuple(range(100, 116)), params)
        answers = [engine.generate(list(first.prompt), params, use_tqdm=False)[0] for _ in range(2)]
        # The next turn of a chat: the answer of a request that skipped layers is part of the new prompt.
        turn = Request((*first.prompt, *answers[0].outputs[0].token_ids, 3), params)
        next_turn = engine.generate(list(turn.prompt), params, use_tqdm=False)[0]
        assert [answers[0].num_cached_tokens, answers[1].num_cached_tokens, next_turn.num_cached_tokens] == [0, 12, 16]
        assert_same(answers[0], solo(first))
        assert_same(answers[1], solo(first))
        assert_same(next_turn, solo(turn))


def test_sequences_of_a_request_differ_and_answer_as_alone(make_engine: MakeEngine, solo: Solo) -> None:
    """Even where they cannot run together."""
    params = SamplingParams(n=4, temperature=2.0, seed=11, max_tokens=10, depth=D3(0.8, 0.3))
    request = Request(tuple(range(9)), params)
    engine = make_engine(max_num_seqs=2)  # so that they cannot even run together
    others = some_requests(50, 5, n=1)
    done = run_together(engine, [request, *others], random.Random(0))
    assert_same(done[0], solo(request))
    texts: Iterator[CompletionOutput] = iter(done[0].outputs)
    assert len({tuple(output.token_ids) for output in texts}) == 4
    assert [output.index for output in done[0].outputs] == [0, 1, 2, 3]


def test_lower_priority_number_overtakes_and_changes_no_answer(make_engine: MakeEngine, solo: Solo) -> None:
    """Of those that wait the most urgent comes first."""
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


def test_generate_of_mixed_policies_answers_each_as_alone(make_engine: MakeEngine, solo: Solo) -> None:
    """In the order of the prompts."""
    requests = [
        Request(tuple(range(5, 5 + 3 * nth + 1)), SamplingParams(temperature=0, max_tokens=18, depth=policy))
        for nth, policy in enumerate(POLICIES)
        if 3 * nth + 19 < MAX_LENGTH
    ]
    engine = make_engine(max_num_seqs=16)
    outputs = generate_as_alone(engine, requests, solo)
    assert len({type(request.params.depth) for request in requests}) > 5
    assert [output.prompt_token_ids for output in outputs] == [list(request.prompt) for request in requests]
