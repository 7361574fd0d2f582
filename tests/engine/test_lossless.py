"""Draft and verify gives full depth's answers, token for token, whatever drafts and however its work is cut."""

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fixture_types import MakeEngine, MakeLlama
from kinds_of_engine import maker, policies_that_draft
from stepping import greedy, watch
from tiny_models import TinyLlama
from transformers_oracle import assert_same_tokens, greedy_after

from d3engine import D3, Engine, FullDepth, LayerTable, SamplingParams, SkipDecode, UnifiedSkip
from d3engine.depth import DepthPolicy, Lossless, SelfSpeculative, policy_from_dict
from d3engine.depth.policy import MAX_DRAFT_LENGTH, DraftRule
from d3engine.errors import InvalidValueError
from d3engine.request.outputs import CompletionOutput, RequestOutput
from d3engine.scheduling.sequence import Draft

LAYERS = 6
EVERY = list(range(LAYERS))


@pytest.fixture(scope="module")
def llama(tiny_llama: MakeLlama) -> TinyLlama:
    return tiny_llama(num_hidden_layers=LAYERS, hidden_size=32, intermediate_size=48)


@pytest.fixture(scope="module")
def make_engine(llama: TinyLlama) -> MakeEngine:
    return maker(llama.directory)


Full = Callable[[list[list[int]], list[SamplingParams]], list[CompletionOutput]]


@pytest.fixture(scope="module")
def full(make_engine: MakeEngine) -> Full:
    """The answers of full depth, by another engine."""
    engine = make_engine(max_num_seqs=32)

    def answers(prompts: list[list[int]], params: list[SamplingParams]) -> list[CompletionOutput]:
        deep = [replace(one, depth=FullDepth()) for one in params]
        return [output.outputs[0] for output in engine.generate(prompts, deep, use_tqdm=False)]

    return answers


def some_prompts(seed: int, count: int, longest: int = 30) -> list[list[int]]:
    """Prompts of every length; every other one repeats itself, so that drafts are right now and then."""
    numbers = random.Random(seed)
    prompts = []
    for nth in range(count):
        length = numbers.randint(1, longest)
        period = [numbers.randrange(300) for _ in range(3 if nth % 2 else length)]
        prompts.append((period * length)[:length])
    return prompts


def assert_answers_of_full_depth(outputs: list[RequestOutput], requests: list[SamplingParams], full: Full) -> None:
    deep = full([output.prompt_token_ids for output in outputs], requests)
    for output, params, wanted in zip(outputs, requests, deep, strict=True):
        (found,) = output.outputs
        assert found.token_ids == wanted.token_ids, params.depth
        assert (found.finish_reason, found.stop_reason) == (wanted.finish_reason, wanted.stop_reason)
        assert len(found.depths) == len(found.token_ids)
        assert (found.logprobs is None) == (wanted.logprobs is None)
        for row, other in zip(found.logprobs or [], wanted.logprobs or [], strict=True):
            assert row.keys() == other.keys()
            assert all(row[token].logprob == pytest.approx(other[token].logprob, abs=1e-3) for token in row)


# -- greedy ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "batch", "count"),
    [(1, 7, 36), (2, 1, 12), (3, 48, 72), (4, 8, 24), (5, 16, 36), (7, 3, 12), (MAX_DRAFT_LENGTH, 32, 36)],
)
def test_greedy_answers_are_those_of_full_depth(
    make_engine: MakeEngine, full: Full, length: int, batch: int, count: int
) -> None:
    """Over hundreds of prompts, each under the next policy: with the test of alpha and start, 300 of them."""
    policies = policies_that_draft(length) + policies_that_draft(length, adaptive=True, stop_probability=0.1)
    prompts = some_prompts(length, count)
    numbers = random.Random(batch)
    requests = [greedy(numbers.randint(1, 26), depth=policies[nth % len(policies)]) for nth in range(count)]
    engine = make_engine(max_num_seqs=batch)
    outputs = engine.generate(prompts, requests, use_tqdm=False)
    assert_answers_of_full_depth(outputs, requests, full)
    stats = engine.stats()
    assert stats.acceptance_rate is not None
    assert 0 < stats.acceptance_rate < 1
    assert stats.kv_bytes_saved_at_end == 0


@pytest.mark.parametrize("policy", [Lossless(D3(0.9, 0.5), 3), SelfSpeculative(UnifiedSkip(2), 4)], ids=repr)
def test_greedy_answers_are_those_of_transformers(
    make_engine: MakeEngine, llama: TinyLlama, policy: DepthPolicy
) -> None:
    outputs = make_engine().generate(some_prompts(5, 6), greedy(30, depth=policy), use_tqdm=False)
    for output in outputs:
        answer = output.outputs[0].token_ids
        assert len(answer) == 30
        assert_same_tokens(answer, greedy_after(llama.model, output.prompt_token_ids, answer))


