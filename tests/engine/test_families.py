"""Architectures that are a Llama under another name answer as transformers' own classes do.
Oracles are the families' own classes with random weights, saved as transformers saves them and read from there."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import llama3_rope
from depth_oracle import Exit, d3, greedy_at_depth, greedy_with_exits
from families import (
    DENSE,
    MINISTRAL_3,
    MUP,
    NO_PAD,
    TIED,
    YARN,
    assert_answers_as,
    granite,
    longrope,
    make_family,
)
from multi_step import steps_by_itself
from observers import observer_of
from safetensors.torch import load_file, save_file
from stepping import generated, greedy
from tiny_models import TINY, TinyLlama, random_prompts, save_random
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedModel,
)
from transformers_oracle import assert_answers, assert_same_tokens, greedy_after

from d3engine import D3, Engine
from d3engine.depth import EarlyExit
from d3engine.engine import resolve
from d3engine.errors import InvalidValueError, ModelFormatError
from d3engine.model.source import open_checkpoint
from d3engine.research.bridges.passage import Passage
from d3engine.weights_tools.inspection import verify_model
from d3engine.weights_tools.quantize import quantize_model

NUM_TOKENS = 40
GREEDY = greedy(NUM_TOKENS)

MULTIPLIERS = granite(attention=0.11, residual=0.22, logits=5.0)
LLAMA3 = llama3_rope(32, rope_theta=10_000.0)

LONGROPE = longrope(pairs=6, original=20, step=0.1)
ORIGINAL = "original_max_position_embeddings"
LONG = {"max_position_embeddings": 4096, "original_max_position_embeddings": 512}
BIASED = {"attention_bias": True}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
LATER_LAYERS = {"use_sliding_window": True, "max_window_layers": 1}
"""Those that a window is for, where there is one."""
NO_WINDOW = {"sliding_window": None, "sliding_window_pattern": None, "layer_types": ["full_attention"] * 3}
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5_000.0},
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Mistral": ("mistral", {"sliding_window": None}),
    "Mistral with another width of heads": ("mistral", {"sliding_window": None, "head_dim": 20}),
    "Mistral within its window": ("mistral", {"sliding_window": 512}),
    "Mistral with a window": ("mistral", {"sliding_window": 20}),
    "Mistral that sees itself alone": ("mistral", {"sliding_window": 1}),
    "Ministral with a window": ("ministral", {"sliding_window": 20}),
    "Ministral with a window in some layers": ("ministral", {"sliding_window": 20} | ALTERNATING),
    "Ministral 3": ("ministral3", MINISTRAL_3),
    "Ministral 3 with a window": ("ministral3", MINISTRAL_3 | TIED | {"sliding_window": 20}),
    "Qwen2": ("qwen2", {}),
    "Qwen2, tied and with yarn": ("qwen2", TIED | {"rope_parameters": YARN}),
    "Qwen2 within its window": ("qwen2", LATER_LAYERS | {"sliding_window": 512}),
    "Qwen2 with a window from its second layer on": ("qwen2", LATER_LAYERS | {"sliding_window": 20}),
    "Seed-OSS": ("seed_oss", {}),
    "Seed-OSS with biases everywhere": ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    "Granite": ("granite", MULTIPLIERS | BIASED | {"mlp_bias": True}),
    "Granite, tied": ("granite", MULTIPLIERS | TIED),
    "Granite with a large norm epsilon": ("granite", MULTIPLIERS | {"rms_norm_eps": 0.1}),
    "Granite with one multiplier": ("granite", {"attention_multiplier": 0.2}),
    "MiniCPM": ("minicpm", MUP | TIED),
    "MiniCPM, untied and with biases": ("minicpm", MUP | BIASED | {"num_key_value_heads": 1}),
    "MiniCPM4": ("minicpm", MUP | {"rope_parameters": LONGROPE["rope_parameters"] | {ORIGINAL: 20}}),
    "MiniCPM4 within its trained length": (
        "minicpm",
        MUP | {"rope_parameters": LONGROPE["rope_parameters"] | {ORIGINAL: 512}},
    ),
    "Phi-3": ("phi3", NO_PAD),
    "Phi-3 with a window": ("phi3", NO_PAD | {"sliding_window": 33}),
    "Phi-3, tied and multi-query": ("phi3", NO_PAD | TIED | {"num_key_value_heads": 1}),
    "Phi-3 with longrope": ("phi3", LONGROPE),
    "Phi-3 with longrope within its trained length": ("phi3", LONGROPE | LONG),
    "Phi-4-mini": ("phi3", longrope(4, 20, 0.1, attention_factor=1.1) | {"partial_rotary_factor": 0.67} | LONG),
    "Granite 4": ("granitemoehybrid", MULTIPLIERS | DENSE | TIED),
    "Granite 4, untied": ("granitemoehybrid", MULTIPLIERS | DENSE),
    "Granite 4 with biases and without rope": (
        "granitemoehybrid",
        MULTIPLIERS | DENSE | BIASED | {"position_embedding_type": None},
    ),
    "GLM-4": ("glm", NO_PAD),
    "GLM-4 without biases, with yarn": (
        "glm",
        NO_PAD | {"attention_bias": False, "rope_parameters": YARN, "partial_rotary_factor": 0.25},
    ),
    "GLM-4 of 2025": ("glm4", NO_PAD),
    "GLM-4 of 2025, multi-query": ("glm4", NO_PAD | {"num_key_value_heads": 1, "head_dim": 20}),
    "EXAONE 4": ("exaone4", {"sliding_window": 20, "num_hidden_layers": 5}),
    "EXAONE 4 with its own layers": (
        "exaone4",
        ALTERNATING | {"sliding_window": 20, "sliding_window_pattern": "LG", "rope_parameters": LLAMA3},
    ),
    "EXAONE 4 without a window": ("exaone4", NO_WINDOW),
    "ERNIE 4.5": ("ernie4_5", TIED),
    "ERNIE 4.5, untied and with biases": ("ernie4_5", {"use_bias": True, "head_dim": 20}),
    "EXAONE": ("exaone", NO_PAD),
    "EXAONE with Llama 3's rope": ("exaone", NO_PAD | {"rope_parameters": LLAMA3}),
    "InternLM3": ("internlm3", {}),
    "InternLM3 with biases": ("internlm3", {"qkv_bias": True, "bias": True}),
    "Qwen3": ("qwen3", {}),
    "Qwen3, tied, with biases and yarn": ("qwen3", TIED | BIASED | {"rope_parameters": YARN, "rms_norm_eps": 1e-3}),
    "Qwen3, multi-query": ("qwen3", {"num_key_value_heads": 1, "head_dim": 20}),
    "Qwen3 within its window": ("qwen3", LATER_LAYERS | {"sliding_window": 512}),
    "Qwen3 with a window in one layer": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 20}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "SmolLM3 with a window": ("smollm3", NO_PAD | LATER_LAYERS | {"sliding_window": 20}),
    "SmolLM3": ("smollm3", NO_PAD | TIED | {"no_rope_layer_interval": 2}),
    "SmolLM3 with biases, yarn and a list of its own": (
        "smollm3",
        NO_PAD | BIASED | {"mlp_bias": True, "rope_parameters": YARN, "no_rope_layers": [0, 1, 0, 0]},
    ),
    "OLMo 2": ("olmo2", {}),
    "OLMo 2, tied, with biases and yarn": (
        "olmo2",
        TIED | BIASED | {"rope_parameters": YARN, "num_key_value_heads": 1},
    ),
    "OLMo 3": ("olmo3", {"sliding_window": 20, "num_hidden_layers": 5}),
    "OLMo 3 with yarn": (
        "olmo3",
        ALTERNATING
        | {"sliding_window": 20}
        | {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}},
    ),
    "Gemma": ("gemma", {}),
    "Gemma, multi-query and untied": ("gemma", {"num_key_value_heads": 1, "tie_word_embeddings": False}),
    "Gemma 2": ("gemma2", {"sliding_window": 20, "query_pre_attn_scalar": 24}),
    "Gemma 2 with low caps": (
        "gemma2",
        {"sliding_window": 512, "query_pre_attn_scalar": 1}
        | {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0},
    ),
    "Gemma 2 without caps": (
        "gemma2",
        {"sliding_window": 20, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "Gemma 3": ("gemma3_text", {"sliding_window": 20, "num_hidden_layers": 7}),
    "Gemma 3 with linear rope": (
        "gemma3_text",
        ALTERNATING | {"sliding_window": 20, "rope_parameters": TWO_ROPES, "final_logit_softcapping": 3.0},
    ),
}


def make(directory: Path, name: str) -> TinyLlama:
    return make_family(directory, FAMILIES[name])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_answers_as_transformers_does(name: str, tmp_path: Path) -> None:
    assert_answers_as(make(tmp_path, name).model, tmp_path)


OWN_NAMES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "InternLM3": (
        "InternLM3 with biases",
        {"architectures": ["InternLM3ForCausalLM"], "qkv_bias": True, "bias": True},
        ("attention_bias", "mlp_bias"),
    ),
    "EXAONE": (
        "EXAONE",
        {"architectures": ["ExaoneForCausalLM"], "num_layers": TINY["num_hidden_layers"]}
        | {"layer_norm_epsilon": 1e-5, "activation_function": "silu"},
        ("num_hidden_layers", "rms_norm_eps", "hidden_act"),
    ),
}
"""By family: a model of it, the fields of its authors' code, and those of transformers that these stand for."""


