"""Architectures that are a Llama under another name answer as transformers' own classes do.

Oracles are the families' own classes with random weights, saved as transformers saves them and read from there.
"""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from depth_oracle import Exit, d3, greedy_at_depth, greedy_with_exits
from multi_step import steps_by_itself
from observers import observer_of
from tiny_models import TINY, TinyLlama, random_prompts, save_random
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    InternLM3Config,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
)
from transformers_oracle import Answer, assert_same_tokens, greedy_after

from d3engine import D3, Engine, SamplingParams
from d3engine.depth import EarlyExit
from d3engine.errors import InvalidValueError
from d3engine.loading import resolve

NUM_TOKENS = 64
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)

MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.11,
    "residual_multiplier": 0.22,
    "logits_scaling": 5.0,
}
HEAD_DIM_OF_THEIR_OWN = (SeedOssConfig, Qwen3Config)  # whatever the hidden size
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 32}
FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "Mistral": (MistralConfig, {"sliding_window": None}),
    "Mistral with heads of its own width": (MistralConfig, {"sliding_window": None, "head_dim": 20}),
    "Mistral within its window": (MistralConfig, {"sliding_window": 512}),
    "Qwen2": (Qwen2Config, {}),
    "Qwen2, tied and with yarn": (Qwen2Config, {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "Qwen2 within its window": (
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 1},
    ),
    "Seed-OSS": (SeedOssConfig, {}),
    "Seed-OSS with biases everywhere": (SeedOssConfig, {"attention_out_bias": True, "mlp_bias": True}),
    "Granite": (GraniteConfig, MULTIPLIERS | {"attention_bias": True, "mlp_bias": True}),
    "Granite, tied": (GraniteConfig, MULTIPLIERS | {"tie_word_embeddings": True}),
    "Granite with a large norm epsilon": (GraniteConfig, MULTIPLIERS | {"rms_norm_eps": 0.1}),
    "Granite with one multiplier": (GraniteConfig, {"attention_multiplier": 0.2}),
    "Phi-3": (Phi3Config, {"pad_token_id": None}),
    "Phi-3, tied and multi-query": (
        Phi3Config,
        {"pad_token_id": None, "tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
    "InternLM3": (InternLM3Config, {}),
    "InternLM3 with biases": (InternLM3Config, {"qkv_bias": True, "bias": True}),
    "Qwen3": (Qwen3Config, {}),
    "Qwen3, tied, with biases and yarn": (
        Qwen3Config,
        {"tie_word_embeddings": True, "attention_bias": True, "rope_parameters": YARN, "rms_norm_eps": 1e-3},
    ),
    "Qwen3, multi-query": (Qwen3Config, {"num_key_value_heads": 1, "head_dim": 20}),
    "Qwen3 within its window": (
        Qwen3Config,
        {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 1},
    ),
    "SmolLM3": (SmolLM3Config, {"pad_token_id": None, "tie_word_embeddings": True, "no_rope_layer_interval": 2}),
    "SmolLM3 with biases, yarn and a list of its own": (
        SmolLM3Config,
        {
            "pad_token_id": None,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": YARN,
            "no_rope_layers": [0, 1, 0, 0],
        },
    ),
}


def make(directory: Path, name: str) -> TinyLlama:
    kind, changes = FAMILIES[name]
    sizes = {field: value for field, value in TINY.items() if field != "head_dim" or kind in HEAD_DIM_OF_THEIR_OWN}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**(sizes | changes)), dtype=torch.float32)
    return save_random(directory, model)


