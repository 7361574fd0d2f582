"""Log-probabilities are of the raw distribution, and a seed repeats its draws anywhere in an engine."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixture_types import MakeEngine
from slow_sampling import random_logits, sample, sequence_of, slow_softmax, tokens_of

from d3engine import Engine, SamplingParams
from d3engine.executor.sampler import ROWS_AT_ONCE, logprobs_of
from d3engine.model.config import ModelConfig
from d3engine.model.weights import LlamaWeights, random_weights
from d3engine.scheduling.plan import PromptRows


def test_logprobs_are_of_the_raw_distribution() -> None:
    """Logprobs are of the raw distribution whatever is done to it."""
    logits = random_logits(4, 30, seed=8)
    twisted = {"temperature": 3.0, "top_k": 2, "repetition_penalty": 2.0, "logit_bias": {5: 50.0}, "seed": 1}
    sequences = [
        sequence_of(SamplingParams(logprobs=5, **twisted), prompt=[1, 2, 5]),
        sequence_of(SamplingParams(temperature=0, logprobs=0)),
        sequence_of(SamplingParams(temperature=0)),
        sequence_of(SamplingParams(seed=3, logprobs=64)),
    ]
    found = sample(logits, sequences)
    assert found.token_ids[0] == [5]
    assert found.logprobs is not None
    assert found.logprobs[2] is None
    tokens = tokens_of(found)
    for row, count in ((0, 5), (1, 0), (3, 30)):
        raw = [math.log(p) for p in slow_softmax(logits[row].double().tolist())]
        ranked = sorted(range(30), key=lambda token: -raw[token])
        of_row = found.logprobs[row]
        assert of_row is not None
        (logprobs,) = of_row
        assert next(iter(logprobs)) == tokens[row]
        assert set(logprobs) == {tokens[row], *ranked[:count]}
        for token, logprob in logprobs.items():
            assert logprob.logprob == pytest.approx(raw[token], abs=1e-5)
            assert logprob.rank == ranked.index(token) + 1


def test_prompt_logprobs_are_of_each_rows_next_token() -> None:
    """Prompt logprobs are those of each row's next prompt token."""
    logits = random_logits(1 + 3 + 2, 30, seed=9)
    first = sequence_of(SamplingParams(prompt_logprobs=2, temperature=0.0), prompt=[3, 4, 5, 6, 7, 8])
    second = sequence_of(SamplingParams(prompt_logprobs=0, seed=1), prompt=[20, 21, 22])
    rows = (PromptRows(first, 2, range(0, 3)), PromptRows(second, 0, range(4, 6)))
    found = sample(logits, [first, second], sampled=np.array([1]), prompt_rows=rows)
    assert len(found.token_ids) == 1
    wanted = [[6, 7, 8], [21, 22]]
    assert [[next(iter(entry)) for entry in entries] for entries in found.prompt_logprobs] == wanted
    for offset, entries in zip((1, 4), found.prompt_logprobs, strict=True):
        for row, entry in enumerate(entries):
            raw = [math.log(p) for p in slow_softmax(logits[offset + row].double().tolist())]
            for token, logprob in entry.items():
                assert logprob.logprob == pytest.approx(raw[token], abs=1e-5)
                assert logprob.rank == sorted(raw, reverse=True).index(raw[token]) + 1
    assert {len(entry) for entry in found.prompt_logprobs[0]} <= {2, 3}
    assert {len(entry) for entry in found.prompt_logprobs[1]} == {1}


