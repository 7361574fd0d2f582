"""Drawn tokens that were drafted and verified follow full depth's distribution, and nothing else decides them."""

import itertools
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixture_types import MakeLlama
from tiny_models import TinyLlama, save_without_layer

from d3engine import (
    D3,
    Engine,
    FullDepth,
    Lossless,
    PromptLookup,
    SamplingParams,
    SelfSpeculative,
    Speculative,
    UnifiedSkip,
)
from d3engine.depth import DepthPolicy
from d3engine.executor.interface import Computed
from d3engine.scheduling.plan import Chosen, Cycled

VOCABULARY, LAYERS = 5, 4
PROMPT = [1, 4, 2, 0, 3]
SAMPLES = 512


@pytest.fixture(scope="module")
def llama(tiny_llama: MakeLlama) -> TinyLlama:
    return tiny_llama(vocab_size=VOCABULARY, num_hidden_layers=LAYERS, hidden_size=32, intermediate_size=48, seed=4)


def distribution_after(llama: TinyLlama, tokens: list[int], params: dict[str, Any]) -> list[float]:
    """transformers' next-token distribution at this temperature, cut at top_p, by the definition."""
    with torch.inference_mode():
        logits = llama.model(torch.tensor([tokens])).logits[0, -1].double()
    p = (logits / params["temperature"]).softmax(dim=-1).tolist()
    kept: list[int] = []
    for token in sorted(range(VOCABULARY), key=lambda token: -p[token]):
        if sum(p[other] for other in kept) < params.get("top_p", 1.0):
            kept.append(token)
    return [p[token] / sum(p[other] for other in kept) if token in kept else 0.0 for token in range(VOCABULARY)]


