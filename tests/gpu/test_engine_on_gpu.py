"""The engine on a GPU gives the tokens that it should: transformers' own, with graphs or not, alone or in a batch.

Every test runs on the CPU too, so that it cannot rot where there is no GPU; the oracle always runs on the CPU in
float32. Sizes of heads and hidden states are those that real models have, and some that fit no tile.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from depth_oracle import d3, greedy_at_depth
from tiny_models import TinyLlama, save_without_layer
from transformers import LlamaForCausalLM
from transformers_oracle import assert_same_tokens, greedy_after

from d3engine import D3, Engine, FullDepth, RequestOutput, SamplingParams, SkipDecode, Speculative
from d3engine.depth import DepthPolicy
from d3engine.model.config import ModelConfig
from d3engine.model.quantization_config import QUANTIZATION_SCHEMES
from d3engine.model.weights import LlamaWeights, load_weights

MakeModel = Callable[..., TinyLlama]
MakePrompts = Callable[..., list[list[int]]]

NUM_TOKENS = 32
LENGTHS = [1, 16, 70]
BFLOAT16_TIE = 0.15
"""Half precision may choose another token only where float32 finds the two likeliest this close."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "multi-head of 16": {"num_key_value_heads": 4},
    "grouped-query of 16": {},
    "multi-query of 20": {"num_key_value_heads": 1, "head_dim": 20},
    "grouped in threes of 64": {"num_attention_heads": 6, "head_dim": 64},
    "multi-head of 128": {"num_attention_heads": 2, "head_dim": 128, "hidden_size": 256, "intermediate_size": 320},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
            "rope_theta": 10_000.0,
        }
    },
}
DEEP: dict[str, Any] = {"num_hidden_layers": 8, "hidden_size": 32, "intermediate_size": 48}
POLICIES: list[DepthPolicy] = [
    D3(0.9, 0.5),
    D3(0.97, 0.25),
    FullDepth(),
    D3(0.9, 0.5, on_skip="copy"),
    SkipDecode(NUM_TOKENS, 3),
]


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the engine runs; products on the GPU keep float32 as it is."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield request.param
    torch.set_float32_matmul_precision(before)


def greedily(depth: DepthPolicy | None = None, tokens: int = NUM_TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, depth=depth)


def engine_of(directory: Path, device: str, dtype: str = "float32", **options: Any) -> Engine:
    settings: dict[str, Any] = {"max_num_seqs": 8, "skip_tokenizer_init": True, "depth": FullDepth()}
    return Engine(directory, device=device, dtype=dtype, **(settings | options))


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_float32_tokens_equal_transformers(
    layout: str, device: str, tiny_llama: MakeModel, make_prompts: MakePrompts
) -> None:
    directory, model = tiny_llama(**LAYOUTS[layout])
    prompts = make_prompts(LENGTHS)
    with engine_of(directory, device) as engine:
        outputs = engine.generate(prompts, greedily(), use_tqdm=False)
    for prompt, tokens in zip(prompts, tokens_of(outputs), strict=True):
        assert len(tokens) == NUM_TOKENS
        assert_same_tokens(tokens, greedy_after(model, prompt, tokens))


def test_bfloat16_tokens_differ_only_at_near_ties(
    device: str, tiny_llama: MakeModel, make_prompts: MakePrompts
) -> None:
    directory, _ = tiny_llama(num_hidden_layers=2)
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).float().eval()
    prompts = make_prompts([5, 12, 30, 18], seed=7)
    with engine_of(directory, device, "bfloat16") as engine:
        outputs = engine.generate(prompts, greedily(), use_tqdm=False)
    for prompt, tokens in zip(prompts, tokens_of(outputs), strict=True):
        assert_same_tokens(tokens, greedy_after(model, prompt, tokens), tie=BFLOAT16_TIE)


def test_graphs_give_the_tokens_of_eager_steps(device: str, tiny_llama: MakeModel, make_prompts: MakePrompts) -> None:
    directory, _ = tiny_llama(**DEEP)
    prompts = make_prompts([3, 20, 33, 9, 41], seed=1)
    params = [greedily(policy, 8 + 6 * nth) for nth, policy in enumerate(POLICIES)]
    answers = []
    for enforce_eager in (False, True):
        with engine_of(directory, device, enforce_eager=enforce_eager) as engine:
            for _ in range(2):  # what is captured by the first call is replayed by the second
                answers.append(tokens_of(engine.generate(prompts, params, use_tqdm=False)))
            alone = [
                tokens_of(engine.generate([p], g, use_tqdm=False))[0] for p, g in zip(prompts, params, strict=True)
            ]
            answers.append(alone)
            stats = engine.stats()
        if device == "cuda":
            assert (stats.graphs_captured > 0) == (not enforce_eager)
    assert all(answer == answers[0] for answer in answers)


