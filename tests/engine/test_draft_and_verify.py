"""Draft & Verify: attentions and MLPs left out one by one, a stop that adapts, and full depth's answers."""

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_oracle import draft_and_verify
from fixture_types import MakeEngine
from kinds_of_engine import PART_DRAFTS, maker
from stepping import watch
from tiny_models import TINY, TinyLlama, save_random, save_sure_llama
from transformers import AutoModelForCausalLM, Gemma2Config, Olmo2Config, PreTrainedConfig
from transformers_oracle import assert_same_tokens, greedy_after

from d3engine import DraftAndVerify, Engine, FullDepth, Lossless, SamplingParams
from d3engine.depth import NEVER, DepthPolicy, policy_from_dict
from d3engine.depth.labels import policy_in_words
from d3engine.errors import InvalidValueError

LAYERS = 5


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    return save_sure_llama(tmp_path_factory.mktemp("llama"), num_layers=LAYERS)


@pytest.fixture(scope="module")
def make_engine(llama: TinyLlama) -> MakeEngine:
    return maker(llama.directory)


def some_prompts(seed: int, count: int, longest: int = 20) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(300) for _ in range(numbers.randint(1, longest))] for _ in range(count)]


def asked(policy: DepthPolicy, max_tokens: int = 32, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "depth": policy} | more)


# -- as published ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", PART_DRAFTS, ids=policy_in_words)
def test_drafts_follow_the_published_rules(make_engine: MakeEngine, llama: TinyLlama, policy: DraftAndVerify) -> None:
    """Drafts are those of the published rules on transformers' own layers."""
    # Tokens, the length of every draft, and how much of each was accepted.
    lengths = []
    engine = make_engine()
    for prompt in some_prompts(3, 2, 6):
        plans = watch(engine)
        (output,) = engine.generate(prompt, asked(policy, 24), use_tqdm=False)
        wanted = draft_and_verify(
            llama.model,
            prompt,
            24,
            set(policy.skip_attention),
            set(policy.skip_mlp),
            longest=policy.draft_length,
            stop=policy.stop_probability,
            target=policy.target_acceptance,
        )
        assert output.outputs[0].token_ids == wanted.token_ids
        verified = [len(rows) for plan in plans if plan.drafts for rows in plan.drafts.judging.values()]
        assert verified == wanted.drafted
        assert output.metrics.num_accepted_tokens == sum(wanted.accepted)
        lengths += verified
    assert len(set(lengths)) > 1, "drafts of one length would say little of where they stop"