@torch.inference_mode()
def assert_equals_transformers(directory: Path, model: PreTrainedModel) -> None:
    """Greedy tokens are transformers', and the logits that they came from within 1.1e-5 of the largest.

    transformers sees an answer in one pass: where each token is its choice after those before, so is the whole.
    """
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=-1)
    with Engine(directory, skip_tokenizer_init=True, dtype="float32") as engine:
        outputs = engine.generate(random_prompts([23]), params, use_tqdm=False)
    for output in outputs:
        prompt, completion = output.prompt_token_ids, output.outputs[0]
        logits = model(torch.tensor([prompt + completion.token_ids[:-1]])).logits[0, len(prompt) - 1 :]
        assert_same_tokens(completion.token_ids, Answer.of_logits(logits))
        found = [[row[token].logprob for token in range(TINY["vocab_size"])] for row in completion.logprobs]
        tolerance = 1.1e-5 * float(logits.abs().max())
        torch.testing.assert_close(torch.tensor(found), logits.log_softmax(-1), rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_answers_as_transformers_does(name: str, tmp_path: Path) -> None:
    assert_equals_transformers(*make(tmp_path, name))


def test_internlm3_under_the_name_of_its_own_code_is_the_same_model(tmp_path: Path) -> None:
    directory, model = make(tmp_path, "InternLM3 with biases")
    own = {"architectures": ["InternLM3ForCausalLM"], "qkv_bias": True, "bias": True}
    change_config(directory, own, leave=("attention_bias", "mlp_bias"))
    assert_equals_transformers(directory, model)


def test_the_old_spelling_of_llama_is_a_llama(tmp_path: Path) -> None:
    torch.manual_seed(0)
    directory, model = save_random(tmp_path, LlamaForCausalLM(LlamaConfig(**TINY)))
    change_config(directory, {"architectures": ["LLaMAForCausalLM"]})
    assert_equals_transformers(directory, model)


def test_a_llama_model_without_a_head_answers_with_its_embedding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    LlamaModel(LlamaConfig(**(TINY | {"tie_word_embeddings": True}))).save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert_equals_transformers(tmp_path, model)


@pytest.mark.parametrize("name", ["Qwen2", "Granite", "Phi-3", "Qwen3", "SmolLM3"])
def test_d3_on_a_family_equals_the_oracle_of_its_layers(name: str, tmp_path: Path) -> None:
    directory, model = make(tmp_path, name)
    (prompt,) = random_prompts([9])
    with Engine(directory, skip_tokenizer_init=True, dtype="float32", depth=D3(alpha=0.9, start=0.4)) as engine:
        (output,) = engine.generate([prompt], GREEDY, use_tqdm=False)
    oracle = deepcopy(model)
    with torch.no_grad():  # what transformers' Granite multiplies outside of its layers
        oracle.model.embed_tokens.weight.mul_(getattr(model.config, "embedding_multiplier", 1.0))
        oracle.lm_head.weight.div_(getattr(model.config, "logits_scaling", 1.0))
    answer = greedy_at_depth(oracle, prompt, NUM_TOKENS, d3(TINY["num_hidden_layers"], 0.9, 0.4))
    assert output.outputs[0].depths == answer.depths
    assert min(answer.depths) < TINY["num_hidden_layers"]
    assert_same_tokens(output.outputs[0].token_ids, answer)


@pytest.mark.parametrize("executor", ["graphs", "native"])
@pytest.mark.parametrize("name", ["Qwen3", "SmolLM3"])
def test_an_executor_that_decodes_by_itself_answers_as_transformers_does(
    name: str, executor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "executor_for", lambda *given: executor)
    directory, model = make(tmp_path, name)
    prompts = random_prompts([5, 14])
    with Engine(directory, skip_tokenizer_init=True, dtype="float32") as engine:
        outputs = engine.generate(prompts, GREEDY, use_tqdm=False)
        assert steps_by_itself(engine) > NUM_TOKENS / 2
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_same_tokens(output.outputs[0].token_ids, greedy_after(model, prompt, output.outputs[0].token_ids))


@pytest.mark.parametrize("name", ["Qwen3", "SmolLM3"])
def test_entries_projected_for_layers_that_a_token_left_out_are_those_that_the_layers_would_make(
    name: str, tmp_path: Path
) -> None:
    directory, model = make(tmp_path, name)
    prompts = random_prompts([5, 14])
    with Engine(directory, skip_tokenizer_init=True, dtype="float32", depth=EarlyExit(0.1)) as engine:
        outputs = engine.generate(prompts, GREEDY, use_tqdm=False)
    answers = greedy_with_exits(model, prompts, NUM_TOKENS, Exit("softmax_max", 0.1), "project")
    for output, answer in zip(outputs, answers, strict=True):
        assert output.outputs[0].depths == answer.depths
        assert len(set(answer.depths)) == TINY["num_hidden_layers"]
        assert_same_tokens(output.outputs[0].token_ids, answer)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["Qwen3", "SmolLM3"])
def test_the_analyses_see_the_states_of_transformers(name: str, tmp_path: Path) -> None:
    directory, model = make(tmp_path, name)
    (prompt,) = random_prompts([23])
    expected = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    observer = observer_of(directory)
    for states in observer.layers(prompt, len(prompt)):
        torch.testing.assert_close(states.before, expected[states.layer][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.model.norm(states.after), expected[-1][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Mistral within its window", "Qwen2 within its window", "Qwen3 within its window"])
def test_a_sliding_window_below_the_length_is_refused_and_within_it_the_model_runs(name: str, tmp_path: Path) -> None:
    directory, model = make(tmp_path, name)
    model.config.sliding_window = 40
    change_config(directory, {"sliding_window": 40})
    refused = r"sliding_window must be null or at least max_model_len={}.*max_model_len=40 .*; got 40"
    for length in (41, 512):
        with pytest.raises(InvalidValueError, match=refused.format(length)):
            Engine(directory, skip_tokenizer_init=True, max_model_len=length)
    (prompt,) = random_prompts([8])
    with Engine(directory, skip_tokenizer_init=True, dtype="float32") as engine:
        assert engine.max_model_len == 40
        params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
        (output,) = engine.generate([prompt], params, use_tqdm=False)
    (completion,) = output.outputs
    assert len(completion.token_ids) == 32
    assert_same_tokens(completion.token_ids, greedy_after(model, prompt, completion.token_ids))


def change_config(directory: Path, changes: dict[str, Any], leave: tuple[str, ...] = ()) -> None:
    file = directory / "config.json"
    contents = {name: value for name, value in json.loads(file.read_text()).items() if name not in leave}
    file.write_text(json.dumps(contents | changes))
