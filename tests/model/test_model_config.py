"""config.json is read in every spelling in use; what the engine cannot honour is refused by field and value."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from configs import llama3_rope
from transformers import LlamaConfig

from d3engine.engine.model_directory import resolve_max_model_len
from d3engine.errors import InvalidValueError, ModelFormatError
from d3engine.model.config import ModelConfig, load_generation_config
from d3engine.model.rope_config import RopeConfig

LLAMA2: dict[str, Any] = (
    {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096}
    | {"intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32}
    | {"hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_scaling": None}
    | {"tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float16"}
    | {"pretraining_tp": 1, "use_cache": True, "transformers_version": "4.31.0"}
)
LLAMA3_ROPE = llama3_rope(8192)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LONGROPE: dict[str, Any] = {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2] * 64}


def config(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(LLAMA2 | changes)


def test_a_llama_2_config_is_read_with_its_derived_sizes() -> None:
    llama = config(num_key_value_heads=8)
    assert (llama.head_dim, llama.q_size, llama.kv_size, llama.group_size) == (128, 4096, 1024, 4)
    assert llama.rope == RopeConfig("default", 10_000.0)
    assert (llama.dtype, llama.bos_token_id, llama.eos_token_ids) == ("float16", 1, (2,))


def test_flops_ratio_from_parameters_is_the_papers() -> None:
    """The flops ratio from layer and head parameters is the paper's."""
    llama = config()
    p, h, layers, keep = llama.layer_parameters, llama.head_parameters, 32, 19.165
    assert (layers * p + h) / (keep * p + h) == pytest.approx(1.648, abs=5e-4)


def test_both_spellings_of_rope_give_the_same_config() -> None:
    four = config(rope_theta=500_000.0, rope_scaling=LLAMA3_ROPE, max_position_embeddings=131_072)
    five = config(rope_parameters=LLAMA3_ROPE | {"rope_theta": 500_000.0}, max_position_embeddings=131_072)
    assert four == five
    assert four.rope.theta == 500_000.0
    assert four.rope.original_max_position_embeddings == 8192


@pytest.mark.parametrize("rope", [None, {}, {"rope_type": "default"}, {"type": None}])
def test_a_rope_without_a_type_is_the_default_rope(rope: Any) -> None:
    assert config(rope_scaling=rope).rope == RopeConfig()


def test_config_saved_by_transformers_reads_back_the_same(tmp_path: Path) -> None:
    """A config saved by transformers reads back as transformers means it."""
    rope = {"rope_type": "linear", "factor": 3.0, "rope_theta": 7000.0}
    heads = {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 20}
    named = {"eos_token_id": [5, 6], "tie_word_embeddings": True, "architectures": ["LlamaForCausalLM"]}
    saved = LlamaConfig(**heads, **named, rope_parameters=rope)
    saved.save_pretrained(tmp_path)
    read = ModelConfig.from_directory(tmp_path)
    assert (read.num_heads, read.num_kv_heads, read.head_dim) == (12, 3, 20)
    assert read.rope == RopeConfig("linear", 7000.0, factor=3.0)
    assert read.eos_token_ids == (5, 6)
    assert read.tie_word_embeddings
    assert read.rms_norm_eps == saved.rms_norm_eps


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 16_384),
        ({"rope_type": "dynamic", "factor": 1.5}, 6144),
        (YARN, 8192),
        (YARN | {"factor": 1.5}, 4096),
        (LLAMA3_ROPE, 4096),
        (None, 4096),
    ],
    ids=lambda value: str((value or {}).get("rope_type")) if not isinstance(value, int) else "",
)
def test_rope_with_a_factor_stretches_the_positions(rope: dict[str, Any] | None, length: int) -> None:
    """Linear and dynamic rope stretch the positions of the config, and yarn those that it was trained at."""
    read = config(rope_scaling=rope, max_position_embeddings=4096)
    assert resolve_max_model_len(None, read) == length
    assert resolve_max_model_len(length, read) == length
    if read.rope.rope_type != "dynamic":
        with pytest.raises(InvalidValueError, match=f"max_model_len must be .*{length}"):
            resolve_max_model_len(length + 1, read)


@pytest.mark.parametrize("name", ["longrope", "su"])
def test_longrope_ends_by_default_where_its_factors_change(name: str) -> None:
    """Beyond that length one list holds for all texts, and a longer one must be asked for."""
    read = config(
        rope_scaling=LONGROPE | {"type": name}, original_max_position_embeddings=4096, max_position_embeddings=131_072
    )
    assert resolve_max_model_len(None, read) == 4096
    assert resolve_max_model_len(131_072, read) == 131_072
    assert [read.rope.is_long(length) for length in (4096, 4097)] == [False, True]
    with pytest.raises(InvalidValueError, match=r"max_model_len must be .*131072"):
        resolve_max_model_len(131_073, read)


def test_eos_ids_are_the_union_of_both_files_in_order() -> None:
    read = ModelConfig.from_dict(LLAMA2 | {"eos_token_id": [9, 2]}, {"eos_token_id": [2, 7]})
    assert read.eos_token_ids == (9, 2, 7)


