"""Draft and verify gives full depth's answers, token for token, whatever drafts and however its work is cut."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TinyLlama
from transformers_oracle import assert_same_tokens, greedy

from d3engine import D3, Engine, FullDepth, LayerTable, SamplingParams, SkipDecode, UnifiedSkip
from d3engine.depth import DepthPolicy, Lossless, SelfSpeculative, policy_from_dict
from d3engine.depth.draft_rule import MAX_DRAFT_LENGTH
from d3engine.errors import InvalidValueError
from d3engine.plan import Plan
from d3engine.request import CompletionOutput, RequestOutput

LAYERS = 6
EVERY = list(range(LAYERS))
WAKING = [EVERY, [0, 5], [0, 1, 5], EVERY, [0, 2, 4], [1, 2, 3], [0]]
DRAFTS: list[DepthPolicy] = [
    D3(0.9, 0.5),
    D3(0.8, 0.3, tail=2),
    D3(0.97, 0.7),
    D3(0.5, 0.1),  # its window begins at the first layer: no layer at all is left, nothing can be kept
    SkipDecode(12, 2),
    UnifiedSkip(2),
    LayerTable(WAKING, on_skip="project"),
    LayerTable([EVERY, [0, 1, 2, 3, 5], [0, 1]], on_skip="none"),
]


def all_policies(length: int, **options: Any) -> list[DepthPolicy]:
    lossless: list[DepthPolicy] = [Lossless(d, length, **options) for d in DRAFTS if isinstance(d, D3)]
    return lossless + [SelfSpeculative(d, length, **options) for d in DRAFTS]


@pytest.fixture(scope="module")
def llama(tiny_llama: Callable[..., TinyLlama]) -> TinyLlama:
    return tiny_llama(num_hidden_layers=LAYERS, hidden_size=32, intermediate_size=48)


@pytest.fixture(scope="module")
def make_engine(llama: TinyLlama) -> Callable[..., Engine]:
    def make(**changes: Any) -> Engine:
        arguments: dict[str, Any] = {"max_num_seqs": 8, "block_size": 4, "depth": FullDepth(), "device": "cpu"}
        return Engine(llama.directory, skip_tokenizer_init=True, max_model_len=96, **(arguments | changes))

    return make


@pytest.fixture(scope="module")
def full(make_engine: Callable[..., Engine]) -> Callable[[list[int], SamplingParams], CompletionOutput]:
    """The answer of full depth, by an engine of its own."""
    engine = make_engine()
    known: dict[str, CompletionOutput] = {}

    def answer(prompt: list[int], params: SamplingParams) -> CompletionOutput:
        key = repr((prompt, params))
        if key not in known:
            known[key] = engine.generate(prompt, replace(params, depth=FullDepth()), use_tqdm=False)[0].outputs[0]
        return known[key]

    return answer


Full = Callable[[list[int], SamplingParams], CompletionOutput]


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
    for output, params in zip(outputs, requests, strict=True):
        (found,) = output.outputs
        wanted = full(output.prompt_token_ids, params)
        assert found.token_ids == wanted.token_ids, params.depth
        assert (found.finish_reason, found.stop_reason) == (wanted.finish_reason, wanted.stop_reason)
        assert len(found.depths) == len(found.token_ids)
        assert (found.logprobs is None) == (wanted.logprobs is None)
        for row, other in zip(found.logprobs or [], wanted.logprobs or [], strict=True):
            assert row.keys() == other.keys()
            assert all(row[token].logprob == pytest.approx(other[token].logprob, abs=1e-3) for token in row)


# -- greedy ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "batch"), [(1, 7), (2, 1), (4, 8), (7, 3)])
def test_greedy_answers_are_those_of_full_depth(
    make_engine: Callable[..., Engine], full: Full, length: int, batch: int
) -> None:
    policies = all_policies(length) + all_policies(length, adaptive=True, stop_probability=0.1)
    prompts = some_prompts(length, len(policies))
    numbers = random.Random(batch)
    requests = [
        SamplingParams(temperature=0, max_tokens=numbers.randint(1, 26), depth=policy, ignore_eos=True)
        for policy in policies
    ]
    engine = make_engine(max_num_seqs=batch)
    outputs = engine.generate(prompts, requests, use_tqdm=False)
    assert_answers_of_full_depth(outputs, requests, full)
    stats = engine.stats()
    assert stats.acceptance_rate is not None
    assert 0 < stats.acceptance_rate < 1
    assert stats.kv_bytes_saved_at_end == 0


@pytest.mark.parametrize("policy", [Lossless(D3(0.9, 0.5), 3), SelfSpeculative(UnifiedSkip(2), 4)], ids=repr)
def test_greedy_answers_are_those_of_transformers(
    make_engine: Callable[..., Engine], llama: TinyLlama, policy: DepthPolicy
) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, depth=policy)
    outputs = make_engine().generate(some_prompts(5, 6), params, use_tqdm=False)
    for output in outputs:
        assert_same_tokens(output.outputs[0].token_ids, greedy(llama.model, output.prompt_token_ids, 30))


@pytest.mark.parametrize("alpha", [0.99, 0.9, 0.7])
@pytest.mark.parametrize("start", [0.2, 0.5, 0.8])
def test_lossless_d3_is_lossless_at_any_alpha_and_start(
    make_engine: Callable[..., Engine], full: Full, alpha: float, start: float
) -> None:
    prompts = some_prompts(3, 8)
    requests = [
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, depth=Lossless(D3(alpha, start), 1 + nth))
        for nth in range(len(prompts))
    ]
    assert_answers_of_full_depth(make_engine().generate(prompts, requests, use_tqdm=False), requests, full)
