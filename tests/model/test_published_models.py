"""Published models, by what is known of their config.json and GGUF files: each is read, or refused in one sentence."""

import json
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import families  # noqa: F401  # registers MiniCPM in transformers
import numpy as np
import pytest
import torch
from tiny_models import random_prompts, save_random
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers_oracle import Answer, assert_same_tokens

from d3engine import Engine, SamplingParams
from d3engine.engine.memory import weight_bytes
from d3engine.errors import ModelFormatError
from d3engine.model.config import ModelConfig
from d3engine.model.expected_tensors import check_tensors, expected_tensors
from d3engine.model.gguf_file import GGUFFile
from d3engine.model.gguf_metadata import gguf_config
from d3engine.model.shard import shard_of
from d3engine.model.source import files_of
from tools.published_models import PublishedGGUF, PublishedModel, published_gguf_files, published_models

MODELS = {model.name: model for model in published_models()}
RUNNING = [name for name, model in MODELS.items() if model.runs]
OTHERS = {model.config["architectures"][0]: model for model in MODELS.values() if not model.runs}
GGUF_FILES = {file.name: file for file in published_gguf_files()}
JUDGES = {"internlm2": "llama"}
"""Families that transformers does not have: one whose tensors are named and computed as theirs are here."""
LAYERS = {"gemma3_text": 7}
"""Layers of a tiny model, where four would not show the pattern of its windows."""


def as_transformers_makes_it(fields: dict[str, Any]) -> PreTrainedModel:
    """The model of a config.json in transformers, its weights in float32 where torch now puts tensors."""
    own = {name: value for name, value in fields.items() if name != "quantization_config"}
    kind = JUDGES.get(own["model_type"], own["model_type"])
    own = json.loads(json.dumps(own)) | {"model_type": kind, "pad_token_id": None}
    if (own.get("rope_scaling") or {}).get("type") == "su":  # which transformers 5 reads as longrope, and fails
        own["rope_scaling"]["type"] = "longrope"
    if kind == "exaone4" and own["sliding_window"] is None:
        own["layer_types"] = ["full_attention"] * own["num_hidden_layers"]
    if kind != fields["model_type"]:
        own["architectures"] = ["LlamaForCausalLM"]
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind].from_dict(own), dtype=torch.float32)


