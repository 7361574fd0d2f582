"""Converted models compute what their sources do; damaged or dangerous sources are refused in one line."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner, Result

from d3engine.cli.weights import app
from d3engine.errors import InvalidValueError, ModelFormatError
from d3engine.model.config import ModelConfig
from d3engine.model.weights import load_weights, to_adjacent_pairs
from d3engine.text.tokenizer import load_tokenizer
from d3engine.weights_tools.convert import convert_bin, convert_llama2c
from d3engine.weights_tools.convert_meta import convert_meta

SHARED_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
STORIES = SHARED_DATA / "stories260K"
LLAMA2_TOKENIZER = SHARED_DATA / "llama2" / "tokenizer.model"

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
PROMPT = torch.tensor([[1, 7, 3, 22, 9, 30]])


def make_model(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(SIZES | changes))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def logits(model: LlamaForCausalLM) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(PROMPT).logits
    return result


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def layers(state: dict[str, Tensor], name: str) -> list[Tensor]:
    return [state[f"model.layers.{layer}.{name}.weight"] for layer in range(SIZES["num_hidden_layers"])]


def write_llama2c(file: Path, model: LlamaForCausalLM, *, header: dict[str, int] | None = None) -> None:
    """Write a model as llama2.c's export.py would: rope on adjacent pairs, tensors stacked by kind."""
    state = {name: tensor.float() for name, tensor in model.state_dict().items()}
    tied = model.config.tie_word_embeddings
    numbers = {
        "dim": 32,
        "hidden_dim": 24,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "vocab_size": 40 if tied else -40,
        "seq_len": 64,
    }
    parts = [
        state["model.embed_tokens.weight"],
        *layers(state, "input_layernorm"),
        *(to_adjacent_pairs(weight, 4) for weight in layers(state, "self_attn.q_proj")),
        *(to_adjacent_pairs(weight, 2) for weight in layers(state, "self_attn.k_proj")),
        *layers(state, "self_attn.v_proj"),
        *layers(state, "self_attn.o_proj"),
        *layers(state, "post_attention_layernorm"),
        *layers(state, "mlp.gate_proj"),
        *layers(state, "mlp.down_proj"),
        *layers(state, "mlp.up_proj"),
        state["model.norm.weight"],
        torch.full((2 * 64 * 4,), 9.0),  # the old rope tables, which nobody reads
    ]
    if not tied:
        parts.append(state["lm_head.weight"])
    body = np.concatenate([part.numpy().ravel() for part in parts]).astype("<f4").tobytes()
    file.write_bytes(struct.pack("<7i", *(numbers | (header or {})).values()) + body)


def test_stories260k_converted_generates_what_the_c_program_does(tmp_path: Path) -> None:
    if not STORIES.is_dir():
        pytest.skip("the stories260K checkpoint is not beside this repository")
    convert_llama2c(STORIES / "stories260K.bin", tmp_path / "model", show_progress=False)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model").eval()
    expected = [int(token) for token in (STORIES / "greedy_from_bos.txt").read_text().split()]
    assert len(expected) == 129
    ids = model.generate(torch.tensor([[1]]), do_sample=False, max_new_tokens=129)[0, 1:].tolist()
    assert ids == expected


