"""A GGUF file becomes the model that transformers' own loader makes of it, or is refused by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from configs import llama3_rope

pytest.importorskip("gguf", reason="the extra gguf is not installed")

from conversion import assert_refuses, run
from gguf_files import SIZES, SMALL, TEMPLATE, bpe_keys, write_gguf
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers_oracle import greedy

from d3engine import Engine, FullDepth, SamplingParams
from d3engine.model.config import ModelConfig
from d3engine.model.gguf_file import TENSOR_TYPES, open_gguf
from d3engine.model.llama import inverse_frequencies
from d3engine.text.chat_template import load_chat_template
from d3engine.weights_tools.convert import convert_gguf

PROMPT = [5, 300, 17, 42, 99]


def tokens_of(model: Path) -> list[int]:
    """Twelve greedy tokens of an engine."""
    with Engine(str(model), depth=FullDepth(), device="cpu", dtype="float32") as engine:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        return engine.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model.gguf`, which has every type of tensor, and what it was converted to in `model`."""
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(folder / "model.gguf")
    convert_gguf(folder / "model.gguf", folder / "model", show_progress=False)
    return folder


@pytest.fixture(scope="module")
def oracle(made: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(made, gguf_file="model.gguf", dtype=torch.float32).eval()


def test_gguf_tensors_of_each_type_have_transformers_bits(made: Path, oracle: Any) -> None:
    """Every type of tensor is dequantized to the bits that transformers has."""
    types = {tensor.type_name for tensor in open_gguf(made / "model.gguf").tensors.values()}
    assert types == set(TENSOR_TYPES)
    weights = load_file(made / "model" / "model.safetensors")
    expected = oracle.state_dict()
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, expected[name]), name


def test_converted_gguf_generates_what_transformers_does(made: Path, oracle: Any) -> None:
    """The converted model generates what transformers generates."""
    assert tokens_of(made / "model") == greedy(oracle, PROMPT, 12).token_ids


def test_metadata_becomes_config_and_generation_config(made: Path, oracle: Any) -> None:
    config = ModelConfig.from_directory(made / "model")
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 8, 2, 32)
    assert (config.rope.theta, config.max_position_embeddings, config.tie_word_embeddings) == (50_000.0, 512, False)
    assert config.rms_norm_eps == oracle.config.rms_norm_eps
    assert config.bos_token_id == bpe_keys()["tokenizer.ggml.bos_token_id"]
    assert set(config.eos_token_ids) == {bpe_keys()[f"tokenizer.ggml.{end}_token_id"] for end in ("eos", "eot")}
    template = load_chat_template(made / "model")
    assert template is not None
    assert (made / "model" / "chat_template.jinja").read_text() == TEMPLATE


def test_qwen3_gguf_has_head_norms_and_transformers_row_order(tmp_path: Path) -> None:
    """A Qwen3 has norms of heads, and its rows in transformers' own order."""
    # Heads of 128: what transformers takes them for, whatever the file says.
    sizes = {"types": ("F16", "Q8_0"), "hidden": 64, "intermediate": 64, "heads": 2, "kv_heads": 1, "head_dim": 128}
    lengths = {"llama.attention.key_length": 128, "llama.attention.value_length": 128}
    file = write_gguf(tmp_path / "model.gguf", changes=lengths, architecture="qwen3", **sizes)
    convert_gguf(file, tmp_path / "model", show_progress=False)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).eval()
    weights, expected = load_file(tmp_path / "model" / "model.safetensors"), oracle.state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())
    for model in (file, tmp_path / "model"):
        assert tokens_of(model) == greedy(oracle, PROMPT, 12).token_ids


def test_gguf_without_an_output_matrix_ties_its_embedding(tmp_path: Path) -> None:
    """Without an output matrix the embedding is tied, and bfloat16 is the float32 rounded."""
    source = write_gguf(tmp_path / "model.gguf", tied=True, **SMALL)
    for dtype in ("float32", "bfloat16"):
        assert run("convert", "gguf", source, tmp_path / dtype, "--dtype", dtype).exit_code == 0
    assert ModelConfig.from_directory(tmp_path / "bfloat16").tie_word_embeddings
    wide, narrow = (load_file(tmp_path / dtype / "model.safetensors") for dtype in ("float32", "bfloat16"))
    assert "lm_head.weight" not in wide
    assert all(torch.equal(narrow[name], weight.bfloat16()) for name, weight in wide.items())


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rope_freq_factors_become_llama_3s_rope(tmp_path: Path, factor: float) -> None:
    parameters = llama3_rope(8192, factor=factor, rope_theta=500_000.0)
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, rope_parameters=parameters)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500_000.0 ** -(torch.arange(0, 64, 2).float() / 64)
    source = write_gguf(
        tmp_path / "model.gguf",
        changes={"llama.rope.freq_base": 500_000.0},
        extra={"rope_freqs.weight": (plain / scaled).numpy()},
        **(SMALL | {"hidden": 128, "head_dim": 64}),
    )
    convert_gguf(source, tmp_path / "model", show_progress=False)
    ours = ModelConfig.from_directory(tmp_path / "model")
    torch.testing.assert_close(inverse_frequencies(ours, 512)[0].float(), scaled, rtol=1e-5, atol=0)