@pytest.mark.parametrize("family", OWN_NAMES)
def test_family_under_the_names_of_its_code_is_the_same_model(family: str, tmp_path: Path) -> None:
    """A family under the names of its authors' code is the same model."""
    name, own, others = OWN_NAMES[family]
    directory, model = make(tmp_path, name)
    change_config(directory, own, leave=others)
    assert_answers_as(model, directory)


INTERNLM2 = (
    {"model.embed_tokens": "model.tok_embeddings", "lm_head": "output", "self_attn.o_proj": "attention.wo"}
    | {"mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2"}
    | {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"}
)


def save_internlm2(directory: Path, model: PreTrainedModel) -> None:
    """A Llama without biases of the MLP as InternLM2's own code, which is not in transformers, names and fuses it."""
    config = model.config
    tensors = {
        name.replace(other, own): tensor
        for name, tensor in model.state_dict().items()
        for other, own in INTERNLM2.items()
        if other in name
    }
    tensors["model.norm.weight"] = model.state_dict()["model.norm.weight"]
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        for kind in ("weight", "bias") if config.attention_bias else ("weight",):
            parts = [getattr(one, kind) for one in (attention.q_proj, attention.k_proj, attention.v_proj)]
            heads = [part.unflatten(0, (config.num_key_value_heads, -1, config.head_dim)) for part in parts]
            tensors[f"model.layers.{number}.attention.wqkv.{kind}"] = torch.cat(heads, dim=1).flatten(0, 2)
    directory.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    kept = {name: value for name, value in config.to_dict().items() if name not in ("attention_bias", "mlp_bias")}
    own = {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": config.attention_bias}
    (directory / "config.json").write_text(json.dumps(kept | own))


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}, {"num_key_value_heads": 1}])
def test_internlm2_is_the_llama_that_its_fused_matrix_is_made_of(changes: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    _, model = save_random(tmp_path / "llama", LlamaForCausalLM(LlamaConfig(**(TINY | changes))))
    save_internlm2(tmp_path / "own", model)
    assert_answers_as(model, tmp_path / "own")
    quantize_model(tmp_path / "own", tmp_path / "quantized", "int8", show_progress=False)
    quantize_model(tmp_path / "llama", tmp_path / "expected", "int8", show_progress=False)
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("quantized", "expected"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    verify_model(tmp_path / "quantized", show_progress=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, r"wqkv.weight' of shape \[128, 48\] is not 3 groups of 3 heads, as .*config.json"),
        ({"num_key_value_heads": None}, r"wqkv.weight' of shape \[128, 48\] is not 4 groups of 3 heads"),
    ],
)
def test_a_fused_matrix_of_other_heads_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_internlm2(tmp_path / "own", LlamaForCausalLM(LlamaConfig(**TINY)))
    change_config(tmp_path / "own", changes)
    with pytest.raises(ModelFormatError, match=message), open_checkpoint(tmp_path / "own"):
        pass