@pytest.mark.parametrize("tied", [True, False])
def test_a_llama2c_file_becomes_the_model_it_was_made_from(tmp_path: Path, tied: bool) -> None:
    model = make_model(tie_word_embeddings=tied)
    write_llama2c(tmp_path / "model.bin", model)
    convert_llama2c(tmp_path / "model.bin", tmp_path / "out", show_progress=False)
    back = LlamaForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert back.config.tie_word_embeddings == tied
    assert torch.equal(logits(back), logits(model))
    config = ModelConfig.from_directory(tmp_path / "out")
    assert (config.max_position_embeddings, config.rms_norm_eps, config.eos_token_ids) == (64, 1e-5, (1, 2))
    assert run("verify", tmp_path / "out").exit_code == 0


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"dim": 0x616B3432}, r"version 1 or 2 \('ak42'\): only version 0 is read"),
        ({"dim": -32}, "dim must be at least 1, .*; got -32"),
        ({"n_layers": 0}, "n_layers must be .*; got 0"),
        ({"seq_len": -1}, "seq_len must be .*; got -1"),
        ({"vocab_size": 0}, "vocab_size must be .*; got 0"),
        ({"n_heads": 5}, "dim=32, n_heads=5, n_kv_heads=2: each must be a multiple of the next"),
        ({"n_kv_heads": 3}, "n_heads=4, n_kv_heads=3: each must be a multiple"),
        ({"n_layers": 2**31 - 1}, "bytes; its header asks for"),
    ],
)
def test_a_wrong_llama2c_header_is_refused(tmp_path: Path, header: dict[str, int], message: str) -> None:
    write_llama2c(tmp_path / "model.bin", make_model(tie_word_embeddings=True), header=header)
    with pytest.raises(ModelFormatError, match=message):
        convert_llama2c(tmp_path / "model.bin", tmp_path / "out", show_progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda content: content[:-4], "bytes; its header asks for"),
        (lambda content: content + bytes(4), "bytes; its header asks for"),
        (lambda content: content[:20], "has 20 bytes: too short for a llama2.c header"),
        (lambda content: b"", "has 0 bytes: too short"),
    ],
)
def test_a_llama2c_file_of_another_size_is_refused(
    tmp_path: Path, edit: Callable[[bytes], bytes], message: str
) -> None:
    file = tmp_path / "model.bin"
    write_llama2c(file, make_model(tie_word_embeddings=True))
    file.write_bytes(edit(file.read_bytes()))
    with pytest.raises(ModelFormatError, match=message):
        convert_llama2c(file, tmp_path / "out", show_progress=False)


def test_a_missing_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="absent is missing or not a regular file"):
        convert_llama2c(tmp_path / "absent", tmp_path / "out", show_progress=False)


def test_a_tokenizer_must_be_readable_and_fit_the_embedding(tmp_path: Path) -> None:
    source = tmp_path / "model.bin"
    write_llama2c(source, make_model(tie_word_embeddings=True))
    small = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}}
    fits = tmp_path / "fits.json"
    fits.write_text(json.dumps(small))
    convert_llama2c(source, tmp_path / "out", tokenizer=fits, show_progress=False)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == fits.read_text()

    small["model"]["vocab"] = {str(number): number for number in range(41)}  # type: ignore[index]
    small["model"]["unk_token"] = "0"  # type: ignore[index]
    large = tmp_path / "large.json"
    large.write_text(json.dumps(small))
    for tokenizer, message in (
        (large, r"must be one with at most the model's 40 tokens \(it has 41\); got .*large.json'"),
        (source, "must be a tokenizer.json or a .model file; got .*model.bin'"),
        (tmp_path / "absent.json", "must be a tokenizer.json or .*; got .*absent.json'"),
    ):
        with pytest.raises(InvalidValueError, match=message):
            convert_llama2c(source, tmp_path / "no", tokenizer=tokenizer, show_progress=False)
    for name in ("broken.json", "broken.model"):
        (tmp_path / name).write_bytes(b"\x00 not a tokenizer")
        with pytest.raises(InvalidValueError, match=f"must be a readable tokenizer.json or .*; got .*{name}'"):
            convert_llama2c(source, tmp_path / "no", tokenizer=tmp_path / name, show_progress=False)
    assert not (tmp_path / "no").exists()


def test_a_sentencepiece_tokenizer_is_copied_with_a_config(tmp_path: Path) -> None:
    if not LLAMA2_TOKENIZER.is_file():
        pytest.skip("the sentencepiece model is not beside this repository")
    save_meta(tmp_path / "meta", make_model(vocab_size=32_000))
    (tmp_path / "meta" / "tokenizer.model").write_bytes(LLAMA2_TOKENIZER.read_bytes())
    assert convert_meta(tmp_path / "meta", tmp_path / "out", max_position_embeddings=64, show_progress=False) == []
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == LLAMA2_TOKENIZER.read_bytes()
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["add_bos_token"] is True


