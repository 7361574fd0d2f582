"""Every key of config.json and generation_config.json that transformers reads is read, refused, named, or harmless."""

import ast
import importlib
import json
import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from d3engine.engine.model_directory import default_sampling_params, resolve_max_model_len
from d3engine.errors import InvalidValueError, ModelFormatError
from d3engine.model.config import _NEUTRAL, _NOT_APPLIED, ModelConfig
from d3engine.model.families import FAMILIES

# Those of transformers: other tests add classes for families that it lacks.
MODEL_TYPES = [
    name
    for name in dict.fromkeys(family.model_type for family in FAMILIES)
    if name in CONFIG_MAPPING and CONFIG_MAPPING[name].__module__.startswith("transformers.")
]
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2}
REQUIRED: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {
        "layer_types": ["attention"] * 2,
        "num_local_experts": 0,
        "shared_intermediate_size": 48,
        "position_embedding_type": "rope",
        "mamba_n_heads": 4,
    }
}
"""What a family's config must have to be of a model that runs."""
HARMLESS: dict[str, Any] = {
    **dict.fromkeys(("attention_dropout", "residual_dropout", "embd_pdrop", "resid_pdrop"), 0.9),  # in training
    "initializer_range": 0.5,
    "pad_token_id": 3,
    "use_cache": False,
    "output_hidden_states": True,
    "chunk_size_feed_forward": 3,
    "id2label": {"0": "a"},
    "label2id": {"a": 0},
    "problem_type": "regression",
    "transformers_version": "0.0",
}
"""Keys without effect on a logit, which a test shows, each with an unusual value."""
UNREACHABLE = {
    "return_dict",  # transformers 5 fails without it
    "original_max_position_embeddings",  # for a kind of rope that is refused, or read with those that have it
    "number_of_conv_states",  # of kinds of layers that `layer_types` cannot name
    "_attn_implementation",  # which kernel computes the same
    "head_dim_key",  # a local variable
    # Of Gemma 3's classes that see images, in the same file as the one that does not.
    *("image_size", "image_token_id", "layer_norm_eps", "mm_tokens_per_image", "patch_size", "vision_config"),
}
OF_OTHERS = {
    "granitemoehybrid": {
        *(f"mamba_{name}" for name in ("chunk_size", "conv_bias", "d_conv", "d_head", "d_state", "expand", "n_groups")),
        *("mamba_n_heads", "mamba_proj_bias", "time_step_limit"),
        "layers_block_type",  # another name of layer_types
        *("intermediate_size", "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef"),
    }
}
"""Keys of layers that a family's config must say it has none of: mamba layers and experts."""
SHARED = ("masking_utils", "modeling_rope_utils", "cache_utils")


def config_class(model_type: str) -> type[PreTrainedConfig]:
    return CONFIG_MAPPING[model_type]


def keys_of(model_type: str) -> set[str]:
    """The fields of the family's config class, and what the code that runs the model reads of a config."""
    kind = config_class(model_type)
    own = kind.__module__.replace("configuration_", "modeling_").removeprefix("transformers.")
    modeling = [own] if importlib.util.find_spec(f"transformers.{own}") else ["models.llama.modeling_llama"]
    reads = {name for module in (*SHARED, *modeling) for name in reads_in(module)}
    methods = {name for name in reads if callable(getattr(kind, name, None))}
    return {field.name for field in fields(kind)} | (reads - methods)


def reads_in(module: str) -> set[str]:
    path = Path(transformers.__file__).parent / f"{module.replace('.', '/')}.py"
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("config"):
            found.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            of, name = node.args[0], node.args[1]
            if ast.unparse(of).endswith("config"):
                found.add(name.value if isinstance(name, ast.Constant) else ast.unparse(name))
    return found