def test_a_tensor_under_both_names_is_refused(tmp_path: Path) -> None:
    directory, model = make(tmp_path, "EXAONE")
    twice = {"model.norm.weight": model.model.norm.weight, "transformer.ln_f.weight": model.model.norm.weight.clone()}
    save_file(twice, directory / "model.safetensors")
    with pytest.raises(ModelFormatError, match=r"is 'model.norm.weight', which is there already"):
        Engine(directory, skip_tokenizer_init=True)


def test_the_old_spelling_of_llama_is_a_llama(tmp_path: Path) -> None:
    torch.manual_seed(0)
    directory, model = save_random(tmp_path, LlamaForCausalLM(LlamaConfig(**TINY)))
    change_config(directory, {"architectures": ["LLaMAForCausalLM"]})
    assert_answers_as(model, directory)


def test_a_llama_model_without_a_head_answers_with_its_embedding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    LlamaModel(LlamaConfig(**(TINY | {"tie_word_embeddings": True}))).save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert_answers_as(model, tmp_path)


HEADLESS = {
    "as Qwen3-Embedding-0.6B is published": ("qwen3", "Qwen3ForCausalLM", True),
    "as Qwen3-Embedding-8B is published": ("qwen3", "Qwen3ForCausalLM", False),
    "as sentence-transformers saves a Qwen3": ("qwen3", "Qwen3Model", True),
    "a Qwen2": ("qwen2", "Qwen2Model", False),
    "a Mistral": ("mistral", "MistralModel", False),
}
"""Model type, name of the architecture, and whether the config ties the head that is not there."""


