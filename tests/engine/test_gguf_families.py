"""A GGUF file of each family answers as transformers' own class does.
The files are written by the gguf package's writer, whose table of names says what llama.cpp calls each tensor; which
architecture a family becomes there, and whether rows of heads are permuted, is llama.cpp's converter's doing."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf", reason="the extra gguf is not installed")

import numpy as np
import torch
from families import (
    DENSE,
    MINISTRAL_3,
    MUP,
    NO_PAD,
    OWN_HEAD_DIM,
    TIED,
    YARN,
    assert_answers_as,
    granite,
    longrope,
    make_family,
)
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quants
from gguf_files import add_key, write_and_close
from tiny_models import random_prompts
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from d3engine import Engine
from d3engine.errors import InvalidValueError, ModelFormatError
from d3engine.kernels.blocks import BlockLanesWeight, BlockWeight, StackedWeight
from d3engine.model.checkpoint_formats import to_adjacent_pairs, to_half_split
from d3engine.model.config import ModelConfig
from d3engine.model.families import FAMILIES as ROWS
from d3engine.weights_tools.convert import convert_gguf


class InternLM2Config(LlamaConfig):
    """transformers has no such class: in a GGUF file, where its fused matrices are three, it is a Llama."""

    model_type = "internlm2"


class InternLM2ForCausalLM(LlamaForCausalLM):
    config_class = InternLM2Config


AutoConfig.register("internlm2", InternLM2Config)
AutoModelForCausalLM.register(InternLM2Config, InternLM2ForCausalLM)

GRANITE = granite(attention=0.125, residual=0.25, logits=8.0)
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0}
GEMMA3: dict[str, Any] = TIED | {"sliding_window": 20, "query_pre_attn_scalar": 16, "num_hidden_layers": 7}
GEMMA3["rope_parameters"] = {"full_attention": LINEAR, "sliding_attention": PLAIN}
LONGROPE = {pairs: longrope(pairs, original=32, step=0.125) for pairs in (4, 6)}

TRAINED = {"original_max_position_embeddings": 512}
NO_WINDOW = {"sliding_window": None, "sliding_window_pattern": None, "layer_types": ["full_attention"] * 3}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "Ministral within its window": ("ministral", {"sliding_window": 512}),
    "Mistral": ("mistral", {"sliding_window": None}),
    "Ministral 3": ("ministral3", MINISTRAL_3),
    "EXAONE": ("exaone", NO_PAD),
    "InternLM2": ("internlm2", {}),
    "InternLM2 with biases": ("internlm2", {"attention_bias": True}),
    "InternLM3 with biases": ("internlm3", {"qkv_bias": True, "bias": True}),
    "Qwen2": ("qwen2", {}),
    "Qwen2, tied and with yarn": ("qwen2", TIED | {"rope_parameters": YARN}),
    "Qwen3": ("qwen3", {}),
    "Seed-OSS": ("seed_oss", {}),
    "Seed-OSS without biases": ("seed_oss", {"attention_bias": False}),
    "Seed-OSS with a bias of the output": ("seed_oss", {"attention_out_bias": True}),
    "Granite": ("granite", GRANITE | {"attention_bias": True}),
    "Granite, tied": ("granite", GRANITE | TIED),
    "MiniCPM": ("minicpm", MUP | TIED),
    "MiniCPM, untied and with biases": ("minicpm", MUP | {"attention_bias": True}),
    "MiniCPM4": ("minicpm", MUP | {"rope_parameters": LONGROPE[6]["rope_parameters"] | TRAINED}),
    "Phi-3": ("phi3", NO_PAD | {"sliding_window": None}),
    "Phi-3 within its window": ("phi3", NO_PAD | {"sliding_window": 512}),
    "Phi-3 beyond its window": ("phi3", NO_PAD | {"sliding_window": 33}),
    "Phi-3 with longrope": ("phi3", LONGROPE[6]),
    "Phi-4-mini": ("phi3", LONGROPE[4] | TIED | {"partial_rotary_factor": 0.67}),
    "Phi-3 of which half a head is turned": ("phi3", NO_PAD | {"partial_rotary_factor": 0.5}),
    "Granite 4": ("granitemoehybrid", GRANITE | DENSE | TIED),
    "GLM-4 of 2025": ("glm4", NO_PAD),
    "GLM-4 of 2025 without biases, with yarn": (
        "glm4",
        NO_PAD | {"attention_bias": False, "rope_parameters": YARN, "partial_rotary_factor": 0.25},
    ),
    "EXAONE 4": ("exaone4", {"sliding_window": 20, "num_hidden_layers": 5}),
    "EXAONE 4 without a window": ("exaone4", NO_WINDOW),
    "ERNIE 4.5": ("ernie4_5", TIED),
    "ERNIE 4.5 with biases": ("ernie4_5", {"use_bias": True}),
    "SmolLM3": ("smollm3", NO_PAD | TIED | {"num_hidden_layers": 5}),
    "OLMo 2": ("olmo2", {}),
    "OLMo 2, grouped and with yarn": ("olmo2", {"num_key_value_heads": 1, "rope_parameters": YARN}),
    "OLMo 3": (
        "olmo3",
        {"sliding_window": 20, "num_hidden_layers": 5}
        | {"rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}},
    ),
    "OLMo 3 with other layers": (
        "olmo3",
        {"sliding_window": 20, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
        | {"rope_parameters": {"full_attention": PLAIN, "sliding_attention": PLAIN}},
    ),
    "Gemma": ("gemma", TIED),
    "Gemma 2": ("gemma2", TIED | {"sliding_window": 20, "query_pre_attn_scalar": 16}),
    "Gemma 2 of 46 layers": ("gemma2", TIED | {"num_hidden_layers": 46, "query_pre_attn_scalar": 12}),
    "Gemma 3": ("gemma3_text", GEMMA3),
    "Gemma 3 with a cap": ("gemma3_text", GEMMA3 | {"final_logit_softcapping": 3.0}),
}
NAMES = {
    **dict.fromkeys(("ministral", "mistral", "internlm3"), "llama"),
    "olmo3": "olmo2",
    "gemma3_text": "gemma3",
    "granitemoehybrid": "granite",
    "ministral3": "mistral3",
}
"""Families that llama.cpp's converter writes as an architecture of another name."""
PERMUTED = ("llama", "granite", "smollm3", "internlm2", "minicpm", "mistral3")
"""Architectures that llama.cpp rotates in adjacent pairs, so that its converter permutes their rows."""
OWN_HEADS = (*OWN_HEAD_DIM, "internlm3", "mistral")
"""Whose head_dim is a field here."""
AS_NEAR: dict[str, Any] = {"tolerance": 1.5e-5}