def test_lossless_d3_is_lossless_at_any_alpha_and_start(make_engine: MakeEngine, full: Full) -> None:
    settings = list(itertools.product([0.99, 0.9, 0.7], [0.2, 0.5, 0.8], range(1, 9)))
    requests = [greedy(24, depth=Lossless(D3(alpha, start), length)) for alpha, start, length in settings]
    engine = make_engine(max_num_seqs=36)
    outputs = engine.generate(some_prompts(3, len(settings)), requests, use_tqdm=False)
    assert_answers_of_full_depth(outputs, requests, full)


# -- whatever else a request asks for --------------------------------------------------------------------------

ASKS: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": -0.5},
    "bias and allowed tokens": {"logit_bias": {5: 9.0, 17: -50.0}, "allowed_token_ids": list(range(0, 300, 3))},
    "stop tokens after a minimum": {"stop_token_ids": list(range(0, 300, 4)), "min_tokens": 7},
    "stop tokens at once": {"stop_token_ids": list(range(0, 300, 9))},
    "log-probabilities": {"logprobs": 3},
    "those of the prompt as well": {"logprobs": 0, "prompt_logprobs": 2, "frequency_penalty": 1.0},
}


@pytest.mark.parametrize("asks", ASKS.values(), ids=ASKS)
def test_parameters_hold_in_draft_and_verification(make_engine: MakeEngine, full: Full, asks: dict[str, Any]) -> None:
    """What a request asks for is honoured in the draft and in its verification."""
    policies = [Lossless(D3(0.9, 0.5), 3), SelfSpeculative(UnifiedSkip(1.5), 4), SelfSpeculative(SkipDecode(12, 3), 2)]
    requests = [SamplingParams(temperature=0, max_tokens=20, depth=policy, **asks) for policy in policies * 2]
    engine = make_engine()
    outputs = engine.generate(some_prompts(8, 6), requests, use_tqdm=False)
    assert_answers_of_full_depth(outputs, requests, full)
    assert (engine.stats().acceptance_rate or 0) > 0  # the draft obeys as well, or nothing it proposes would do
    if "stop_token_ids" in asks:
        assert any(output.outputs[0].finish_reason == "stop" for output in outputs)
        assert all(len(output.outputs[0].token_ids) >= asks.get("min_tokens", 0) for output in outputs)


def test_stop_string_within_accepted_tokens_drops_the_rest() -> None:
    """A stop string within an accepted run ends the text there and drops the rest."""
    with Engine("demo", device="cpu", max_num_seqs=4) as engine:
        prompt = "Tom has 3 apples. He buys 4 more. How many apples does he have?"
        asks = greedy(48, depth=FullDepth())
        text = engine.generate(prompt, asks, use_tqdm=False)[0].outputs[0].text
        drafting = replace(asks, depth=Lossless(D3(0.98, 0.7), 6))
        for place in range(3, 12):
            stop = text[place : place + 3]
            for params in (replace(asks, stop=stop), replace(drafting, stop=stop)):
                (output,) = engine.generate(prompt, params, use_tqdm=False)[0].outputs
                assert output.text == text[: text.index(stop)]
                assert output.finish_reason == "stop"
                assert len(output.depths) == len(output.token_ids)
        assert (engine.stats().tokens_per_verification or 0) > 2
        engine.scheduler.check_integrity()


def test_abort_in_a_draft_and_prefix_hits_change_nothing(make_engine: MakeEngine, full: Full) -> None:
    """Prefix hits and an abort in the middle of a draft change nothing for others."""
    params = greedy(20, depth=Lossless(D3(0.9, 0.5), 4))
    prompt = list(range(40, 57))
    (whole,) = full([prompt], [params])
    engine = make_engine(num_scheduler_steps=1)  # or a draft and its verification would be one
    engine.add_request("first", prompt, params)
    while not any(sequence.draft and sequence.draft.token_ids for sequence in engine.scheduler.running):
        engine.step()
    engine.add_request("second", prompt, params)
    engine.abort_request("first")
    (ended,) = [output for output in engine.step() if output.finished]
    assert ended.outputs[0].finish_reason == "abort"
    assert ended.outputs[0].token_ids == whole.token_ids[: len(ended.outputs[0].token_ids)]
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert outputs[0].num_cached_tokens == 16
    assert outputs[0].outputs[0].token_ids == whole.token_ids
    turn = [*prompt, *outputs[0].outputs[0].token_ids]
    (next_turn,) = full([turn], [params])
    assert engine.generate(turn, params, use_tqdm=False)[0].outputs[0].token_ids == next_turn.token_ids