@pytest.mark.parametrize("case", HEADLESS)
def test_a_model_without_head_or_prefix_is_its_family(case: str, tmp_path: Path) -> None:
    """Its tensors have no prefix, and the embedding is the head."""
    model_type, architecture, is_tied = HEADLESS[case]
    directory, model = make_family(tmp_path, (model_type, {"tie_word_embeddings": True, "sliding_window": None}))
    model.base_model.save_pretrained(directory)
    assert not any(name.startswith("model.") for name in load_file(directory / "model.safetensors"))
    change_config(directory, {"architectures": [architecture], "tie_word_embeddings": is_tied})
    assert_answers_as(model, directory)
    quantize_model(directory, tmp_path / "quantized", "int8", show_progress=False)
    verify_model(tmp_path / "quantized", show_progress=False)


@pytest.mark.parametrize("names", ["published", "of transformers 5"])
def test_text_model_of_a_gemma_3_with_images_answers(names: str, tmp_path: Path) -> None:
    """The tower of images is left; fields of `text_config` that it leaves out have their defaults."""
    text = TINY | {"num_hidden_layers": 7, "sliding_window": 20, "tie_word_embeddings": True}
    text |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(text_config=text, vision_config=vision | {"image_size": 28, "patch_size": 14})
    torch.manual_seed(0)
    directory, model = save_random(tmp_path, Gemma3ForConditionalGeneration(config))
    tensors = load_file(directory / "model.safetensors")
    assert any("vision_tower" in name for name in tensors)
    if names == "published":
        kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "sliding_window", "vocab_size")
        change_config(directory, {"text_config": {"model_type": "gemma3_text"} | {name: text[name] for name in kept}})
    else:
        renamed = {name.replace("language_model.model.", "model.language_model."): one for name, one in tensors.items()}
        save_file(renamed, directory / "model.safetensors")
    assert_answers_as(model, directory)


def test_text_model_of_a_ministral_3_with_images_answers(tmp_path: Path) -> None:
    """The tower of images is left, and texts up to the length from which queries grow are read."""
    text = TINY | MINISTRAL_3 | TIED | {"model_type": "ministral3"}
    vision = {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "head_dim": 16, "image_size": 28, "patch_size": 14}
    torch.manual_seed(0)
    config = Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=True)
    directory, model = save_random(tmp_path, Mistral3ForConditionalGeneration(config))
    assert any("vision_tower" in name for name in load_file(directory / "model.safetensors"))
    assert_answers_as(model, directory)
    with pytest.raises(
        InvalidValueError, match=r"scaling_beta must be absent for max_model_len=513 \(max_model_len=512"
    ):
        Engine(directory, skip_tokenizer_init=True, max_model_len=513)


OTHER_LAYERS = ["OLMo 2", "OLMo 3", "Gemma", "Gemma 2", "Gemma 2 with low caps", "Gemma 3", "EXAONE 4"]
OTHER_LAYERS += ["Phi-4-mini", "GLM-4 without biases, with yarn", "GLM-4 of 2025", "ERNIE 4.5"]
GRANITE_4, MINICPM = "Granite 4, untied", "MiniCPM, untied and with biases"
"""Untied: with a tied head a scaled embedding repeats one token, whatever the layers do."""
NEW_LAYERS = [*OTHER_LAYERS, GRANITE_4]