def write(
    path: Path,
    model: PreTrainedModel,
    *,
    changes: dict[str, Any] | None = None,
    matrices: GGMLQuantizationType = GGMLQuantizationType.F32,
) -> Path:
    """The model as llama.cpp's converter writes it; a key of `changes` is put in, or None leaves it out."""
    # Of a type in `matrices` that rounds, the model gets the rounded values too.
    config = model.config
    architecture = NAMES.get(config.model_type, config.model_type)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    keys: dict[str, Any] = {"block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings}
    keys |= {"embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size}
    keys |= {"attention.head_count": heads, "attention.head_count_kv": kv_heads}
    keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    keys |= {"attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.freq_base": float(rope["rope_theta"])}
    keys["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if rope["rope_type"] in ("yarn", "linear"):
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if architecture == "phi3" or config.model_type in ("olmo3", "gemma2", "gemma3_text"):
        keys["attention.sliding_window"] = config.sliding_window or 0
    if architecture == "phi3":
        keys["rope.scaling.original_context_length"] = config.original_max_position_embeddings
    if rope["rope_type"] == "longrope" and architecture == "phi3":
        scale = config.max_position_embeddings / config.original_max_position_embeddings
        logarithms = math.log(scale) / math.log(config.original_max_position_embeddings)
        keys["rope.scaling.attn_factor"] = math.sqrt(1 + logarithms)
    if config.model_type == "exaone4" and config.sliding_window:
        keys["attention.sliding_window"] = config.sliding_window
    if config.model_type == "granitemoehybrid":
        keys |= {"expert_count": 0, "expert_used_count": 0, "rope.scaling.finetuned": True}
        keys["expert_shared_feed_forward_length"] = config.shared_intermediate_size
        keys |= {"ssm.conv_kernel": 4, "ssm.state_size": 256, "ssm.group_count": 1, "ssm.inner_size": 96}
        keys |= {"ssm.time_step_rank": 4, "attention.head_count_kv": [kv_heads] * config.num_hidden_layers}
    if architecture == "gemma2":
        keys |= {"attn_logit_softcapping": config.attn_logit_softcapping}
    if getattr(config, "final_logit_softcapping", None):
        keys |= {"final_logit_softcapping": config.final_logit_softcapping}
    if architecture in ("granite", "minicpm"):
        keys |= {"embedding_scale": float(config.embedding_multiplier), "logit_scale": config.logits_scaling}
        keys["residual_scale"] = config.residual_multiplier
    if architecture == "minicpm" and rope["rope_type"] == "longrope":
        keys["rope.scaling.type"] = "longrope"
    if architecture == "granite":
        keys["attention.scale"] = config.attention_multiplier
    if architecture == "mistral3":
        keys |= {"rope.scaling.yarn_beta_fast": rope["beta_fast"], "rope.scaling.yarn_beta_slow": 1.0}
        keys["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
        keys["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    if config.model_type == "olmo3" and rope["rope_type"] == "yarn":
        keys["rope.scaling.attn_factor"] = 0.1 * math.log(rope["factor"]) + 1
    writer = GGUFWriter(path, architecture)
    for name in ("short_factor", "long_factor"):
        if name in rope:
            factors = np.array(rope[name], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{name.removesuffix('_factor')}.weight", factors)
    if config.model_type == "olmo3" or (config.model_type == "exaone4" and config.sliding_window):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    for key, value in (keys | (changes or {})).items():
        if value is not None:
            add_key(writer, f"{architecture}.{key}", value)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "a", "b", "<|end|>" if architecture == "phi3" else "<end_of_turn>"])
    writer.add_token_scores([0.0, -1.0, -2.0, -3.0])
    writer.add_token_types([2, 1, 1, 3])
    writer.add_unk_token_id(0)
    names = get_tensor_name_map(MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    for name, parameter in parameters_of(model):
        tensor = parameter.detach()
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        module = name.split(".")[-2] if architecture in PERMUTED else ""
        permuted = {"q_proj": heads, "k_proj": kv_heads}.get(module)
        if permuted is not None:
            tensor = to_adjacent_pairs(tensor, permuted)
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if matrices == GGMLQuantizationType.F32 or tensor.ndim == 1:
            writer.add_tensor(own, tensor.contiguous().numpy())
            continue
        packed = quants.quantize(tensor.contiguous().numpy(), matrices)
        rounded = torch.from_numpy(quants.dequantize(packed, matrices))
        parameter.data.copy_(rounded if permuted is None else to_half_split(rounded, permuted))
        writer.add_tensor(own, packed, raw_dtype=matrices)
    write_and_close(writer)
    return path


def parameters_of(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters by the names that the gguf package knows; Granite 4's one MLP as those of a Granite 3."""
    for name, parameter in model.named_parameters():
        if "shared_mlp.input_linear" in name:
            for part, own in zip(("gate", "up"), parameter.chunk(2), strict=True):
                yield name.replace("shared_mlp.input_linear", f"mlp.{part}_proj"), own
        else:
            yield name.replace("shared_mlp.output_linear", "mlp.down_proj"), parameter


def make(folder: Path, name: str, **sizes: Any) -> PreTrainedModel:
    return make_family(folder / "saved", FAMILIES[name], OWN_HEADS, **sizes).model


@pytest.mark.parametrize("name", FAMILIES)
def test_a_gguf_file_of_a_family_answers_as_transformers_does(name: str, tmp_path: Path) -> None:
    model = make(tmp_path, name)
    assert_answers_as(model, write(tmp_path / "model.gguf", model), **AS_NEAR)


def test_a_gemma_3_has_windows_in_the_layers_that_its_file_names(tmp_path: Path) -> None:
    model = make(tmp_path, "Gemma 3")
    for period, kinds in ((3, (20, 20, None, 20, 20, None, 20)), (None, (20,) * 5 + (None, 20))):
        changes = {"attention.sliding_window_pattern": period}
        file = write(tmp_path / f"{period}.gguf", model, changes=changes)
        assert ModelConfig.from_directory(file).windows == kinds


def test_a_minicpm_file_of_2024_has_the_multipliers_of_then(tmp_path: Path) -> None:
    """llama.cpp's converter wrote none: its code had those of the models of 1B and 2B."""
    then = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}
    model = make_family(tmp_path / "saved", ("minicpm", TIED | then), OWN_HEADS).model
    absent = dict.fromkeys(("embedding_scale", "residual_scale", "logit_scale"))
    assert_answers_as(model, write(tmp_path / "model.gguf", model, changes=absent), **AS_NEAR)


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize(
    "name",
    ["Mistral", "OLMo 2", "Gemma", "Gemma 2", "Gemma 3", "GLM-4 of 2025", "Phi-3 of which half a head is turned"],
)
def test_its_matrices_may_stay_in_blocks(name: str, tmp_path: Path) -> None:
    """A tied embedding too, whose rows are scaled when they are read; rows of heads in another order as well."""
    model = make(tmp_path, name, hidden_size=64, intermediate_size=96)
    file = write(tmp_path / "model.gguf", model, matrices=GGMLQuantizationType.Q8_0)
    held = (BlockWeight, BlockLanesWeight, StackedWeight)
    assert_answers_as(model, file, held=held, **AS_NEAR, activations="float32", dtype="auto")


@pytest.mark.parametrize("name", ["Gemma", "Gemma 2", "Gemma 3", "Phi-3"])
def test_the_end_of_a_turn_ends_an_answer(name: str, tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", make(tmp_path, name))
    assert ModelConfig.from_directory(file).eos_token_ids == (3,)


OWN_ROPES = ["Phi-3 with longrope", "Phi-4-mini", "GLM-4 of 2025", "EXAONE 4", "EXAONE 4 without a window", "ERNIE 4.5"]
READ_AGAIN = [*OWN_ROPES, "Ministral 3", "OLMo 2", "OLMo 3", "Gemma", "Gemma 2", "Gemma 3"]


@pytest.mark.parametrize("name", ["Granite 4", "Phi-3", "Granite", "MiniCPM4", "SmolLM3", "Seed-OSS", *READ_AGAIN])
def test_so_does_the_directory_that_it_is_converted_to(name: str, tmp_path: Path) -> None:
    """The engine answers from it as transformers' model does, and transformers reads most of them again."""
    model = make(tmp_path, name)
    convert_gguf(write(tmp_path / "model.gguf", model), tmp_path / "converted", show_progress=False)
    assert_answers_as(model, tmp_path / "converted", **AS_NEAR)
    if name in READ_AGAIN:
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "converted", dtype=torch.float32, pad_token_id=0)
        ids = torch.tensor(random_prompts([30]))
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-3)


def test_every_family_runs_from_a_file_of_some_architecture() -> None:
    tested = {model_type for model_type, _ in FAMILIES.values()}
    assert {family.model_type for family in ROWS} == tested | {"glm"}  # whose files are of "chatglm", and refused
    own = {family.model_type for family in ROWS if family.gguf is None} - {"llama", "glm"}
    assert own == NAMES.keys() - {"gemma3_text", "ministral3"}


REFUSED: list[tuple[str, str, Any, str]] = [
    ("Granite", "logit_scale", None, "granite: logit_scale is missing"),
    ("Granite", "attention.scale", 0.0, "attention_multiplier must be .*above 0; got 0.0"),
    ("Granite", "rope.scaling.finetuned", False, "rope.scaling.finetuned must be true or absent"),
    ("Qwen2", "residual_scale", 0.5, "qwen2.residual_scale must be absent"),
    ("Phi-3", "attention.sliding_window", None, "attention.sliding_window is missing"),
    ("Qwen2", "attention.sliding_window", 64, "attention.sliding_window must be absent"),
    ("Gemma 3", "attention.sliding_window_pattern", 0, "gemma3: .*sliding_window_pattern must be an integer from 1"),
    ("OLMo 3", "rope.scaling.attn_factor", 1.5, "must be absent, 1, or 1.13863 as yarn has it for its factor; got 1.5"),
    ("Gemma 2", "attn_logit_softcapping", None, "gemma2: attn_logit_softcapping is missing"),
    ("Gemma 3", "attn_logit_softcapping", 50.0, "gemma3.attn_logit_softcapping must be absent"),
    ("Qwen2", "rope.dimension_count", 8, "rope.dimension_count must be the length of a head, 12"),
    ("Phi-3", "rope.dimension_count", 14, "rope.dimension_count must be .* from 1 to 12; got 14"),
    ("Phi-3", "rope.dimension_count", 3, "partial_rotary_factor must be .* an even number of channels"),
    ("Phi-3", "rope.scaling.attn_factor", 1.5, "attn_factor must be absent or 1, sinc"),
    ("Phi-3 with longrope", "rope.dimension_count", 8, "short_factor must be .* each of 4 pairs of channels; got"),
    ("Phi-3 with longrope", "rope.scaling.type", "linear", "type must be longrope or absent with rope_factors_long"),
    ("Ministral 3", "rope.scaling.original_context_length", None, "original_context_length is missing"),
    ("MiniCPM", "logit_scale", 0.0, "minicpm: logit_scale must be a finite number above 0; got 0.0"),
    ("Granite 4", "attention.head_count_kv", [2, 0, 2], "head_count_kv must be a number, or a list"),  # of mamba
    ("Granite 4", "attention.head_count_kv", [0, 0, 0], "head_count_kv must be an integer from 1"),
    ("Granite 4", "expert_shared_feed_forward_length", 64, "must be absent, or feed_forward_length=80"),
    ("Granite 4", "expert_count", 8, "granite.expert_count must be absent or 0"),
]


@pytest.mark.parametrize(("name", "key", "value", "message"), REFUSED)
def test_what_no_family_has_is_refused_by_its_key(
    name: str, key: str, value: Any, message: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "model.gguf", make(tmp_path, name), changes={key: value})
    with pytest.raises((ModelFormatError, InvalidValueError), match=message):
        Engine(file, skip_tokenizer_init=True)


def test_another_architecture_is_refused_by_those_that_run(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "chatglm")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    known = "one of ernie4_5, exaone, exaone4, gemma, gemma2, gemma3, glm4, granite, internlm2, llama, minicpm"
    known += ", mistral3, olmo2, phi3, qwen2, qwen3, seed_oss, smollm3"
    others = (
        r"\(Mistral and InternLM3 are llama, OLMo 3 is olmo2; of GLM-4 9B the safetensors of its -hf repository run\)"
    )
    with pytest.raises(ModelFormatError, match=f"general.architecture must be {known} {others}; got 'chatglm'"):
        Engine(tmp_path / "model.gguf", skip_tokenizer_init=True)
