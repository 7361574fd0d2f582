"""A GGUF file of each family answers as transformers' own class does.

The files are written by the gguf package's writer, whose table of names says what llama.cpp calls each tensor; which
architecture a family becomes there, and whether rows of heads are permuted, is llama.cpp's converter's doing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf", reason="the extra gguf is not installed")

import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quants
from tiny_models import TINY, random_prompts, save_random
from transformers import (
    AutoModelForCausalLM,
    Ernie4_5Config,
    Exaone4Config,
    ExaoneConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GraniteConfig,
    GraniteMoeHybridConfig,
    InternLM3Config,
    LlamaConfig,
    LlamaForCausalLM,
    MinistralConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
)
from transformers_oracle import Answer, assert_same_tokens

from d3engine import Engine, SamplingParams
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


AutoModelForCausalLM.register(InternLM2Config, InternLM2ForCausalLM)

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 32}
GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.125,
    "residual_multiplier": 0.25,
    "logits_scaling": 8.0,
}
TIED: dict[str, Any] = {"tie_word_embeddings": True}
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
GEMMA3: dict[str, Any] = {
    "sliding_window": 20,
    "query_pre_attn_scalar": 16,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
        "sliding_attention": PLAIN,
    },
}


def longrope(pairs: int) -> dict[str, Any]:
    """Of a Phi-3 whose long factors hold for texts of 33 tokens and more."""
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0}
    for name, step in (("short_factor", 0.125), ("long_factor", 1.5)):
        rope[name] = [1 + step * pair for pair in range(pairs)]
    return {"pad_token_id": None, "original_max_position_embeddings": 32, "rope_parameters": rope}


FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "Llama with biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "Ministral within its window": (MinistralConfig, {"sliding_window": 512}),
    "Mistral": (MistralConfig, {"sliding_window": None}),
    "EXAONE": (ExaoneConfig, {"pad_token_id": None}),
    "InternLM2": (InternLM2Config, {}),
    "InternLM2 with biases": (InternLM2Config, {"attention_bias": True}),
    "InternLM3 with biases": (InternLM3Config, {"qkv_bias": True, "bias": True}),
    "Qwen2": (Qwen2Config, {}),
    "Qwen2, tied and with yarn": (Qwen2Config, {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "Qwen3": (Qwen3Config, {}),
    "Seed-OSS": (SeedOssConfig, {}),
    "Seed-OSS without biases": (SeedOssConfig, {"attention_bias": False}),
    "Seed-OSS with a bias of the output": (SeedOssConfig, {"attention_out_bias": True}),
    "Granite": (GraniteConfig, GRANITE | {"attention_bias": True}),
    "Granite, tied": (GraniteConfig, GRANITE | {"tie_word_embeddings": True}),
    "Phi-3": (Phi3Config, {"pad_token_id": None, "sliding_window": None}),
    "Phi-3 within its window": (Phi3Config, {"pad_token_id": None, "sliding_window": 512}),
    "Phi-3 beyond its window": (Phi3Config, {"pad_token_id": None, "sliding_window": 33}),
    "Phi-3 with longrope": (Phi3Config, longrope(6)),
    "Phi-4-mini": (Phi3Config, longrope(4) | {"partial_rotary_factor": 0.67, "tie_word_embeddings": True}),
    "Phi-3 of which half a head is turned": (Phi3Config, {"pad_token_id": None, "partial_rotary_factor": 0.5}),
    "Granite 4": (
        GraniteMoeHybridConfig,
        GRANITE
        | {"num_local_experts": 0, "shared_intermediate_size": 80, "layer_types": ["full_attention"] * 3}
        | {"position_embedding_type": "rope", "mamba_n_heads": 4, "tie_word_embeddings": True},
    ),
    "GLM-4 of 2025": (Glm4Config, {"pad_token_id": None}),
    "GLM-4 of 2025 without biases, with yarn": (
        Glm4Config,
        {"pad_token_id": None, "attention_bias": False, "rope_parameters": YARN, "partial_rotary_factor": 0.25},
    ),
    "EXAONE 4": (Exaone4Config, {"sliding_window": 20, "num_hidden_layers": 5}),
    "EXAONE 4 without a window": (
        Exaone4Config,
        {"sliding_window": None, "sliding_window_pattern": None, "layer_types": ["full_attention"] * 3},
    ),
    "ERNIE 4.5": (Ernie4_5Config, {"tie_word_embeddings": True}),
    "ERNIE 4.5 with biases": (Ernie4_5Config, {"use_bias": True}),
    "SmolLM3": (SmolLM3Config, {"pad_token_id": None, "tie_word_embeddings": True, "num_hidden_layers": 5}),
    "OLMo 2": (Olmo2Config, {}),
    "OLMo 2, grouped and with yarn": (Olmo2Config, {"num_key_value_heads": 1, "rope_parameters": YARN}),
    "OLMo 3": (
        Olmo3Config,
        {
            "sliding_window": 20,
            "num_hidden_layers": 5,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": PLAIN,
            },
        },
    ),
    "OLMo 3 with other layers": (
        Olmo3Config,
        {
            "sliding_window": 20,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {"full_attention": PLAIN, "sliding_attention": PLAIN},
        },
    ),
    "Gemma": (GemmaConfig, {"tie_word_embeddings": True}),
    "Gemma 2": (Gemma2Config, TIED | {"sliding_window": 20, "query_pre_attn_scalar": 16}),
    "Gemma 2 of 46 layers": (Gemma2Config, TIED | {"num_hidden_layers": 46, "query_pre_attn_scalar": 12}),
    "Gemma 3": (Gemma3TextConfig, TIED | GEMMA3 | {"num_hidden_layers": 7}),
    "Gemma 3 with a cap": (Gemma3TextConfig, TIED | GEMMA3 | {"final_logit_softcapping": 3.0, "num_hidden_layers": 7}),
}
NAMES = {
    **dict.fromkeys(("ministral", "mistral", "internlm3"), "llama"),
    "olmo3": "olmo2",
    "gemma3_text": "gemma3",
    "granitemoehybrid": "granite",
}
"""Families that llama.cpp's converter writes as an architecture of another name."""
PERMUTED = ("llama", "granite", "smollm3", "internlm2")
"""Architectures that llama.cpp rotates in adjacent pairs, so that its converter permutes their rows."""
OWN_HEADS = (  # whose head_dim is a field
    *(SeedOssConfig, Qwen3Config, InternLM3Config, MinistralConfig, MistralConfig),
    *(GemmaConfig, Gemma2Config, Gemma3TextConfig, Glm4Config, Exaone4Config, Ernie4_5Config),
)