@pytest.mark.parametrize("kind", [Olmo2Config, Gemma2Config])
def test_so_are_those_of_layers_with_norms_behind(kind: type[PreTrainedConfig], tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {name: value for name, value in TINY.items() if name != "head_dim"} | {"hidden_size": 32}
    config = kind(**sizes, final_logit_softcapping=None, query_pre_attn_scalar=8)
    directory, model = save_random(tmp_path, AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    policy, accepted = DraftAndVerify([1], [2], 4, 0.0, None), 0
    with Engine(directory, skip_tokenizer_init=True, max_model_len=96, depth=FullDepth(), device="cpu") as engine:
        for prompt in some_prompts(3, 2, 6):
            (output,) = engine.generate(prompt, asked(policy, 24), use_tqdm=False)
            wanted = draft_and_verify(model, prompt, 24, {1}, {2}, longest=4, stop=0.0, target=None)
            assert output.outputs[0].token_ids == wanted.token_ids
            assert output.metrics.num_accepted_tokens == sum(wanted.accepted)
            accepted += sum(wanted.accepted)
    assert accepted > 0


def test_a_stop_probability_moves_as_the_published_one_does(make_engine: MakeEngine, llama: TinyLlama) -> None:
    policy, (prompt,) = DraftAndVerify([1], [3], 2, 0.2, 0.6), some_prompts(6, 1, 6)
    engine = make_engine()
    engine.add_request("a", prompt, asked(policy, 40))
    stops = []
    while engine.has_unfinished_requests():
        verified = engine.stats().verifications
        running = engine.scheduler.running
        engine.step()
        if engine.stats().verifications > verified:
            assert running[0].draft is not None
            stops.append(running[0].draft.stop_probability)
    wanted = draft_and_verify(llama.model, prompt, 40, {1}, {3}, longest=2, stop=0.2, target=0.6)
    assert stops == pytest.approx(wanted.stops)
    steps = {round(after - before, 6) for before, after in itertools.pairwise(stops)}
    assert steps == {0.001, -0.001, 0.0}


@pytest.mark.parametrize("policy", PART_DRAFTS, ids=policy_in_words)
def test_greedy_answers_are_those_of_transformers(
    make_engine: MakeEngine, llama: TinyLlama, policy: DraftAndVerify
) -> None:
    (output,) = make_engine().generate(some_prompts(5, 1), asked(policy, 24), use_tqdm=False)
    answer = output.outputs[0].token_ids
    assert len(answer) == 24
    assert_same_tokens(answer, greedy_after(llama.model, output.prompt_token_ids, answer))


# -- what is counted -------------------------------------------------------------------------------------------


def test_a_part_of_a_layer_is_counted_as_half_of_it(make_engine: MakeEngine) -> None:
    engine = make_engine(enforce_eager=True)
    plans = watch(engine)
    (output,) = engine.generate(some_prompts(4, 1), asked(PART_DRAFTS[0]), use_tqdm=False)
    halves = sum(
        span.num_rows * len(span.layers) * (2 if span.part == "layer" else 1)
        for plan in plans[1:]
        for span in plan.spans
    )
    least = LAYERS + halves / 2
    metrics = output.metrics
    assert least <= sum(output.outputs[0].depths) <= least + metrics.num_verifications / 2
    drafts = [plan for plan in plans if plan.drafts and plan.drafts.proposing]
    assert {tuple(plan.depths) for plan in drafts} == {(4,)}  # three attentions and four MLPs of five


# -- the preset, and what is refused ---------------------------------------------------------------------------


def test_layerskip_preset_drafts_six_tokens_by_eight_layers() -> None:
    """LayerSkip's preset drafts six tokens by the lowest eight layers."""
    rule = Lossless.preset("layerskip", 32).draft_rule(32)
    assert rule.schedule is not None
    assert rule.schedule.cutoffs.tolist() == [NEVER] * 8 + [1] * 24
    assert (rule.length, rule.resumes) == (6, True)
    assert Lossless.preset("layerskip", 80).draft_rule(80).layers(1).sum() == 8  # type: ignore[union-attr]
    with pytest.raises(InvalidValueError, match="num_layers must be an integer of at least 9; got 8"):
        Lossless.preset("layerskip", 8)
    with pytest.raises(InvalidValueError, match="preset must be one of layerskip; got 'bbh'"):
        Lossless.preset("bbh", 32)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DraftAndVerify(), "skip_attention must be layer ids, unless skip_mlp has some"),
        (lambda: DraftAndVerify([1, 1]), r"skip_attention must be different layer ids, from 0; got \[1, 1\]"),
        (lambda: DraftAndVerify("3"), "skip_attention must be different layer ids, from 0; got '3'"),
        (lambda: DraftAndVerify([], [-1]), r"skip_mlp\[0\] must be an integer of at least 0; got -1"),
        (lambda: DraftAndVerify([0], draft_length=33), "draft_length must be an integer from 1 to 32; got 33"),
        (lambda: DraftAndVerify([0], stop_probability=2), "stop_probability must be .*; got 2"),
        (lambda: DraftAndVerify([0], target_acceptance=1.5), "target_acceptance must be .*; got 1.5"),
        (lambda: DraftAndVerify([], [5]).draft_rule(5), r"skip_mlp must be layer ids from 0 to 4; got \[5\]"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        make()


def test_it_survives_json() -> None:
    policy = DraftAndVerify([3, 1], [2], 12, 0.6, None)
    assert policy == DraftAndVerify((1, 3), (2,), 12, 0.6, None)
    assert policy.describe()["skip_attention"] == [1, 3]
    assert policy_from_dict(json.loads(json.dumps(policy.describe()))) == policy