def test_linear_and_yarn_rope_keep_their_numbers(tmp_path: Path) -> None:
    for kind in ("linear", "yarn"):
        changes = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0}
        changes["llama.rope.scaling.original_context_length"] = 128
        source = write_gguf(tmp_path / f"{kind}.gguf", changes=changes, **SMALL)
        convert_gguf(source, tmp_path / kind, show_progress=False)
        rope = ModelConfig.from_directory(tmp_path / kind).rope
        original = 128 if kind == "yarn" else None
        assert (rope.rope_type, rope.factor, rope.original_max_position_embeddings) == (kind, 4.0, original)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": (
        {"general.architecture": "mamba"},
        "general.architecture must be one of ernie4_5, exaone, exaone4, gemma, gemma2, .*'mamba'",
    ),
    "rope": ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type must be one of none, linear, yarn"),
    "part of a head": ({"llama.rope.dimension_count": 8}, "rope.dimension_count must be the length of a head, 16"),
    "heads by layer": (
        {"llama.attention.head_count_kv": [1, 1]},
        "attention.head_count_kv must be a number, or a list of 1",
    ),
    "parts": ({"split.count": 3}, r"the first of 3 parts \(split.count\) must be called NAME-00001-of-00003.gguf"),
    "tokenizer": ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model must be one of 'gpt2', 'llama'"),
    "ids": ({"tokenizer.ggml.eos_token_id": 9999}, "tokenizer.ggml.eos_token_id must be the id of one of"),
    "vocabulary": ({"tokenizer.ggml.tokens": ["a"] * 500}, "tokenizer.ggml.tokens must be from 1 to 420"),
    "merges": ({"tokenizer.ggml.merges": ["qqq zzz"]}, r"model\.gguf/tokenizer\.json: .*`qqq` out of vocab"),
    "kinds": ({"tokenizer.ggml.token_type": [9]}, "tokenizer.ggml.token_type must be one number from 1 to 6"),
    "template": ({"tokenizer.chat_template": 5}, "tokenizer.chat_template must be a string"),
    "layers": ({"llama.block_count": 2}, "blk|layers.1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_gguf_is_refused_by_name_and_unwritten(tmp_path: Path, name: str) -> None:
    """What is not supported is refused by name, and nothing is written."""
    changes, message = REFUSED[name]
    leave = ("general.architecture",) if name == "architecture" else ()
    source = write_gguf(tmp_path / "model.gguf", changes=changes, leave=leave, **SMALL)
    if name == "architecture":
        source.write_bytes(source.read_bytes().replace(b"\x05" + bytes(7) + b"llama", b"\x05" + bytes(7) + b"mamba", 1))
    assert_refuses(message, convert_gguf, source, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_gguf_unknown_freq_factors_and_tensors_are_refused(tmp_path: Path) -> None:
    """Frequency factors other than Llama 3's and unknown tensors are refused."""
    for name in ("rope_freqs.weight", "blk.0.attn_sinks.weight"):
        extra = {name: np.linspace(1, 9, SIZES["head_dim"] // 4, dtype=np.float32)}
        source = write_gguf(tmp_path / "model.gguf", extra=extra, **SMALL)
        assert_refuses(name, convert_gguf, source, tmp_path / "model")


def test_template_for_tools_of_a_file_is_kept(tmp_path: Path) -> None:
    """A GGUF file with two templates has both, and so has what it is converted to."""
    named = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "{{ tools[0]['name'] }}"}
    file = write_gguf(tmp_path / "model.gguf", changes=named, **SMALL)
    convert_gguf(file, tmp_path / "made", show_progress=False)
    for source in (file, tmp_path / "made"):
        template = load_chat_template(source)
        assert template is not None
        assert template.render([{"role": "user", "content": "a"}]) == "plain"
        assert template.render([{"role": "user", "content": "a"}], tools=[{"name": "add"}]) == "add"