def write(
    path: Path,
    model: PreTrainedModel,
    *,
    changes: dict[str, Any] | None = None,
    matrices: GGMLQuantizationType = GGMLQuantizationType.F32,
) -> Path:
    """The model as llama.cpp's converter writes it; a key of `changes` is put in, or None leaves it out.

    Of a type in `matrices` that rounds, the model gets the rounded values too.
    """
    config = model.config
    architecture = NAMES.get(config.model_type, config.model_type)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    keys: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if rope["rope_type"] == "yarn":
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    if rope["rope_type"] == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}
    if architecture == "phi3" or config.model_type in ("olmo3", "gemma2", "gemma3_text"):
        keys["attention.sliding_window"] = config.sliding_window or 0
    if architecture == "phi3":
        keys["rope.scaling.original_context_length"] = config.original_max_position_embeddings
    if rope["rope_type"] == "longrope":
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
    if architecture == "granite":
        keys |= {
            "embedding_scale": config.embedding_multiplier,
            "attention.scale": config.attention_multiplier,
            "residual_scale": config.residual_multiplier,
            "logit_scale": config.logits_scaling,
        }
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
            kind = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}[type(value)]
            getattr(writer, f"add_{kind}")(f"{architecture}.{key}", value)
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
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def parameters_of(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters by the names that the gguf package knows; Granite 4's one MLP as those of a Granite 3."""
    for name, parameter in model.named_parameters():
        if "shared_mlp.input_linear" in name:
            for part, own in zip(("gate", "up"), parameter.chunk(2), strict=True):
                yield name.replace("shared_mlp.input_linear", f"mlp.{part}_proj"), own
        else:
            yield name.replace("shared_mlp.output_linear", "mlp.down_proj"), parameter


def make(folder: Path, name: str) -> PreTrainedModel:
    kind, changes = FAMILIES[name]
    sizes = {field: value for field, value in TINY.items() if field != "head_dim" or kind in OWN_HEADS}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**deepcopy(sizes | changes)), dtype=torch.float32)
    return save_random(folder / "saved", model).model