# bin


def save_bin(directory: Path, model: LlamaForCausalLM, parts: int = 1, **options: Any) -> None:
    """Write a model as transformers 4 did before safetensors."""
    directory.mkdir()
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(directory)
    (directory / "tokenizer_config.json").write_text("{}")
    state = list(model.state_dict().items())
    if parts == 1:
        torch.save(dict(state), directory / "pytorch_model.bin", **options)
        return
    weight_map = {}
    for part in range(parts):
        shard = f"pytorch_model-{part + 1:05d}-of-{parts:05d}.bin"
        torch.save(dict(state[part::parts]), directory / shard)
        weight_map |= {name: shard for name, _ in state[part::parts]}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_pickled_checkpoints_keep_their_model(tmp_path: Path, parts: int, tied: bool) -> None:
    model = make_model(tie_word_embeddings=tied)
    save_bin(tmp_path / "bin", model, parts)
    convert_bin(tmp_path / "bin", tmp_path / "out", show_progress=False)
    assert torch.equal(logits(LlamaForCausalLM.from_pretrained(tmp_path / "out").eval()), logits(model))
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer_config.json",
    ]
    assert ("lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")) != tied


def test_a_large_checkpoint_is_cut_into_shards_with_an_index(tmp_path: Path) -> None:
    model = make_model()
    save_bin(tmp_path / "bin", model)
    convert_bin(tmp_path / "bin", tmp_path / "out", shard_bytes=6000, show_progress=False)
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 3
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    assert all(sum(tensor.nbytes for tensor in load_file(shard).values()) <= 6000 for shard in shards)
    assert torch.equal(logits(LlamaForCausalLM.from_pretrained(tmp_path / "out").eval()), logits(model))
    config = ModelConfig.from_directory(tmp_path / "out")
    weights = load_weights(tmp_path / "out", config, dtype=torch.float32, device="cpu", show_progress=False)
    assert weights.nbytes == sum(parameter.nbytes for parameter in model.parameters())


def test_a_checkpoint_older_than_torch_1_6_is_read(tmp_path: Path) -> None:
    save_bin(tmp_path / "bin", make_model(), _use_new_zipfile_serialization=False)
    convert_bin(tmp_path / "bin", tmp_path / "out", show_progress=False)
    assert run("verify", tmp_path / "out").exit_code == 0