# -- what is counted -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [Lossless(D3(0.9, 0.5), 3), SelfSpeculative(D3(0.9, 0.5), 3)], ids=repr)
def test_layers_run_for_drafts_and_verifications_are_counted(make_engine: MakeEngine, policy: SelfSpeculative) -> None:
    """Every layer run for every row of drafts and verifications is counted."""
    engine = make_engine(enforce_eager=True)  # so that the host plans every row
    plans = watch(engine)
    (output,) = engine.generate(some_prompts(4, 2)[1:], greedy(30, depth=policy), use_tqdm=False)
    ran = sum(int(span.num_rows) * len(span.layers) for plan in plans[1:] for span in plan.spans)
    assert sum(output.outputs[0].depths) == LAYERS + ran
    assert engine.stats().realised_mean_layers == pytest.approx((LAYERS + ran) / 30)
    metrics, stats = output.metrics, engine.stats()
    assert metrics.acceptance_rate == stats.acceptance_rate
    assert metrics.tokens_per_verification == stats.tokens_per_verification
    verified = [len(rows) for plan in plans if plan.drafts for rows in plan.drafts.judging.values()]
    assert (len(verified), sum(verified)) == (metrics.num_verifications, metrics.num_drafted_tokens)
    rows = dict.fromkeys(EVERY, 0)
    for plan in plans:
        if plan.drafts and plan.drafts.judging:
            for span in plan.spans:
                for layer in span.layers:
                    rows[layer] += span.num_rows
    below = sum(verified) * (not isinstance(policy, Lossless)) + len(verified)
    assert [rows[layer] for layer in EVERY] == [below] * 3 + [sum(verified) + len(verified)] * 3


def test_draft_ends_where_the_rule_says_and_its_length_adapts(make_engine: MakeEngine) -> None:
    """A draft ends where the rule says so and its length adapts."""

    def lengths(policy: DepthPolicy, max_tokens: int = 30) -> list[int]:
        engine = make_engine(enforce_eager=True)  # so that the host plans every row
        plans = watch(engine)
        engine.generate(some_prompts(1, 2)[1:], greedy(max_tokens, depth=policy), use_tqdm=False)
        return [len(rows) for plan in plans if plan.drafts for rows in plan.drafts.judging.values()]

    draft = UnifiedSkip(2)
    fixed = lengths(SelfSpeculative(draft, 5))
    assert set(fixed[:-5]) == {5}
    assert max(lengths(SelfSpeculative(draft, MAX_DRAFT_LENGTH), max_tokens=9)) == 7  # token 0, seven, and one more
    assert lengths(SelfSpeculative(draft, 5), max_tokens=2) == []
    assert set(lengths(SelfSpeculative(draft, 5, stop_probability=1.0))) == {1}
    steps = lengths(SelfSpeculative(draft, 5, adaptive=True))
    assert steps[0] == 5
    assert all(abs(after - before) <= 1 for before, after in itertools.pairwise(steps[:-4]))
    assert min(steps) < 5
    never_skips = SelfSpeculative(D3(1.0, 0.5))
    assert lengths(never_skips) == []


def test_adaptive_length_grows_after_whole_drafts_alone() -> None:
    """One more after a draft that was accepted whole, one less after any other, within bounds."""
    draft = Draft(DraftRule(3, adaptive=True))
    for count, accepted, length in ((3, 3, 3), (3, 2, 2), (2, 2, 3), (3, 1, 2), (2, 0, 1), (1, 0, 1), (1, 1, 2)):
        draft.token_ids = [0] * count
        draft.verified(accepted)
        assert draft.length == length


# -- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: SelfSpeculative("d3"), "draft"),  # type: ignore[arg-type]
        (lambda: SelfSpeculative(Lossless(D3(0.9, 0.5))), "draft"),
        (lambda: Lossless(UnifiedSkip(2)), "draft"),
        (lambda: SelfSpeculative(D3(0.9, 0.5), 0), "draft_length"),
        (lambda: SelfSpeculative(D3(0.9, 0.5), MAX_DRAFT_LENGTH + 1), "draft_length"),
        (lambda: SelfSpeculative(D3(0.9, 0.5), stop_probability=1.5), "stop_probability"),
        (lambda: SelfSpeculative(D3(0.9, 0.5), stop_probability=float("nan")), "stop_probability"),
        (lambda: SelfSpeculative(D3(0.9, 0.5), adaptive=1), "adaptive"),  # type: ignore[arg-type]
        (lambda: SelfSpeculative(D3(0.9, 0.5, on_skip="copy")).draft_rule(LAYERS), "on_skip"),
        (lambda: SelfSpeculative(LayerTable([EVERY, [9]])).draft_rule(LAYERS), "active"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(make: Callable[[], Any], field: str) -> None:
    with pytest.raises(InvalidValueError, match=rf"^{field}"):
        make()


def test_a_draft_longer_than_a_step_has_rows_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=4, max_num_batched_tokens=7)
    params = SamplingParams(max_tokens=3, depth=Lossless(D3(0.9, 0.5), 4))
    with pytest.raises(InvalidValueError, match=r"draft_length must be .*= 3.*; got 4"):
        engine.generate([1, 2], params, use_tqdm=False)


@pytest.mark.parametrize("policy", policies_that_draft(3, adaptive=True)[::2], ids=repr)
def test_a_policy_that_drafts_survives_json(policy: DepthPolicy) -> None:
    assert policy_from_dict(json.loads(json.dumps(policy.describe()))) == policy