def joint(llama: TinyLlama, params: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """The probability of every answer of three tokens."""
    found: dict[tuple[int, ...], float] = {}
    for first, p in enumerate(distribution_after(llama, PROMPT, params)):
        for second, q in enumerate(distribution_after(llama, [*PROMPT, first], params)):
            for third, r in enumerate(distribution_after(llama, [*PROMPT, first, second], params)):
                found[first, second, third] = p * q * r
    return found


def is_drawn_from(counts: Counter[tuple[int, ...]], wanted: dict[tuple[int, ...], float]) -> bool:
    """Pearson's chi-square against `wanted`, rare outcomes taken together: within 4 standard deviations of its mean."""
    total = sum(counts.values())
    assert all(wanted[outcome] > 0 for outcome in counts), "an outcome that cannot be"
    common = [outcome for outcome, p in wanted.items() if p * total >= 5]
    cells = [(counts[outcome], wanted[outcome] * total) for outcome in common]
    rest = total - sum(count for count, _ in cells), total - sum(expected for _, expected in cells)
    cells += [rest] if rest[1] >= 1 else []
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    freedom = len(cells) - 1
    return statistic < freedom + 4 * math.sqrt(2 * freedom)


def answers(engine: Engine, policy: DepthPolicy, params: dict[str, Any], samples: int = SAMPLES) -> list[list[int]]:
    """Answers of four tokens, each from a seed and index of its own."""
    requests = [
        SamplingParams(n=64, seed=seed, max_tokens=4, ignore_eos=True, depth=policy, **params)
        for seed in range(samples // 64)
    ]
    outputs = engine.generate([PROMPT] * len(requests), requests, use_tqdm=False)
    return [answer.token_ids for output in outputs for answer in output.outputs]


@pytest.mark.parametrize(
    ("policy", "params"),
    [
        (SelfSpeculative(UnifiedSkip(2), 3), {"temperature": 1.0}),
        (Lossless(D3(0.5, 0.5), 2), {"temperature": 1.5, "top_p": 0.8}),
        (Lossless(D3(0.4, 0.3), 3, stop_probability=0.5, adaptive=True), {"temperature": 1.2}),
        (Speculative("another model", 3), {"temperature": 1.3, "top_p": 0.9}),
    ],
    ids=repr,
)
def test_drawn_answers_follow_full_depths_distribution(
    llama: TinyLlama, policy: DepthPolicy, params: dict[str, Any], tmp_path: Path
) -> None:
    if isinstance(policy, Speculative):
        policy = replace(policy, draft_model=save_without_layer(llama, 1, tmp_path / "draft"))
    engine = Engine(llama.directory, skip_tokenizer_init=True, device="cpu", depth=policy, max_num_seqs=64)
    found = answers(engine, policy, params)
    assert_follows(found, joint(llama, params))
    rate = engine.stats().acceptance_rate
    assert rate is not None
    assert 0.2 < rate < 0.95, "a draft that is always or never right would prove nothing"


def assert_follows(found: list[list[int]], wanted: dict[tuple[int, ...], float]) -> None:
    """All three tokens together, and each one and each two of them, where fewer outcomes show smaller differences."""
    for places in itertools.chain.from_iterable(itertools.combinations(range(3), count) for count in (1, 2, 3)):
        together: dict[tuple[int, ...], float] = Counter()
        for outcome, p in wanted.items():
            together[tuple(outcome[place] for place in places)] += p
        assert is_drawn_from(Counter(tuple(answer[place] for place in places) for answer in found), together), places


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize(
    "policy",
    [SelfSpeculative(UnifiedSkip(2), 3), Lossless(D3(0.5, 0.5), 2), Speculative("another model", 3), PromptLookup(3)],
    ids=repr,
)
def test_drawn_answers_are_those_without_drafts(
    llama: TinyLlama, policy: DepthPolicy, eager: bool, tmp_path: Path
) -> None:
    """By any drafter, with the same seed the same tokens come, with the same log-probabilities."""
    if isinstance(policy, Speculative):
        policy = replace(policy, draft_model=save_without_layer(llama, 1, tmp_path / "draft"))
    options: dict[str, Any] = {"skip_tokenizer_init": True, "device": "cpu", "enforce_eager": eager, "max_num_seqs": 8}
    params = SamplingParams(n=8, seed=1, max_tokens=24, ignore_eos=True, top_p=0.9, logprobs=1)
    with Engine(llama.directory, depth=FullDepth(), **options) as engine:
        wanted = engine.generate(PROMPT, params, use_tqdm=False)[0].outputs
    with Engine(llama.directory, depth=policy, **options) as engine:
        found = engine.generate(PROMPT, params, use_tqdm=False)[0].outputs
        stats = engine.stats()
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-4)
        assert eager or one.logprobs == other.logprobs, "the native library's sums have one order"
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


def test_the_chi_square_sees_the_drafts_own_distribution(llama: TinyLlama) -> None:
    """The proof of the proof: answers drawn at the draft's depth are told from full depth's."""
    engine = Engine(llama.directory, skip_tokenizer_init=True, device="cpu", depth=FullDepth(), max_num_seqs=64)
    found = answers(engine, UnifiedSkip(2), {"temperature": 1.0})
    assert not is_drawn_from(Counter(tuple(answer[:3]) for answer in found), joint(llama, {"temperature": 1.0}))


@pytest.mark.parametrize("eager", [True, False])
def test_draft_that_is_not_finite_ends_and_full_depth_goes_on(llama: TinyLlama, eager: bool) -> None:
    """A draft whose logits are not finite ends and full depth goes on."""
    # A fault of the draft is none of the request; one of full depth ends it, after the tokens before.
    options: dict[str, Any] = {"skip_tokenizer_init": True, "device": "cpu", "enforce_eager": eager}
    engine = Engine(llama.directory, depth=FullDepth(), **options)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (wanted,) = engine.generate(PROMPT, params, use_tqdm=False)[0].outputs
    run = engine.executor.run
    spoil: list[str] = []

    def spoiled_cycles(found: Cycled) -> Cycled:
        """One cycle of a device that drafts and verifies by itself, as it would be where a row met the fault."""
        counts = np.full_like(found.counts, -1)
        drafted, accepted, last = found.counts[0, 0, :3]
        counts[0, 0] = drafted, accepted, -1, 0, 0
        if "drafts" in spoil:
            counts[0, 0] = 0, 0, found.drafted[0, 0, 0] if accepted else last, 0, 0
        return replace(found, counts=counts) if spoil else found

    def spoiled(plan: Any) -> Computed:
        computed = run(plan)
        if isinstance(computed.logits, Cycled):
            return Computed(spoiled_cycles(computed.logits))
        if isinstance(computed.logits, Chosen):
            return computed  # a step in which nothing is drafted
        logits = computed.logits.clone()
        if plan.drafts and plan.drafts.proposing and "drafts" in spoil:
            logits[sorted(plan.drafts.proposing)] = torch.nan
        if plan.drafts and plan.drafts.judging and "verification" in spoil:
            logits[0] = torch.nan  # the row that would add a token
        return Computed(logits, computed.depths)

    engine.executor.run = spoiled  # type: ignore[method-assign]
    drafting = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, depth=SelfSpeculative(D3(0.9, 0.7), 3))
    spoil.append("drafts")
    (found,) = engine.generate(PROMPT, drafting, use_tqdm=False)[0].outputs
    assert found.token_ids == wanted.token_ids
    assert engine.stats().drafted_tokens == 0
    spoil[:] = ["verification"]
    (found,) = engine.generate(PROMPT, drafting, use_tqdm=False)[0].outputs
    assert found.token_ids == wanted.token_ids[: len(found.token_ids)]
    assert found.finish_reason == "abort" or found.token_ids == wanted.token_ids
    engine.scheduler.check_integrity()


def test_fault_of_one_sequence_ends_its_request_and_drafts(llama: TinyLlama) -> None:
    """A fault of one sequence ends its request and no draft of it goes on."""
    # The other sequences of the request may be drafting in the very step that ends them.
    policy = SelfSpeculative(UnifiedSkip(2), 3, adaptive=True)
    engine = Engine(llama.directory, skip_tokenizer_init=True, device="cpu", depth=policy, max_num_seqs=5)
    params = SamplingParams(n=4, seed=3, max_tokens=12, ignore_eos=True)
    engine.add_request("faulty", PROMPT, params)
    engine.add_request("sound", PROMPT, SamplingParams(seed=5, max_tokens=12, ignore_eos=True))
    fail = engine._in_flight.outputs._extend
    calls: list[int] = []

    def failing(answer: Any, new: Any) -> None:
        calls.append(1)
        if new.sequence.request_id == "faulty" and len(calls) > 9:
            raise ValueError("a token that no tokenizer knows")
        fail(answer, new)

    engine._in_flight.outputs._extend = failing  # type: ignore[method-assign]
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
        engine.scheduler.check_integrity()
    answers = done["faulty"].outputs
    assert {answer.finish_reason for answer in answers} == {"abort"}
    assert sum(len(answer.token_ids) - len(answer.depths) for answer in answers) == 1, "one grew after its end"
    assert done["sound"].outputs[0].finish_reason == "length"