@torch.inference_mode()
def assert_answers_as(model: PreTrainedModel, source: Path, held: Any = object, **options: Any) -> None:
    """Greedy tokens are transformers', and log-probabilities as near as sums in float32 are.

    Matrices are of a type in `held`.
    """
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=-1)
    options = {"dtype": "float32", "max_model_len": 512} | options
    with Engine(source, skip_tokenizer_init=True, **options) as engine:
        assert isinstance(engine.executor.model.weights.layers[0].qkv, held)
        (output,) = engine.generate(random_prompts([23]), params, use_tqdm=False)
    prompt, completion = output.prompt_token_ids, output.outputs[0]
    logits = model(torch.tensor([prompt + completion.token_ids[:-1]])).logits[0, len(prompt) - 1 :]
    assert_same_tokens(completion.token_ids, Answer.of_logits(logits))
    found = [[row[token].logprob for token in range(TINY["vocab_size"])] for row in completion.logprobs]
    tolerance = 1.5e-5 * float(logits.abs().max())
    torch.testing.assert_close(torch.tensor(found), logits.log_softmax(-1), rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_gguf_file_of_a_family_answers_as_transformers_does(name: str, tmp_path: Path) -> None:
    model = make(tmp_path, name)
    assert_answers_as(model, write(tmp_path / "model.gguf", model))


def test_a_gemma_3_has_windows_in_the_layers_that_its_file_names(tmp_path: Path) -> None:
    model = make(tmp_path, "Gemma 3")
    for period, kinds in ((3, (20, 20, None, 20, 20, None, 20)), (None, (20,) * 5 + (None, 20))):
        changes = {"attention.sliding_window_pattern": period}
        file = write(tmp_path / f"{period}.gguf", model, changes=changes)
        assert ModelConfig.from_directory(file).windows == kinds


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize(
    "name",
    ["Mistral", "OLMo 2", "Gemma", "Gemma 2", "Gemma 3", "GLM-4 of 2025", "Phi-3 of which half a head is turned"],
)
def test_its_matrices_may_stay_in_blocks(name: str, tmp_path: Path) -> None:
    """A tied embedding too, whose rows are scaled when they are read; rows of heads in another order as well."""
    kind, changes = FAMILIES[name]
    sizes = TINY | {"hidden_size": 64, "intermediate_size": 96}
    sizes = {field: value for field, value in sizes.items() if field != "head_dim" or kind in OWN_HEADS}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**(sizes | changes)), dtype=torch.float32)
    model = save_random(tmp_path / "saved", model).model
    file = write(tmp_path / "model.gguf", model, matrices=GGMLQuantizationType.Q8_0)
    held = (BlockWeight, BlockLanesWeight, StackedWeight)
    assert_answers_as(model, file, held, activations="float32", dtype="auto")


@pytest.mark.parametrize("name", ["Gemma", "Gemma 2", "Gemma 3", "Phi-3"])
def test_the_end_of_a_turn_ends_an_answer(name: str, tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", make(tmp_path, name))
    assert ModelConfig.from_directory(file).eos_token_ids == (3,)


OWN_ROPES = ["Phi-3 with longrope", "Phi-4-mini", "GLM-4 of 2025", "EXAONE 4", "EXAONE 4 without a window", "ERNIE 4.5"]
CONVERTED = [
    *OWN_ROPES,
    "Granite 4",
    "Phi-3",
    "Granite",
    "SmolLM3",
    "Seed-OSS",
    "OLMo 2",
    "OLMo 3",
    "Gemma",
    "Gemma 2",
    "Gemma 3",
]


@pytest.mark.parametrize("name", CONVERTED)
def test_so_does_the_directory_that_it_is_converted_to(name: str, tmp_path: Path) -> None:
    model = make(tmp_path, name)
    convert_gguf(write(tmp_path / "model.gguf", model), tmp_path / "converted", show_progress=False)
    assert_answers_as(model, tmp_path / "converted")


@pytest.mark.parametrize("name", ["OLMo 2", "OLMo 3", "Gemma", "Gemma 2", "Gemma 3", *OWN_ROPES])
def test_transformers_reads_that_directory_too(name: str, tmp_path: Path) -> None:
    model = make(tmp_path, name)
    convert_gguf(write(tmp_path / "model.gguf", model), tmp_path / "converted", show_progress=False)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "converted", dtype=torch.float32, pad_token_id=0)
    ids = torch.tensor(random_prompts([30]))
    torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-3)


