"""A second model drafts and the answers stay full depth's, whatever it proposes and however its work is cut."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batches import Request, preempting, run_together
from tiny_models import TinyLlama, random_prompts, save_without_layer

from d3engine import D3, Engine, FullDepth, Lossless, PromptLookup, SamplingParams, Speculative, UnifiedSkip
from d3engine.cli.depth_options import parse_depth
from d3engine.depth import policy_from_dict
from d3engine.engine import resolve
from d3engine.engine.model_directory import model_directory
from d3engine.errors import InvalidValueError
from d3engine.request.outputs import RequestOutput

TARGET: dict[str, Any] = {"vocab_size": 40, "num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 48}


@pytest.fixture(scope="module")
def target(tiny_llama: Callable[..., TinyLlama]) -> TinyLlama:
    return tiny_llama(**TARGET)


@pytest.fixture(scope="module")
def draft(target: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_without_layer(target, 2, tmp_path_factory.mktemp("draft"))


def new_engine(target: TinyLlama, depth: Any, **changes: Any) -> Engine:
    arguments: dict[str, Any] = {"max_num_seqs": 6, "block_size": 4, "max_model_len": 80, "device": "cpu"}
    return Engine(target.directory, depth=depth, skip_tokenizer_init=True, **(arguments | changes))


def requests(draft: str, seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Greedy and drawn, drafted by the second model, by layers of the first, and not at all."""
    numbers = random.Random(seed)
    policies = [None, Speculative(draft, 2), Speculative(draft, 5, stop_probability=0.3, adaptive=True)]
    policies += [Lossless(D3(0.8, 0.5), 3), FullDepth(), UnifiedSkip(2), Speculative(draft), PromptLookup(4)]
    policies += [PromptLookup()]
    prompts = random_prompts([numbers.randint(1, 30) for _ in range(18)], seed=seed, vocab_size=40)
    return [
        (
            prompt,
            SamplingParams(
                temperature=numbers.choice([0.0, 0.8]),
                seed=nth,
                max_tokens=numbers.randint(2, 18),
                ignore_eos=True,
                depth=policies[nth % len(policies)],
                logprobs=numbers.choice([None, 1]),
                prompt_logprobs=numbers.choice([None, None, 0]),
            ),
        )
        for nth, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("length", [1, 4, 9])
def test_a_draft_model_that_is_the_target_itself_is_always_right(target: TinyLlama, length: int) -> None:
    engine = new_engine(target, Speculative(str(target.directory), length), max_num_batched_tokens=17)
    prompts = random_prompts([1, 9, 33, 4, 18, 2, 25], vocab_size=40)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, max_tokens=24, ignore_eos=True)
        engine.generate(prompts, params, use_tqdm=False)
    stats = engine.stats()
    assert stats.acceptance_rate == 1
    assert stats.realised_mean_layers == 4  # every row that full depth ran yielded a token


@pytest.fixture(scope="module")
def alone(target: TinyLlama, draft: str) -> list[RequestOutput]:
    """What each of the requests answers alone; full depth's greedy and drawn answers are those without drafts."""
    engine = new_engine(target, Speculative(draft, 3), enable_prefix_caching=False)
    full = new_engine(target, FullDepth(), enable_prefix_caching=False)
    answers = []
    for prompt, params in requests(draft, 11):
        answers.append(engine.generate(prompt, params, use_tqdm=False)[0])
        if not isinstance(params.depth, UnifiedSkip):
            deep = full.generate(prompt, replace(params, depth=FullDepth()), use_tqdm=False)[0]
            assert answers[-1].outputs[0].token_ids == deep.outputs[0].token_ids
    return answers


@pytest.mark.parametrize("how", ["small steps", "short of memory", "preempted now and then"])
def test_every_request_answers_as_alone_and_as_full_depth(
    target: TinyLlama, draft: str, alone: list[RequestOutput], how: str
) -> None:
    numbers = random.Random(how)
    changes: dict[str, Any] = {
        "small steps": {"max_num_batched_tokens": 11},
        "short of memory": {"kv_cache_memory_bytes": 4 * 20 * 2 * 4 * 2 * 16 * 4, "max_num_batched_tokens": 30},
        "preempted now and then": {"max_num_batched_tokens": 30},
    }[how]
    engine = new_engine(target, Speculative(draft, 3), **changes)
    asked = requests(draft, 11)
    together = [Request(tuple(prompt), params) for prompt, params in asked]
    disturb = preempting(numbers, 0.1 if how == "preempted now and then" else 0)
    done = run_together(engine, together, numbers, before_step=disturb)
    assert (engine.stats().num_preemptions > 0) == (how != "small steps")
    assert 0.2 < (engine.stats().acceptance_rate or 0) < 1
    for nth, (wanted, (_, params)) in enumerate(zip(alone, asked, strict=True)):
        assert done[nth].outputs[0].token_ids == wanted.outputs[0].token_ids, params
        if engine.stats().backend == "native":  # PyTorch's sums depend on the rows of a step
            assert done[nth].outputs[0].logprobs == wanted.outputs[0].logprobs, params
        if isinstance(params.depth or Speculative(draft), Speculative | PromptLookup):
            continue  # where a batch leaves no room for its drafts it decodes plainly
        assert done[nth].outputs[0].depths == wanted.outputs[0].depths
        assert done[nth].metrics.num_accepted_tokens == wanted.metrics.num_accepted_tokens
    second = engine.scheduler._second
    assert second is not None
    assert second.cache.pool.num_held == 0
    engine.reset_prefix_cache()
    assert engine.stats().kv_blocks_in_use == 0