def shapes_of(fields: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that transformers' model of a config has; a tied head is no tensor."""
    with torch.device("meta"):
        model = as_transformers_makes_it(fields)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", RUNNING)
def test_published_config_has_transformers_tensors(name: str) -> None:
    """At full size the names and shapes are those of transformers' own class, and a plan has their bytes."""
    fields = dict(MODELS[name].config)
    config = ModelConfig.from_dict(fields)
    expected = shapes_of(fields)
    assert expected_tensors(config) == expected
    values = sum(torch.Size(shape).numel() for shape in expected.values())
    assert weight_bytes(config, shard_of(config, 0, 1)) == 2 * values
    assert values < 10e9
    assert config.default_length <= config.max_length


@pytest.mark.parametrize("architecture", OTHERS)
def test_model_of_another_family_is_refused(architecture: str) -> None:
    """One sentence names the field, the families that run, and the architecture."""
    with pytest.raises(ModelFormatError) as error:
        ModelConfig.from_dict(OTHERS[architecture].config)
    said = str(error.value)
    assert said.startswith("config.json: architectures must be a list with one of Ernie4_5ForCausalLM, ")
    assert said.endswith(f"; got {[architecture]}")
    assert "\n" not in said


def tiny(model: PublishedModel) -> dict[str, Any]:
    """A config of the same kind: heads, windows, rope, tying; in few layers of small heads, with small token ids."""
    fields = {name: value for name, value in model.config.items() if name != "quantization_config"}
    full = ModelConfig.from_dict(fields)
    kv_heads, head_dim = min(full.num_kv_heads, 2), 16
    heads = full.group_size * kv_heads
    layers = LAYERS.get(fields["model_type"], 4)
    fields |= {"vocab_size": 128, "hidden_size": full.hidden_size * heads * head_dim // full.q_size}
    fields |= {"intermediate_size": 48, "num_hidden_layers": layers, "num_attention_heads": heads}
    fields |= {"num_key_value_heads": kv_heads, "initializer_range": 0.2}
    if full.head_dim != full.hidden_size // full.num_heads or "head_dim" in default_fields(fields["model_type"]):
        fields["head_dim"] = head_dim
    if fields.get("sliding_window"):
        fields["sliding_window"] = 8
    for field in ("bos_token_id", "eos_token_id"):
        ids = fields.get(field)
        fields[field] = list(range(1, 1 + len(ids))) if isinstance(ids, list) else 1
    rope = fields.get("rope_scaling") or {}
    if "long_factor" in rope:
        pairs = int(head_dim * fields.get("partial_rotary_factor", 1.0)) // 2
        lists = {factor: rope[factor][:pairs] for factor in ("short_factor", "long_factor")}
        fields["rope_scaling"] = rope | lists
    return fields


@cache
def default_fields(model_type: str) -> frozenset[str]:
    """The fields of a family's config that have another default than none."""
    kind = CONFIG_MAPPING[JUDGES.get(model_type, model_type)]()
    return frozenset(name for name, value in kind.to_dict().items() if value is not None)


def unlike(names: list[str]) -> list[str]:
    """The first of each kind of models that are the same when they are tiny."""
    found: dict[str, str] = {}
    for name in names:
        found.setdefault(json.dumps(tiny(MODELS[name]), sort_keys=True), name)
    return list(found.values())


@pytest.mark.parametrize("name", unlike(RUNNING))
@torch.inference_mode()
def test_tiny_published_model_answers_as_transformers(name: str, tmp_path: Path) -> None:
    """Of its config.json as it is spelled; greedy tokens are those of transformers' own class."""
    fields = tiny(MODELS[name])
    torch.manual_seed(0)
    model = save_random(tmp_path, as_transformers_makes_it(fields)).model
    (tmp_path / "config.json").write_text(json.dumps(fields))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with Engine(tmp_path, skip_tokenizer_init=True, dtype="float32", max_model_len=64) as engine:
        (output,) = engine.generate(random_prompts([17], vocab_size=128), params, use_tqdm=False)
    prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
    logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    assert_same_tokens(tokens, Answer.of_logits(logits.float()))


def written(path: Path, file: PublishedGGUF) -> dict[str, Any]:
    """A file with those keys and tensors, of which only rope's are more than a hole; returns the like model's config.

    Its tensors have the names that the gguf package knows. The vocabulary is short, and ids of tokens are within it.
    """
    from gguf import GGML_QUANT_SIZES, MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map

    like = dict(MODELS[file.like].config)
    tied = {} if file.is_tied is None else {"tie_word_embeddings": file.is_tied}
    config = ModelConfig.from_dict(like | tied)
    names = get_tensor_name_map(MODEL_ARCH[file.architecture.upper()], config.num_layers)
    shapes = {names.get_name(name, (".weight", ".bias")): shape for name, shape in expected_tensors(config).items()}
    factors = {}
    if config.rope.rope_type == "llama3":
        from d3engine.model.gguf_metadata import llama3_divisors

        factors["rope_freqs.weight"] = llama3_divisors(config.head_dim, config.rope.theta, config.rope.factor or 0)
    if config.rope.long_factor:
        factors |= {f"rope_factors_{kind}.weight": np.ones(config.rotary_dim // 2) for kind in ("long", "short")}
    writer = GGUFWriter(path, file.architecture)
    for prefix, keys in ((file.architecture, file.keys), ("tokenizer.ggml", file.tokenizer)):
        for key, value in keys.items():
            given = min(value, 7) if key.endswith("_token_id") else value
            kind = {bool: "bool", int: "uint32", float: "float32", str: "string"}[type(given)]
            getattr(writer, f"add_{kind}")(f"{prefix}.{key}", given)
    writer.add_token_list([f"t{place}" for place in range(8)])
    writer.add_token_types([2, 3, 3, 1, 1, 1, 1, 3])
    if file.tokenizer["model"] == "gpt2":
        writer.add_token_merges(["t 0"])
    else:
        writer.add_token_scores([-float(place) for place in range(8)])
    end = 0
    for name, values in factors.items():
        writer.add_tensor(name, values.astype(np.float32))
        end += -(-values.size * 4 // 32) * 32
    for name, shape in shapes.items():
        kind = "F32" if len(shape) == 1 else "Q4_K" if shape[-1] % 256 == 0 else "Q8_0"
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        nbytes = torch.Size(shape).numel() // block * block_bytes
        writer.add_tensor_info(name, shape, np.dtype(np.float32), nbytes, GGMLQuantizationType[kind])
        end += -(-nbytes // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as opened:
        opened.seek(0, 2)
        opened.write(b"\0" * (-opened.tell() % 32))
        start = opened.tell()
        for values in factors.values():  # the first tensors
            opened.write(values.astype("<f4").tobytes().ljust(-(-values.size * 4 // 32) * 32, b"\0"))
        opened.truncate(start + end)
    if file.num_tensors is not None:
        assert len(shapes) + len(factors) == file.num_tensors
    return like | tied


@pytest.mark.parametrize("name", GGUF_FILES)
def test_published_gguf_keys_are_read(name: str, tmp_path: Path) -> None:
    """The config is that of the model's config.json, every tensor is there, and the tokenizer is one that is read."""
    pytest.importorskip("gguf", reason="the extra gguf is not installed")
    file = GGUF_FILES[name]
    like = ModelConfig.from_dict(written(tmp_path / "model.gguf", file))
    files = files_of(tmp_path / "model.gguf")
    config = ModelConfig.from_directory(files)
    with files.open_checkpoint() as checkpoint:
        check_tensors(checkpoint, config)
    same = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
    same += ("windows", "biases", "has_head_norms", "tie_word_embeddings", "rotary_dim", "soft_caps")
    assert {field: getattr(config, field) for field in same} == {field: getattr(like, field) for field in same}
    assert config.rms_norm_eps == pytest.approx(like.rms_norm_eps)
    assert asdict(config.multipliers) == pytest.approx(asdict(like.multipliers))
    assert config.rope.theta == file.keys.get("rope.freq_base", 10_000.0)
    assert config.rope.rope_type == like.rope.rope_type
    kind = "tokenizer.json" if file.tokenizer["model"] == "gpt2" else "tokenizer.model"
    assert files.has(kind)
    assert files.read_bytes(kind)


def test_gguf_of_a_hybrid_model_is_refused() -> None:
    """Of Qwen 3.5, whose layers are not all attention, by the first key that its file has."""
    keys = {"general.architecture": "qwen35", "qwen35.full_attention_interval": 4}
    with pytest.raises(ModelFormatError, match=r"general\.architecture must be one of .*; got 'qwen35'"):
        gguf_config(GGUFFile(Path("model.gguf"), keys, {}, {}))


def test_table_of_published_models_has_all() -> None:
    """The page's table has a row for each model that runs, and names every other."""
    from tools.published_models import table

    lines = list(table())
    assert "| Qwen/Qwen3-0.6B | `Qwen3ForCausalLM` | 0.60 billion | 0.39 GB | 448 MiB |" in lines
    assert len([line for line in lines if line.startswith("| ")]) == len(RUNNING) + len(OTHERS) + 2
    assert all(name in "\n".join(lines) for name in MODELS)