def test_drafts_in_graphs_give_the_tokens_of_no_drafts(
    device: str, tiny_llama: MakeModel, make_prompts: MakePrompts, tmp_path: Path
) -> None:
    """A draft model and the verification of its drafts answer as eager steps without drafts."""
    tiny = tiny_llama(**DEEP)
    policy = Speculative(save_without_layer(tiny, 4, tmp_path / "draft"), 3)
    prompts, answers = make_prompts([3, 20, 33, 9], seed=5), []
    params = [greedily(tokens=8 + 6 * nth) for nth in range(len(prompts))]
    for depth in (policy, FullDepth()):
        with engine_of(tiny.directory, device, depth=depth, enforce_eager=depth is not policy) as engine:
            for _ in range(2):  # what is captured by the first call is replayed by the second
                answers.append(tokens_of(engine.generate(prompts, params, use_tqdm=False)))
            stats = engine.stats()
        assert (stats.verifications > 10) == (depth is policy)
        if device == "cuda" and depth is policy:
            assert stats.graphs_captured > 5
            assert stats.eager_steps == 2, "the prompts'"
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("policy", [D3(0.9, 0.5), D3(0.97, 0.25)], ids=["fast", "slow"])
def test_d3_tokens_equal_the_slow_oracle(
    policy: D3, device: str, tiny_llama: MakeModel, make_prompts: MakePrompts
) -> None:
    directory, model = tiny_llama(**DEEP)
    prompts = make_prompts([1, 30, 17], seed=2)
    with engine_of(directory, device, depth=policy) as engine:
        outputs = engine.generate(prompts, greedily(), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = greedy_at_depth(model, prompt, NUM_TOKENS, d3(8, policy.alpha, float(policy.start)))
        assert_same_tokens(output.outputs[0].token_ids, expected)
        assert output.outputs[0].depths == expected.depths


@pytest.mark.parametrize("policies", [[D3(0.9, 0.5)], POLICIES], ids=["one schedule", "many schedules"])
def test_batch_of_many_steps_answers_as_each_request_alone(
    policies: list[DepthPolicy], device: str, tiny_llama: MakeModel, make_prompts: MakePrompts
) -> None:
    """A batch of many steps answers as each request does alone.

    Requests join at different steps, so that rows of every depth share a step; prompts come in pieces.
    """
    directory, _ = tiny_llama(**DEEP)
    prompts = make_prompts([6, 25, 50, 13, 2, 31], seed=3)
    params = [greedily(policies[nth % len(policies)], 30 - 3 * nth) for nth in range(len(prompts))]
    with engine_of(directory, device, enable_prefix_caching=False) as engine:
        alone = [tokens_of(engine.generate([p], g, use_tqdm=False))[0] for p, g in zip(prompts, params, strict=True)]
    found: dict[str, list[int]] = {}
    with engine_of(directory, device, max_num_batched_tokens=24) as engine:
        waiting, step = list(enumerate(zip(prompts, params, strict=True))), 0
        while waiting or engine.has_unfinished_requests():
            if waiting and step % 3 == 0:
                nth, given = waiting.pop(0)
                engine.add_request(str(nth), *given)
            found |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
            step += 1
    assert [found[str(nth)] for nth in range(len(prompts))] == alone


@pytest.mark.parametrize("scheme", QUANTIZATION_SCHEMES)
def test_quantized_tokens_equal_those_of_dequantized_matrices(
    scheme: str, device: str, tiny_llama: MakeModel, make_prompts: MakePrompts
) -> None:
    """Quantized matrices give the tokens of the matrices that they stand for."""
    quantization = pytest.importorskip("d3engine.model.weights")
    directory, _ = tiny_llama(hidden_size=128, intermediate_size=200, head_dim=32)
    config = ModelConfig.from_dict(json.loads((directory / "config.json").read_text()))
    weights = load_weights(directory, config, dtype=torch.float32, device=device, show_progress=False)
    small = quantization.quantize_weights(weights, scheme)
    prompts, answers = make_prompts([1, 18, 40], seed=4), []
    for own, where in ((small, device), (as_floats(small), "cpu")):
        with engine_of(directory, where, weights=own) as engine:
            answers.append(tokens_of(engine.generate(prompts, greedily(), use_tqdm=False)))
    assert answers[0] == answers[1]


def as_floats(weights: LlamaWeights) -> LlamaWeights:
    """The same weights on the CPU, every quantized matrix written out in float32."""

    def as_float(value: Any) -> Any:
        if hasattr(value, "dequantize") and not isinstance(value, torch.Tensor):
            value = value.dequantize(torch.float32)
        return value.cpu() if isinstance(value, torch.Tensor) else value

    def all_of(given: Any) -> Any:
        return replace(given, **{field.name: as_float(getattr(given, field.name)) for field in fields(given)})

    return replace(all_of(weights), layers=tuple(map(all_of, weights.layers)))