def test_beside_an_executor_that_decodes_by_itself_a_second_model_drafts_step_by_step(
    target: TinyLlama, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that could run ahead wait for the draft model's; alone they do run ahead."""
    monkeypatch.setattr(resolve, "executor_for", lambda device, dtype, eager, backend: "eager" if eager else "graphs")
    prompts = random_prompts([7, 12, 3], vocab_size=40)
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    engine = new_engine(target, Speculative(draft, 3))
    drafted = engine.generate(prompts, params, use_tqdm=False)
    assert engine.stats().graph_steps == 0
    longer = replace(params, max_tokens=60)
    asked = [params, replace(longer, depth=FullDepth()), replace(longer, depth=UnifiedSkip(2))]
    mixed = engine.generate(prompts, asked, use_tqdm=False)
    assert 10 < engine.stats().graph_steps < 59
    eager = new_engine(target, FullDepth(), enforce_eager=True)
    full = eager.generate(prompts, longer, use_tqdm=False)
    assert [one.outputs[0].token_ids for one in drafted] == [one.outputs[0].token_ids[:9] for one in full]
    wanted = [full[0].outputs[0].token_ids[:9], full[1].outputs[0].token_ids]
    wanted.append(eager.generate(prompts[2], asked[2], use_tqdm=False)[0].outputs[0].token_ids)
    assert [one.outputs[0].token_ids for one in mixed] == wanted


def test_a_draft_model_that_does_not_fit_its_target_is_refused_by_name(
    target: TinyLlama, draft: str, tiny_llama: Callable[..., TinyLlama], tmp_path: Path
) -> None:
    with pytest.raises(
        InvalidValueError, match=r"^draft_model must be .*vocabulary of its target, 40 tokens and not 300"
    ):
        new_engine(target, Speculative(str(tiny_llama().directory)))
    with pytest.raises(InvalidValueError, match=r"^draft_model must be .*a directory"):
        new_engine(target, Speculative(str(tmp_path / "nothing")))
    short = tiny_llama(**TARGET, max_position_embeddings=64)
    with pytest.raises(InvalidValueError, match=r"^draft_model must be .*a model for 80 tokens"):
        new_engine(target, Speculative(str(short.directory)))
    with pytest.raises(InvalidValueError, match=r"^draft_model must be .*; got ''"):
        Speculative("")
    params = SamplingParams(max_tokens=2, depth=Speculative(draft))
    with pytest.raises(InvalidValueError, match=r"^draft_model must be .*the engine's own draft model, None"):
        new_engine(target, FullDepth()).generate([1], params, use_tqdm=False)


def test_a_draft_model_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    shutil.copytree(model_directory("demo"), tmp_path / "model")
    Engine("demo", device="cpu", depth=Speculative(str(tmp_path / "model"))).close()
    (tmp_path / "model" / "tokenizer.json").unlink()
    model = (tmp_path / "model" / "tokenizer.model").read_bytes()
    (tmp_path / "model" / "tokenizer.model").write_bytes(model.replace(b"the", b"hte", 1))
    with pytest.raises(InvalidValueError, match=r"^draft_model must be .*1 tokens differ"):
        Engine("demo", device="cpu", depth=Speculative(str(tmp_path / "model")))


def test_a_policy_with_a_draft_model_survives_json_and_has_options_on_the_command_line() -> None:
    policy = Speculative("some/model", 3, stop_probability=0.25, adaptive=True)
    assert policy_from_dict(json.loads(json.dumps(policy.describe()))) == policy
    line = "speculative draft-model=some/model draft-length=3 stop-probability=0.25 adaptive=true"
    assert parse_depth(line) == policy
    with pytest.raises(InvalidValueError, match="must be given with draft-model"):
        parse_depth("speculative")