class Exploit:
    """Runs code when unpickled carelessly."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


def test_a_pickle_that_runs_code_is_refused_unrun(tmp_path: Path) -> None:
    save_bin(tmp_path / "bin", make_model())
    torch.save({"weight": Exploit(tmp_path / "pwned")}, tmp_path / "bin" / "pytorch_model.bin")
    with pytest.raises(ModelFormatError, match=r"pytorch_model\.bin cannot be read as a torch checkpoint"):
        convert_bin(tmp_path / "bin", tmp_path / "out", show_progress=False)
    assert not (tmp_path / "pwned").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.ones(1)], "must hold a dict of tensors, not a list"),
        ({"step": 3}, "'step' is a int, not a tensor"),
        ({3: torch.ones(1)}, "3 is a Tensor, not a tensor"),
        ({"model.norm.weight": torch.ones(32)}, "tensor 'model.embed_tokens.weight' is missing in"),
    ],
)
def test_a_pickle_of_something_else_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    save_bin(tmp_path / "bin", make_model())
    torch.save(content, tmp_path / "bin" / "pytorch_model.bin")
    with pytest.raises(ModelFormatError, match=message):
        convert_bin(tmp_path / "bin", tmp_path / "out", show_progress=False)


def test_wrong_tensors_are_refused_before_writing(tmp_path: Path) -> None:
    model = make_model(tie_word_embeddings=True)
    save_bin(tmp_path / "bin", model)
    file = tmp_path / "bin" / "pytorch_model.bin"
    state = dict(model.state_dict())
    for changes, message in (
        ({"extra": torch.ones(1)}, r"pytorch_model\.bin: tensor 'extra' is unexpected"),
        ({"model.norm.weight": torch.ones(31)}, r"'model\.norm\.weight' has shape \[31\]"),
        ({"model.norm.weight": torch.ones(32).int()}, r"'model\.norm\.weight' has dtype torch\.int32"),
        ({"lm_head.weight": torch.ones(40, 32)}, r"'lm_head\.weight' differs from 'model\.embed_tokens\.weight'"),
    ):
        torch.save(state | changes, file)
        with pytest.raises(ModelFormatError, match=message):
            convert_bin(tmp_path / "bin", tmp_path / "out", show_progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin"]


def test_a_broken_set_of_pickled_shards_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "bin"
    save_bin(source, make_model(), parts=2)
    first, second = sorted(source.glob("*.bin"))
    index = source / "pytorch_model.bin.index.json"
    original = index.read_text()

    index.write_text(original.replace(second.name, "../other.bin"))
    with pytest.raises(ModelFormatError, match=r"a shard must be a plain .*; got '\.\./other\.bin'"):
        convert_bin(source, tmp_path / "out", show_progress=False)
    index.write_text('{"weight_map": {}}')
    with pytest.raises(ModelFormatError, match="weight_map must be an object"):
        convert_bin(source, tmp_path / "out", show_progress=False)
    index.write_text(original)
    content = second.read_bytes()
    second.unlink()
    with pytest.raises(ModelFormatError, match=f"{second.name} is missing or not a regular file"):
        convert_bin(source, tmp_path / "out", show_progress=False)
    second.write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelFormatError, match=f"{second.name} cannot be read as a torch checkpoint"):
        convert_bin(source, tmp_path / "out", show_progress=False)
    second.write_bytes(first.read_bytes())
    with pytest.raises(ModelFormatError, match=f"is in both .*{first.name} and .*{second.name}"):
        convert_bin(source, tmp_path / "out", show_progress=False)
    for file in (first, second, index):
        file.unlink()
    with pytest.raises(ModelFormatError, match=r"has no pytorch_model\*\.bin"):
        convert_bin(source, tmp_path / "out", show_progress=False)


# meta

META_NAMES = {
    "input_layernorm": ("attention_norm", None),
    "self_attn.q_proj": ("attention.wq", 0),
    "self_attn.k_proj": ("attention.wk", 0),
    "self_attn.v_proj": ("attention.wv", 0),
    "self_attn.o_proj": ("attention.wo", 1),
    "post_attention_layernorm": ("ffn_norm", None),
    "mlp.gate_proj": ("feed_forward.w1", 0),
    "mlp.down_proj": ("feed_forward.w2", 1),
    "mlp.up_proj": ("feed_forward.w3", 0),
}


def save_meta(
    directory: Path, model: LlamaForCausalLM, shards: int = 1, embedding_dimension: int = 1, **params: Any
) -> None:
    """Write a model as Meta does, cut for `shards` model-parallel GPUs."""
    directory.mkdir()
    state = model.state_dict()
    cut: dict[str, tuple[Tensor, int | None]] = {
        "tok_embeddings.weight": (state["model.embed_tokens.weight"], embedding_dimension),
        "norm.weight": (state["model.norm.weight"], None),
        "output.weight": (state["lm_head.weight"], 0),
        "rope.freqs": (torch.ones(4), None),
    }
    for name, (target, dimension) in META_NAMES.items():
        for layer, weight in enumerate(layers(state, name)):
            heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}.get(name)
            pairs = weight if heads is None else to_adjacent_pairs(weight, heads)
            cut[f"layers.{layer}.{target}.weight"] = (pairs, dimension)
    for shard in range(shards):
        part = {
            name: (whole if dimension is None else whole.chunk(shards, dimension)[shard]).clone()
            for name, (whole, dimension) in cut.items()
        }
        torch.save(part, directory / f"consolidated.{shard:02d}.pth")
    contents = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-5, "vocab_size": -1}
    (directory / "params.json").write_text(json.dumps(contents | params))


@pytest.mark.parametrize(("shards", "embedding_dimension"), [(1, 1), (2, 1), (2, 0)])
def test_metas_checkpoint_becomes_the_model_it_was_made_from(
    tmp_path: Path, shards: int, embedding_dimension: int
) -> None:
    model = make_model()
    save_meta(tmp_path / "meta", model, shards, embedding_dimension, multiple_of=8)
    notes = convert_meta(tmp_path / "meta", tmp_path / "out", max_position_embeddings=64, show_progress=False)
    assert [note.partition(" has no ")[2].partition(";")[0] for note in notes] == ["tokenizer.model"]
    back = LlamaForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(logits(back), logits(model))


def test_metas_scaled_rope_becomes_llama3_rope_once_its_factor_is_given(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 500_000.0,
    }
    model = make_model(tie_word_embeddings=True, rope_parameters=rope, max_position_embeddings=131_072)
    save_meta(tmp_path / "meta", model, rope_theta=500_000.0, use_scaled_rope=True)
    with pytest.raises(InvalidValueError, match=r"rope_factor must be given, .*8 for Llama 3\.1"):
        convert_meta(tmp_path / "meta", tmp_path / "out", show_progress=False)
    convert_meta(tmp_path / "meta", tmp_path / "out", rope_factor=32.0, show_progress=False)
    config = ModelConfig.from_directory(tmp_path / "out")
    assert config.max_position_embeddings == 131_072
    assert config.tie_word_embeddings  # its output.weight equals its embedding
    assert config.rope.factor == 32.0
    back = LlamaForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(logits(back), logits(model))


def test_metas_llama_3_has_a_context_of_8192(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 500_000.0}
    save_meta(tmp_path / "meta", make_model(rope_parameters=rope), rope_theta=500_000.0)
    convert_meta(tmp_path / "meta", tmp_path / "out", show_progress=False)
    assert ModelConfig.from_directory(tmp_path / "out").max_position_embeddings == 8192


def test_metas_tokenizer_of_llama_3_becomes_a_tokenizer_json_that_transformers_reads(tmp_path: Path) -> None:
    ranks = b"".join(base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256)) + b"aGE= 256\n"
    source = tmp_path / "meta"
    save_meta(source, make_model(vocab_size=513))
    (source / "tokenizer.model").write_bytes(ranks)
    notes = convert_meta(source, tmp_path / "out", max_position_embeddings=64, show_progress=False)
    assert notes == []
    assert not (tmp_path / "out" / "tokenizer.model").exists()
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "tokenizer.model").write_bytes(ranks)
    original, ours = load_tokenizer(tmp_path / "plain"), load_tokenizer(tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("haha<|eot_id|>é", ""):
        assert original.encode(text) == ours.encode(text) == theirs.encode(text)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id) == (257, 258)


def test_a_tokenizer_of_another_kind_is_left_out_with_a_note(tmp_path: Path) -> None:
    save_meta(tmp_path / "meta", make_model())
    (tmp_path / "meta" / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")
    notes = convert_meta(tmp_path / "meta", tmp_path / "out", max_position_embeddings=64, show_progress=False)
    assert len(notes) == 1
    assert notes[0].startswith("left out: tokenizer must be ")
    assert not (tmp_path / "out" / "tokenizer.model").exists()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"moe_args": {}}, r"params\.json: 'moe_args' is not supported; the known fields are"),
        ({"n_heads": 4.0}, r"params\.json: n_heads must be an integer above 0.*; got 4\.0"),
        ({"dim": -32}, r"params\.json: dim must be a number above 0.*; got -32"),
        ({"norm_eps": None}, r"params\.json: norm_eps must be .*; got None"),
        ({"n_layers": 3}, r"tensor 'model\.layers\.2\..*' is missing in .*consolidated\.00\.pth"),
        ({"n_heads": 5}, r"'layers\.0\.attention\.wq\.weight' has 32 rows for 5 heads"),
        ({"n_kv_heads": 1}, "n_kv_heads must be a multiple of the 2 shards.*; got 1"),
    ],
)
def test_wrong_params_are_refused(tmp_path: Path, params: dict[str, Any], message: str) -> None:
    save_meta(tmp_path / "meta", make_model(), 2, **params)
    with pytest.raises(ModelFormatError, match=message):
        convert_meta(tmp_path / "meta", tmp_path / "out", max_position_embeddings=64, show_progress=False)
    assert not (tmp_path / "out").exists()


def test_what_params_json_does_not_say_must_be_given(tmp_path: Path) -> None:
    save_meta(tmp_path / "meta", make_model())
    with pytest.raises(InvalidValueError, match=r"max_position_embeddings must be given, .*2048 for Llama 1, 4096"):
        convert_meta(tmp_path / "meta", tmp_path / "out", show_progress=False)
    with pytest.raises(InvalidValueError, match=r"rope_factor must be absent.*; got 8\.0"):
        convert_meta(
            tmp_path / "meta", tmp_path / "out", max_position_embeddings=64, rope_factor=8.0, show_progress=False
        )


def test_damaged_meta_shards_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "meta"
    save_meta(source, make_model(), 2)
    second = source / "consolidated.01.pth"
    original = torch.load(second, weights_only=True)
    down = "layers.1.feed_forward.w2.weight"
    for changes, message in (
        ({down: original[down][:, 1:]}, f"tensor '{down}' differs in shape or dtype between shards"),
        ({down: original[down].half()}, f"tensor '{down}' differs in shape or dtype between shards"),
        ({"layers.1.vision.weight": torch.ones(1)}, r"tensor 'layers\.1\.vision\.weight' is unexpected"),
        ({"layers.x.attention.wq.weight": torch.ones(1)}, r"'layers\.x\.attention\.wq\.weight' is unexpected"),
    ):
        torch.save(original | changes, second)
        with pytest.raises(ModelFormatError, match=message):
            convert_meta(source, tmp_path / "out", max_position_embeddings=64, show_progress=False)
    torch.save({name: tensor for name, tensor in original.items() if name != down}, second)
    with pytest.raises(ModelFormatError, match=rf"consolidated\.01\.pth: tensor '{down}' is missing"):
        convert_meta(source, tmp_path / "out", max_position_embeddings=64, show_progress=False)
    for file in source.glob("*.pth"):
        file.unlink()
    with pytest.raises(ModelFormatError, match=r"has no consolidated\.\*\.pth"):
        convert_meta(source, tmp_path / "out", max_position_embeddings=64, show_progress=False)


# Destinations and the command line


def test_a_destination_in_use_is_kept_unless_overwrite_is_given(tmp_path: Path) -> None:
    source, destination = tmp_path / "model.bin", tmp_path / "out"
    write_llama2c(source, make_model(tie_word_embeddings=True))
    destination.mkdir()
    (destination / "notes.txt").write_text("mine")
    (destination / "model-00001-of-00002.safetensors").write_text("stale")
    (destination / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(InvalidValueError, match=r"DST must be a new or empty directory \(or give --overwrite\)"):
        convert_llama2c(source, destination, show_progress=False)
    assert len(list(destination.iterdir())) == 3
    convert_llama2c(source, destination, overwrite=True, show_progress=False)
    assert sorted(file.name for file in destination.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "notes.txt",
    ]
    assert (destination / "notes.txt").read_text() == "mine"
    with pytest.raises(InvalidValueError, match=r"DST must be a directory, or a path where none exists.*; got .*"):
        convert_llama2c(source, source, overwrite=True, show_progress=False)


def test_written_weights_are_as_readable_as_the_files_beside_them(tmp_path: Path) -> None:
    write_llama2c(tmp_path / "model.bin", make_model(tie_word_embeddings=True))
    convert_llama2c(tmp_path / "model.bin", tmp_path / "out", show_progress=False)
    modes = {(tmp_path / "out" / name).stat().st_mode for name in ("config.json", "model.safetensors")}
    assert len(modes) == 1


def test_the_command_line_converts_inspects_and_verifies(tmp_path: Path) -> None:
    save_bin(tmp_path / "bin", make_model())
    converted = run("convert", "bin", tmp_path / "bin", tmp_path / "out", "--shard-size", "0.00001")
    assert converted.exit_code == 0, converted.output
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    verified = run("verify", tmp_path / "out")
    assert (verified.exit_code, verified.stdout) == (0, "OK\n")
    shown = run("inspect", tmp_path / "out")
    assert shown.exit_code == 0
    parameters = sum(parameter.numel() for parameter in make_model().parameters())
    assert f"{parameters:,}" in shown.stdout
    assert f"{parameters * 4:,}" in shown.stdout
    assert "256 (32-bit)" in shown.stdout  # 2 (K and V) x 2 layers x 2 kv heads x 8 channels x 4 bytes


def test_the_command_line_converts_meta_and_passes_notes_on(tmp_path: Path) -> None:
    save_meta(tmp_path / "meta", make_model())
    done = run("convert", "meta", tmp_path / "meta", tmp_path / "out", "--max-position-embeddings", "64")
    assert done.exit_code == 0, done.output
    assert "note: " in done.stderr
    assert "has no tokenizer.model" in done.stderr


def test_errors_are_one_line_and_the_exit_code_of_wrong_input(tmp_path: Path) -> None:
    for arguments in (
        ("inspect", tmp_path),
        ("convert", "llama2c", tmp_path / "absent", tmp_path / "out"),
        ("convert", "bin", tmp_path / "absent", tmp_path / "out"),
        ("convert", "bin", tmp_path, tmp_path / "out", "--shard-size", "0"),
        ("convert", "meta", tmp_path / "absent", tmp_path / "out"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2, arguments
        assert result.stdout == ""
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1


def test_inspect_shows_even_what_verify_refuses(tmp_path: Path) -> None:
    write_llama2c(tmp_path / "model.bin", make_model(tie_word_embeddings=True))
    convert_llama2c(tmp_path / "model.bin", tmp_path / "out", show_progress=False)
    save_file({"odd [red]name": torch.ones(0)}, tmp_path / "out" / "model.safetensors")
    shown = run("inspect", tmp_path / "out")
    assert shown.exit_code == 0
    assert "odd [red]name" in shown.stdout
    assert "is missing in" in run("verify", tmp_path / "out").stderr


def test_verify_finds_what_the_loader_would(tmp_path: Path) -> None:
    write_llama2c(tmp_path / "model.bin", make_model(tie_word_embeddings=True))
    convert_llama2c(tmp_path / "model.bin", tmp_path / "out", show_progress=False)
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][5] = torch.nan
    save_file(tensors, file)
    result = run("verify", tmp_path / "out")
    assert result.exit_code == 1
    assert "tensor 'model.norm.weight' holds NaN or infinity" in result.stderr

    tensors["model.norm.weight"][5] = 1e6
    save_file(tensors, file)
    assert run("verify", tmp_path / "out").exit_code == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps(config | {"torch_dtype": "float16"}))
    assert "has values too large for torch.float16" in run("verify", tmp_path / "out").stderr
    (tmp_path / "out" / "generation_config.json").write_text('{"top_p": "x"}')
    assert (
        "generation_config.json: top_p must be a finite number of at least 0; got 'x'"
        in run("verify", tmp_path / "out").stderr
    )