def test_a_null_eos_means_none() -> None:
    assert config(eos_token_id=None, bos_token_id=None).eos_token_ids == ()
    assert config(eos_token_id=None, bos_token_id=None).bos_token_id is None


def test_pretraining_tp_changes_nothing() -> None:
    assert config(pretraining_tp=2) == config()


def test_dtype_is_read_from_either_key_with_or_without_prefix() -> None:
    assert config(torch_dtype=None).dtype is None
    assert config(torch_dtype="torch.bfloat16").dtype == "bfloat16"
    assert config(dtype="float32").dtype == "float32"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["FalconForCausalLM"]}, r"architectures must be .*LlamaForC.*; got \['FalconForCausalLM'\]"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list.*; got 'LlamaForCausalLM'"),
        ({"model_type": "qwen2"}, "model_type must be 'llama' or .* beside these architectures; got 'qwen2'"),
        ({"architectures": None, "model_type": None}, "architectures and model_type are both missing"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu'.*; got 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: quant_method must be 'd3engine', as.*; got None"),
        ({"rope_interleaved": True}, "rope_interleaved must be false.*; got True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0.*; got 0.5"),
        ({"pretraining_tp": 0}, "pretraining_tp must be an integer from 1.*; got 0"),
        ({"vocab_size": None}, "config.json: vocab_size is missing"),
        ({"vocab_size": -1}, "vocab_size must be an integer from 1 to.*; got -1"),
        ({"vocab_size": True}, "vocab_size must be .*; got True"),
        ({"hidden_size": 4096.0}, r"hidden_size must be .*; got 4096\.0"),
        ({"hidden_size": 4100}, "hidden_size must be a multiple of num_attention_heads=32.*; got 4100"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be an integer from 1 to 10000.*; got 1000000000"),
        ({"num_key_value_heads": 5}, "num_key_value_heads must be a divisor of num_attention_heads=32.*; got 5"),
        ({"head_dim": 7}, "head_dim must be an even integer.*; got 7"),
        ({"hidden_size": 96}, "head_dim must be an even integer.*; got 3"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a finite number above 0.*; got nan"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be .*; got 0"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be .*; got '1e-5'"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be .*; got 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false.*; got 'yes'"),
        ({"eos_token_id": [2, -1]}, r"eos_token_id must be a token id.*; got \[2, -1\]"),
        ({"bos_token_id": "<s>"}, "bos_token_id must be an integer from 0.*; got '<s>'"),
        ({"torch_dtype": "float64"}, "torch_dtype must be one of float32, bfloat16, float16.*; got 'float64'"),
        ({"dtype": 16}, "dtype must be .*; got 16"),
        ({"rope_theta": -1.0}, r"rope_theta must be a finite number above 0.*; got -1\.0"),
        ({"rope_theta": 0.5}, r"rope_theta must be a finite number above 1.*; got 0\.5"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        config(**changes)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ("linear", "rope_scaling must be an object or null.*; got 'linear'"),
        ({"rope_type": "mrope"}, "rope_type must be one of default, linear, dynamic.*; got 'mrope'"),
        ({"type": "longrope"}, "config.json: rope_scaling: short_factor must be a list of .*; got None"),
        (LONGROPE | {"short_factor": [1.0] * 63}, r"short_factor must be .* for each of 64 pairs of channels; got \["),
        (LONGROPE | {"long_factor": [True] + [1.0] * 63}, r"long_factor must be a list of numbers .*; got \[True"),
        (LONGROPE | {"long_factor": [0] + [1.0] * 63}, r"long_factor must be a list of numbers above 0.*; got \["),
        (LONGROPE | {"long_factor": [math.nan] + [1.0] * 63}, r"long_factor must be .*; got \[nan"),
        (LONGROPE | {"factor": 0.5}, r"factor must be a number from 1 to 1,000,000; got 0\.5"),
        (LONGROPE | {"beta_fast": 3}, "beta_fast must be absent, since rope type 'longrope' reads: attention_factor.*"),
        (LONGROPE | {"original_max_position_embeddings": 1}, "original_max_position_embeddings must be .* from 2 for"),
        (LONGROPE | {"partial_rotary_factor": 0.5}, r"partial_rotary_factor must be absent, .*; got 0\.5"),
        ({"rope_type": ["yarn"]}, r"rope_type must be .*; got \['yarn'\]"),
        ({"rope_type": "yarn", "type": "linear"}, "type must be the same as rope_type='yarn'.*; got 'linear'"),
        ({"rope_type": "linear"}, "rope_scaling: factor is missing"),
        ({"rope_type": "linear", "factor": None}, "rope_scaling: factor is missing"),
        ({"rope_type": "linear", "factor": 0.5}, r"factor must be a number from 1 to 1,000,000; got 0\.5"),
        ({"rope_type": "linear", "factor": math.inf}, "factor must be .*; got inf"),
        ({"rope_type": "default", "factor": 2.0}, r"factor must be absent, since rope type 'default' .*; got 2\.0"),
        ({"rope_type": "dynamic", "factor": 2.0, "alpha": 3.0}, r"alpha must be absent.*; got 3\.0"),
        (YARN | {"partial_rotary_factor": 0.5}, r"partial_rotary_factor must be .*; got 0\.5"),
        (YARN | {"beta_fast": 1, "beta_slow": 8}, r"beta_fast must be a number of at least beta_slow=8\.0.*; got 1"),
        (YARN | {"truncate": 1}, "truncate must be true or false.*; got 1"),
        (YARN | {"attention_factor": -1.0}, r"attention_factor must be .*; got -1\.0"),
        (YARN | {"finetuned": False}, "finetuned must be .*; got False"),
        (LLAMA3_ROPE | {"high_freq_factor": 1.0}, r"high_freq_factor must be .*above low_freq_factor=1\.0; got 1\.0"),
        (LLAMA3_ROPE | {"low_freq_factor": None}, "low_freq_factor is missing"),
        (LLAMA3_ROPE | {"original_max_position_embeddings": 0}, "original_max_position_embeddings must be .*; got 0"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention must be .*; got .*"),
    ],
)
def test_a_rope_that_cannot_be_honoured_is_refused_by_name(rope: Any, message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        config(rope_scaling=rope)


def test_contradictory_spellings_of_rope_are_refused() -> None:
    linear = {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(ModelFormatError, match=r"rope_scaling must be .*the same as rope_parameters"):
        config(rope_scaling=linear, rope_parameters={"rope_type": "default"})
    with pytest.raises(ModelFormatError, match=r"rope_theta must be .*the same as .*=7\.0 beside it; got 5\.0"):
        config(rope_theta=7.0, rope_parameters={"rope_theta": 5.0})
    with pytest.raises(ModelFormatError, match=r"original_max_position_embeddings must be .*beside it.*; got 8192"):
        config(rope_scaling=LLAMA3_ROPE, original_max_position_embeddings=4096)


def test_dynamic_rope_needs_more_than_one_pair() -> None:
    with pytest.raises(ModelFormatError, match="head_dim must be above 2 for dynamic rope; got 2"):
        config(head_dim=2, rope_scaling={"rope_type": "dynamic", "factor": 2.0})


def test_harmless_keys_are_allowed() -> None:
    extra = {"attention_dropout": 0.0, "is_llama_config": True, "rope_interleaved": False, "mlp_bias": None}
    assert config(**extra) == config()
    assert config(rope_scaling=YARN | {"finetuned": True, "mscale": None}) == config(rope_scaling=YARN)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", r"config\.json is not valid JSON"),
        (b"[1]", r"config\.json must hold a JSON object, not a list"),
        (b"\xff\xfe\x00", r"config\.json is not valid JSON"),
        (b"[" * 200_000, r"config\.json is not valid JSON"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", r"config\.json is not valid JSON"),
    ],
)
def test_a_malformed_config_file_is_an_error_that_names_it(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelFormatError, match=message):
        ModelConfig.from_directory(tmp_path)


def test_a_missing_config_or_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=re.escape(f"no model in {tmp_path}: config.json is missing")):
        ModelConfig.from_directory(tmp_path)
    with pytest.raises(ModelFormatError, match="absent is neither a directory"):
        ModelConfig.from_directory(tmp_path / "absent")


def test_generation_defaults_are_those_that_the_file_sets(tmp_path: Path) -> None:
    assert load_generation_config(tmp_path) == {}
    contents = {"temperature": 1, "top_p": 0.9, "top_k": -1, "min_p": None, "do_sample": True, "max_new_tokens": 64}
    contents |= {"eos_token_id": 5, "bos_token_id": 4, "_from_model_config": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(contents))
    wanted = {"temperature": 1.0, "top_p": 0.9, "top_k": -1, "do_sample": True, "max_new_tokens": 64}
    wanted |= {"eos_token_ids": (5,)}
    assert load_generation_config(tmp_path) == wanted


def test_directory_and_generation_config_are_joined(tmp_path: Path) -> None:
    without_bos = {name: value for name, value in LLAMA2.items() if name != "bos_token_id"}
    (tmp_path / "config.json").write_text(json.dumps(without_bos))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 8], "bos_token_id": 3}')
    read = ModelConfig.from_directory(tmp_path)
    assert (read.bos_token_id, read.eos_token_ids) == (3, (2, 8))


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ('{"temperature": "hot"}', r"generation_config\.json: temperature must be .*; got 'hot'"),
        ('{"top_p": NaN}', r"generation_config\.json: top_p must be .*; got nan"),
        ('{"top_k": 1.5}', r"top_k must be .*; got 1\.5"),
        ('{"do_sample": 1}', "do_sample must be true or false.*; got 1"),
        ('{"eos_token_id": ["x"]}', r"eos_token_id must be .*; got \['x'\]"),
    ],
)
def test_generation_defaults_of_a_wrong_type_are_refused(tmp_path: Path, contents: str, message: str) -> None:
    (tmp_path / "generation_config.json").write_text(contents)
    with pytest.raises(ModelFormatError, match=message):
        load_generation_config(tmp_path)