@pytest.mark.parametrize("name", ["Qwen2", "Granite", MINICPM, "Ministral 3", "Phi-3", "Qwen3", "SmolLM3", *NEW_LAYERS])
def test_d3_on_a_family_equals_the_oracle_of_its_layers(name: str, tmp_path: Path) -> None:
    directory, model = make(tmp_path, name)
    (prompt,) = random_prompts([9])
    outputs = generated(directory, [prompt], GREEDY, dtype="float32", depth=D3(alpha=0.9, start=0.4))
    oracle = deepcopy(model)
    with torch.no_grad():  # what transformers' Granite multiplies outside of its layers
        oracle.model.embed_tokens.weight.mul_(getattr(model.config, "embedding_multiplier", 1.0))
        oracle.lm_head.weight.div_(getattr(model.config, "logits_scaling", 1.0))
    num_layers = model.config.num_hidden_layers
    answer = greedy_at_depth(oracle, prompt, NUM_TOKENS, d3(num_layers, 0.9, 0.4))
    assert_answers(outputs, [answer])
    assert min(answer.depths) < num_layers


@pytest.mark.parametrize("name", ["Qwen3", "SmolLM3", MINICPM, *NEW_LAYERS])
def test_executor_decoding_by_itself_answers_as_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An executor that decodes by itself answers as transformers does."""
    directory, model = make(tmp_path, name)
    prompts = random_prompts([5, 14])
    for executor in ("graphs", "native"):
        monkeypatch.setattr(resolve, "executor_for", lambda *given, executor=executor: executor)
        with Engine(directory, skip_tokenizer_init=True, dtype="float32") as engine:
            outputs = engine.generate(prompts, GREEDY, use_tqdm=False)
            assert steps_by_itself(engine) > NUM_TOKENS / 2
        for prompt, output in zip(prompts, outputs, strict=True):
            found = output.outputs[0].token_ids
            assert_same_tokens(found, greedy_after(model, prompt, found))


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("name", ["OLMo 2", "Gemma 2", "Gemma 3", "Phi-4-mini", "GLM-4", GRANITE_4, MINICPM])
def test_quantized_layers_natively_answer_as_the_reference(
    name: str, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quantized layers answer alike natively and by the reference."""
    directory, _ = make(tmp_path / "given", name)
    quantize_model(directory, tmp_path / "quantized", scheme, show_progress=False)
    answers = []
    for executor in ("eager", "native"):
        monkeypatch.setattr(resolve, "executor_for", lambda *given, executor=executor: executor)
        options = {"dtype": "float32", "activations": "float32"}
        outputs = generated(tmp_path / "quantized", random_prompts([5, 14]), GREEDY, **options)
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", ["Qwen3", "SmolLM3", "OLMo 2", "Gemma 2", "Gemma 3", "GLM-4", "ERNIE 4.5"])
def test_projected_entries_are_those_of_the_layers(name: str, tmp_path: Path) -> None:
    """Entries projected for layers left out are those that the layers would make."""
    directory, model = make(tmp_path, name)
    prompts = random_prompts([5, 14])
    outputs = generated(directory, prompts, GREEDY, dtype="float32", depth=EarlyExit(0.1))
    answers = greedy_with_exits(model, prompts, NUM_TOKENS, Exit("softmax_max", 0.1), "project")
    assert_answers(outputs, answers)
    assert all(len(set(answer.depths)) > 1 for answer in answers)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["Qwen3", "SmolLM3", "Qwen3 with a window in one layer", *OTHER_LAYERS])
def test_the_analyses_see_the_states_of_transformers(name: str, tmp_path: Path) -> None:
    directory, model = make(tmp_path, name)
    (prompt,) = random_prompts([23])
    expected = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    observer = observer_of(directory)
    for states in observer.layers(prompt, len(prompt)):
        torch.testing.assert_close(states.before, expected[states.layer][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.model.norm(states.after), expected[-1][0], rtol=1e-4, atol=1e-4)
    passed = Passage(observer).at_full_depth(prompt, len(prompt), range(model.config.num_hidden_layers))
    for layer, before in passed.items():
        torch.testing.assert_close(before, expected[layer][0], rtol=1e-4, atol=1e-4)
    logits = model(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(observer.logits(states.after), logits, rtol=1e-4, atol=1e-3)


def change_config(directory: Path, changes: dict[str, Any], leave: tuple[str, ...] = ()) -> None:
    file = directory / "config.json"
    contents = {name: value for name, value in json.loads(file.read_text()).items() if name not in leave}
    file.write_text(json.dumps(contents | changes))