def test_long_prompts_logprobs_are_held_for_few_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a prompt is, log-probabilities of few of its rows take memory beside its logits."""
    logits, tokens, held = random_logits(200, 30, seed=10), list(range(30)) * 6 + list(range(20)), list[int]()
    log_softmax = torch.Tensor.log_softmax

    def counted(rows: torch.Tensor, dim: int) -> torch.Tensor:
        held.append(len(rows))
        return log_softmax(rows, dim=dim)

    alone = [logprobs_of(logits[row : row + 1], [token], 2)[0] for row, token in enumerate(tokens)]
    monkeypatch.setattr(torch.Tensor, "log_softmax", counted)
    assert logprobs_of(logits, tokens, 2) == alone
    assert (sum(held), max(held)) == (200, ROWS_AT_ONCE)


# -- through the engine ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def make_engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Engine]:
    directory: Path = tmp_path_factory.mktemp("model")
    config = {"model_type": "llama", "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48}
    config |= {"num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 64}
    (directory / "config.json").write_text(json.dumps(config))
    raw = random_weights(ModelConfig.from_directory(directory), dtype=torch.float32, device="cpu", seed=1)
    weights = LlamaWeights(raw.embedding * 50, raw.layers, raw.final_norm, raw.lm_head * 25)

    def make(**changes: Any) -> Engine:
        arguments = {"weights": weights, "skip_tokenizer_init": True, "max_num_seqs": 4, "device": "cpu"} | changes
        return Engine(directory, **arguments)

    return make


@pytest.mark.parametrize("rows", [4, 512])
def test_prompt_logprobs_equal_those_of_forced_tokens(make_engine: MakeEngine, rows: int) -> None:
    """Prompt logprobs equal the logprobs of forcing each prompt token."""
    prompt = [5, 17, 3, 44, 21, 8, 8, 30, 12]
    engine = make_engine(max_num_batched_tokens=rows, block_size=2)
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1)
    engine.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)  # the prefix is cached, and must not be used
    output = engine.generate(prompt, params, use_tqdm=False)[0]
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(prompt)
    assert output.prompt_logprobs[0] is None
    for position in range(1, len(prompt)):
        forced = SamplingParams(allowed_token_ids=[prompt[position]], logprobs=0, max_tokens=1, seed=0)
        answer = engine.generate(prompt[:position], forced, use_tqdm=False)[0].outputs[0]
        assert answer.token_ids == [prompt[position]]
        assert answer.logprobs is not None
        assert answer.cumulative_logprob == answer.logprobs[0][prompt[position]].logprob
        logprobs = output.prompt_logprobs[position]
        assert logprobs is not None
        assert logprobs[prompt[position]].logprob == pytest.approx(answer.cumulative_logprob, abs=1e-4)
        assert min(logprob.rank for logprob in logprobs.values()) == 1


def test_a_preempted_prompt_has_its_logprobs_once(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=4, max_num_seqs=2)
    prompt = list(range(2, 19))
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=0)
    alone = make_engine().generate(prompt, params, use_tqdm=False)[0]
    engine.add_request("a", prompt, params)
    outputs = []
    for step in range(40):
        if step in (2, 5) and engine.scheduler.running:
            engine.scheduler._preempt(engine.scheduler.running[0])
        outputs += engine.step()
        if not engine.has_unfinished_requests():
            break
    found = outputs[-1].prompt_logprobs
    assert found is not None
    assert alone.prompt_logprobs is not None
    assert [None if row is None else list(row) for row in found] == [None, *([token] for token in prompt[1:])]
    for row, other in zip(found[1:], alone.prompt_logprobs[1:], strict=True):
        assert row is not None
        assert other is not None
        (one,), (two,) = row.values(), other.values()
        assert one.logprob == pytest.approx(two.logprob, abs=1e-4)
    assert outputs[-1].outputs[0].token_ids == alone.outputs[0].token_ids


def test_sequences_differ_and_a_seed_repeats_them(make_engine: MakeEngine) -> None:
    """Sequences of a request differ, and a seed repeats them anywhere."""
    params = SamplingParams(n=5, temperature=1.5, seed=123, max_tokens=12)
    answers = []
    for engine in (make_engine(), make_engine(seed=9, max_num_batched_tokens=4)):
        engine.generate([[1, 2], [3]], SamplingParams(max_tokens=2), use_tqdm=False)
        output = engine.generate([7, 8, 9], params, use_tqdm=False)[0]
        answers.append([completion.token_ids for completion in output.outputs])
    assert answers[0] == answers[1]
    assert len({tuple(tokens) for tokens in answers[0]}) == 5


def test_engine_seed_decides_without_a_requests(make_engine: MakeEngine) -> None:
    """Without a seed the engine's own decides, and no two requests draw alike."""
    params = SamplingParams(temperature=1.5, max_tokens=12)

    def answers(seed: int) -> list[tuple[int, ...]]:
        outputs = make_engine(seed=seed).generate([[7, 8, 9]] * 4, params, use_tqdm=False)
        return [tuple(output.outputs[0].token_ids) for output in outputs]

    assert answers(0) == answers(0)
    assert len(set(answers(0))) == 4
    assert set(answers(0)) & set(answers(100)) == set()