def test_every_family_runs_from_a_file_of_some_architecture() -> None:
    tested = {kind.model_type for kind, _ in FAMILIES.values()}
    assert {family.model_type for family in ROWS} == tested | {"glm"}  # whose files are of "chatglm", and refused
    own = {family.model_type for family in ROWS if family.gguf is None} - {"llama", "glm"}
    assert own == NAMES.keys() - {"gemma3_text"}


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no scale": ("Granite", {"logit_scale": None}, "granite: logit_scale is missing"),
    "a scale of zero": ("Granite", {"attention.scale": 0.0}, "attention_multiplier must be .*above 0; got 0.0"),
    "no rope at all": ("Granite", {"rope.scaling.finetuned": False}, "rope.scaling.finetuned must be true or absent"),
    "a scale of another family": ("Qwen2", {"residual_scale": 0.5}, "qwen2.residual_scale must be absent"),
    "a window left out": ("Phi-3", {"attention.sliding_window": None}, "attention.sliding_window is missing"),
    "a window elsewhere": ("Qwen2", {"attention.sliding_window": 64}, "attention.sliding_window must be absent"),
    "flags of layers that are none": (
        "Gemma 3",
        {"attention.sliding_window_pattern": 0},
        "gemma3: attention.sliding_window_pattern must be an integer from 1",
    ),
    "another factor of rotations": (
        "OLMo 3",
        {"rope.scaling.attn_factor": 1.5},
        "rope.scaling.attn_factor must be absent, 1, or 1.13863 as yarn has it for its factor; got 1.5",
    ),
    "a cap left out": ("Gemma 2", {"attn_logit_softcapping": None}, "gemma2: attn_logit_softcapping is missing"),
    "a cap of scores": ("Gemma 3", {"attn_logit_softcapping": 50.0}, "gemma3.attn_logit_softcapping must be absent"),
    "part of a head": ("Qwen2", {"rope.dimension_count": 8}, "rope.dimension_count must be the length of a head, 12"),
    "more than a head": ("Phi-3", {"rope.dimension_count": 14}, "rope.dimension_count must be .* from 1 to 12; got 14"),
    "half a pair": (
        "Phi-3",
        {"rope.dimension_count": 3},
        "partial_rotary_factor must be .* an even number of channels",
    ),
    "an attention factor alone": ("Phi-3", {"rope.scaling.attn_factor": 1.5}, "attn_factor must be absent or 1, sinc"),
    "factors for another length": (
        "Phi-3 with longrope",
        {"rope.dimension_count": 8},
        "short_factor must be .* one for each of 4 pairs of channels; got",
    ),
    "factors and another rope": (
        "Phi-3 with longrope",
        {"rope.scaling.type": "linear"},
        "rope.scaling.type must be longrope or absent with rope_factors_long",
    ),
    "no trained length": (
        "Phi-3 with longrope",
        {"rope.scaling.original_context_length": None},
        "rope.scaling.original_context_length is missing",
    ),
    "layers of mamba": (
        "Granite 4",
        {"attention.head_count_kv": [2, 0, 2]},
        "head_count_kv must be a number, or a list",
    ),
    "a list of nothing": (
        "Granite 4",
        {"attention.head_count_kv": [0, 0, 0]},
        "head_count_kv must be an integer from 1",
    ),
    "another width": (
        "Granite 4",
        {"expert_shared_feed_forward_length": 64},
        "must be absent, or feed_forward_length=80",
    ),
    "experts": ("Granite 4", {"expert_count": 8}, "granite.expert_count must be absent or 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_family_cannot_have_is_refused_by_its_key(case: str, tmp_path: Path) -> None:
    name, changes, message = REFUSED[case]
    file = write(tmp_path / "model.gguf", make(tmp_path, name), changes=changes)
    with pytest.raises((ModelFormatError, InvalidValueError), match=message):
        Engine(file, skip_tokenizer_init=True)


def test_another_architecture_is_refused_by_those_that_run(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "chatglm")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    known = "one of ernie4_5, exaone, exaone4, gemma, gemma2, gemma3, glm4, granite, internlm2, llama, olmo2"
    known += ", phi3, qwen2, qwen3"
    known += ", seed_oss, smollm3"
    others = r"\(Mistral and InternLM3 are llama, OLMo 3 is olmo2\)"
    with pytest.raises(ModelFormatError, match=f"general.architecture must be {known} {others}; got 'chatglm'"):
        Engine(tmp_path / "model.gguf", skip_tokenizer_init=True)