def read(model_type: str, **changes: Any) -> ModelConfig:
    return ModelConfig.from_dict({"model_type": model_type} | SIZES | REQUIRED.get(model_type, {}) | changes)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_key_of_transformers_is_read_refused_or_harmless(model_type: str) -> None:
    """Every key of transformers is read, refused, or known to be without effect."""
    assert {"is_causal", "rope_parameters", "rms_norm_eps"} <= keys_of(model_type)
    for key in sorted(keys_of(model_type) - HARMLESS.keys() - UNREACHABLE - OF_OTHERS.get(model_type, set())):
        with pytest.raises(ModelFormatError, match=key):
            read(model_type, **({"use_sliding_window": True} | {key: ["?"]}))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_keys_without_effect_change_no_logit_in_transformers(model_type: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = SIZES | REQUIRED.get(model_type, {}) | {"head_dim": 8}
    config = AutoConfig.for_model(model_type, **sizes, eos_token_id=2, pad_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    path, ids = tmp_path / "config.json", torch.randint(3, 64, (1, 16))
    usual, found = json.loads(path.read_text()), []
    for changes in ({}, HARMLESS):
        path.write_text(json.dumps(usual | changes))
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
        with torch.no_grad():
            found.append(model(ids, use_cache=False).logits)
        assert ModelConfig.from_directory(tmp_path).vocab_size == 64
    assert torch.equal(*found)


@pytest.mark.parametrize("key", _NEUTRAL)
def test_key_that_changes_the_model_is_refused(key: str) -> None:
    """A key that changes the model is refused unless its value has no effect."""
    with pytest.raises(ModelFormatError, match=f"{key} must be .*; got 'other'"):
        read("llama", **{key: "other"})
    for value in (None, *_NEUTRAL[key][0]):
        assert read("llama", **{key: value}) == read("llama")


@pytest.mark.parametrize("value", [False, 0, "", "false"])
def test_a_model_that_is_not_causal_is_refused(value: object) -> None:
    with pytest.raises(ModelFormatError, match="is_causal must be true, since a token attends to those before it"):
        read("llama", is_causal=value)


@pytest.mark.parametrize("model_type", ["llama", "seed_oss", "granite", "internlm3", "granitemoehybrid"])
def test_a_window_bounds_the_length_in_every_family(model_type: str) -> None:
    config = read(model_type, sliding_window=16, max_position_embeddings=64)
    with pytest.raises(InvalidValueError, match="sliding_window must be null or at least max_model_len=17"):
        resolve_max_model_len(17, config)
    assert resolve_max_model_len(16, config) == 16
    with pytest.raises(ModelFormatError, match=r"layer_types must be 'full_attention' for every layer|mamba"):
        read(model_type, layer_types=["sliding_attention"] * 2)


READ = {"temperature", "top_p", "min_p", "top_k", "repetition_penalty", "max_new_tokens", "do_sample"}
READ |= {"eos_token_id", "bos_token_id"}
NO_CHANGE = {
    *("max_length", "pad_token_id", "transformers_version", "_from_model_config", "use_cache", "cache_implementation"),
    *("cache_config", "max_cache_len", "output_attentions", "output_hidden_states", "output_scores", "output_logits"),
    *("return_dict_in_generate", "compile_config", "disable_compile", "continuous_batching_config", "low_memory"),
    *("prefill_chunk_size", "early_stopping", "length_penalty", "remove_invalid_values", "decoder_start_token_id"),
    # How tokens are drafted, which changes no greedy answer.
    *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind"),
    *("target_lookbehind", "assistant_ensemble_weight", "speculation_type", "use_mtp"),
}
"""Lengths that `max_tokens` decides, output flags, memory, and what only beams or an encoder have."""


def test_generation_config_key_is_read_named_or_harmless() -> None:
    """Every key of a generation config is read, named, or known to be without effect."""
    assert set(GenerationConfig().__dict__) <= READ | NO_CHANGE | _NOT_APPLIED.keys()


def test_generation_config_keys_not_applied_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What a generation config asks for and is not applied is named in the log."""
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"num_beams": 4, "typical_p": 1.0, "min_new_tokens": 0, "suppress_tokens": [1]}))
    with caplog.at_level(logging.WARNING):
        default_sampling_params(tmp_path)
    assert "these are not applied: num_beams=4, suppress_tokens=[1]" in caplog.text
    caplog.clear()
    path.write_text(json.dumps({"num_beams": 1, "no_repeat_ngram_size": 0, "max_length": 20}))
    default_sampling_params(tmp_path)
    assert not caplog.text
