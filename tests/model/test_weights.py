"""Weights arrive in the engine's layout, and what is wrong with a directory is named before it is loaded."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from d3engine.errors import ModelFormatError
from d3engine.model.checkpoint import open_checkpoint
from d3engine.model.config import ModelConfig
from d3engine.model.expected_tensors import expected_tensors
from d3engine.model.rope import Rope
from d3engine.model.weights import (
    LlamaWeights,
    load_weights,
    random_weights,
    to_adjacent_pairs,
    to_half_split,
)

SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "attention_bias": True,
    "mlp_bias": True,
}
DOWN = "model.layers.1.mlp.down_proj.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


def save_model(directory: Path, max_shard_size: str = "1GB", **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(SIZES | changes)))
    with torch.no_grad():  # transformers starts biases at zero and norms at one, which would prove nothing
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model


def load(directory: Path, dtype: torch.dtype = torch.float32) -> LlamaWeights:
    config = ModelConfig.from_directory(directory)
    return load_weights(directory, config, dtype=dtype, device="cpu", show_progress=False)


def change(directory: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    """Edit the tensors of a saved single-file model."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def change_json(file: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    contents = json.loads(file.read_text())
    edit(contents)
    file.write_text(json.dumps(contents))


@pytest.mark.parametrize("shards", ["1GB", "4KB"])
def test_every_tensor_of_a_model_arrives_in_its_place(tmp_path: Path, shards: str) -> None:
    state = save_model(tmp_path, shards).state_dict()
    assert (tmp_path / "model.safetensors").exists() == (shards == "1GB")
    weights = load(tmp_path)
    assert torch.equal(weights.embedding, state[EMBEDDING])
    assert torch.equal(weights.final_norm, state["model.norm.weight"])
    assert torch.equal(weights.lm_head, state["lm_head.weight"])
    assert len(weights.layers) == 2
    for index, layer in enumerate(weights.layers):
        of = {
            name.removeprefix(f"model.layers.{index}."): tensor
            for name, tensor in state.items()
            if f"layers.{index}." in name
        }
        for kind, qkv, gate_up in (("weight", layer.qkv, layer.gate_up), ("bias", layer.qkv_bias, layer.gate_up_bias)):
            assert qkv is not None
            assert gate_up is not None
            query, key, value = qkv.split([40, 20, 20])
            assert torch.equal(to_half_split(query, 4), of[f"self_attn.q_proj.{kind}"])
            assert torch.equal(to_half_split(key, 2), of[f"self_attn.k_proj.{kind}"])
            assert torch.equal(value, of[f"self_attn.v_proj.{kind}"])
            gate, up = gate_up.split(20)
            assert torch.equal(gate, of[f"mlp.gate_proj.{kind}"])
            assert torch.equal(up, of[f"mlp.up_proj.{kind}"])
        for tensor, name in (
            (layer.attention_norm, "input_layernorm.weight"),
            (layer.mlp_norm, "post_attention_layernorm.weight"),
            (layer.output, "self_attn.o_proj.weight"),
            (layer.output_bias, "self_attn.o_proj.bias"),
            (layer.down, "mlp.down_proj.weight"),
            (layer.down_bias, "mlp.down_proj.bias"),
        ):
            assert tensor is not None
            assert torch.equal(tensor, of[name])
    assert weights.nbytes == sum(tensor.nbytes for tensor in state.values())


def test_adjacent_pairs_are_channels_j_and_j_plus_half() -> None:
    rows = torch.arange(12)  # two heads of six channels
    assert to_adjacent_pairs(rows, 2).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert torch.equal(to_half_split(to_adjacent_pairs(rows, 2), 2), rows)


def test_complex_rope_on_the_permuted_rows_gives_transformers_attention_logits(tmp_path: Path) -> None:
    model = save_model(tmp_path)
    weights, config = load(tmp_path), ModelConfig.from_directory(tmp_path)
    hidden, positions = torch.randn(5, 24), torch.tensor([0, 1, 7, 300, 2000])

    attention = model.model.layers[0].self_attn
    query = attention.q_proj(hidden).view(1, 5, 4, 10).transpose(1, 2)
    key = attention.k_proj(hidden).view(1, 5, 2, 10).transpose(1, 2)
    cos, sin = model.model.rotary_emb(hidden, positions[None])
    query, key = apply_rotary_pos_emb(query, key, cos, sin)
    expected = torch.einsum("hid,hjd->hij", query[0], key[0].repeat_interleave(2, dim=0))

    rotations = Rope(config, 2048, "cpu").rotations(positions)[:, None]
    layer = weights.layers[0]
    rows = torch.nn.functional.linear(hidden, layer.qkv, layer.qkv_bias)

    def rotated(columns: Tensor, heads: int) -> Tensor:
        pairs = torch.view_as_complex(columns.reshape(5, heads, 5, 2))
        return torch.view_as_real(pairs * rotations).flatten(2)

    ours = torch.einsum(
        "ihd,jhd->hij", rotated(rows[:, :40], 4), rotated(rows[:, 40:60], 2).repeat_interleave(2, dim=1)
    )
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-3)


def test_a_model_without_biases_has_none(tmp_path: Path) -> None:
    save_model(tmp_path, attention_bias=False, mlp_bias=False)
    layer = load(tmp_path).layers[0]
    assert layer.qkv_bias is layer.output_bias is layer.gate_up_bias is layer.down_bias is None
    assert len(layer.tensors()) == 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_converted_as_torch_rounds_them(tmp_path: Path, dtype: torch.dtype) -> None:
    state = save_model(tmp_path).state_dict()
    weights = load(tmp_path, dtype)
    assert torch.equal(weights.layers[1].down, state[DOWN].to(dtype))
    assert torch.equal(to_half_split(weights.layers[0].qkv[:40], 4), state[QUERY].to(dtype))


def test_tied_weights_are_one_tensor_counted_once(tmp_path: Path) -> None:
    model = save_model(tmp_path, tie_word_embeddings=True)
    weights = load(tmp_path)
    assert weights.lm_head is weights.embedding
    assert weights.nbytes == sum(parameter.nbytes for parameter in model.parameters())


def test_a_stray_lm_head_of_a_tied_model_must_equal_the_embedding(tmp_path: Path) -> None:
    save_model(tmp_path, tie_word_embeddings=True)
    change(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors[EMBEDDING].clone()}))
    weights = load(tmp_path)
    assert weights.lm_head is weights.embedding
    change(tmp_path, lambda tensors: tensors["lm_head.weight"].mul_(2))
    with pytest.raises(ModelFormatError, match=r"model\.safetensors: tensor 'lm_head\.weight' differs from"):
        load(tmp_path)


def test_old_rope_buffers_are_ignored(tmp_path: Path) -> None:
    save_model(tmp_path)
    before = load(tmp_path)
    change(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(5)}))
    assert load(tmp_path).nbytes == before.nbytes


WRONG_TENSORS: list[tuple[Callable[[dict[str, Tensor]], Any], str]] = [
    (lambda tensors: tensors.pop(DOWN), f"tensor '{DOWN}' is missing in .*model.safetensors"),
    (lambda tensors: tensors.pop("lm_head.weight"), "'lm_head.weight' is missing in .*tie_word_embeddings is false"),
    (
        lambda tensors: tensors.update({"model.layers.2.input_layernorm.weight": torch.ones(24)}),
        "model.safetensors: tensor 'model.layers.2.input_layernorm.weight' is unexpected",
    ),
    (
        lambda tensors: tensors.update({DOWN: torch.ones(20, 24)}),
        rf"model.safetensors: tensor '{DOWN}' has shape \[20, 24\]; config.json asks for \[24, 20\]",
    ),
    (lambda tensors: tensors.update({QUERY: torch.ones(40 * 24)}), rf"'{QUERY}' has shape \[960\]"),
    (
        lambda tensors: tensors.update({DOWN: torch.ones(24, 20, dtype=torch.int8)}),
        f"tensor '{DOWN}' has dtype I8: allowed are F64, F32, F16, BF16",
    ),
    (lambda tensors: tensors[DOWN][3, 4].fill_(torch.nan), f"model.safetensors: tensor '{DOWN}' holds NaN or infinity"),
    (lambda tensors: tensors[QUERY][3, 4].fill_(-torch.inf), f"tensor '{QUERY}' holds NaN or infinity"),
]


@pytest.mark.parametrize(("edit", "message"), WRONG_TENSORS)
def test_a_wrong_tensor_is_named_with_its_file(
    tmp_path: Path, edit: Callable[[dict[str, Tensor]], Any], message: str
) -> None:
    save_model(tmp_path)
    change(tmp_path, edit)
    with pytest.raises(ModelFormatError, match=message):
        load(tmp_path)


def test_values_too_large_for_the_dtype_are_an_error_and_not_infinity(tmp_path: Path) -> None:
    save_model(tmp_path)
    change(tmp_path, lambda tensors: tensors[DOWN][0, 0].fill_(1e6))
    assert load(tmp_path, torch.bfloat16).layers[1].down[0, 0] == torch.tensor(1e6, dtype=torch.bfloat16)
    with pytest.raises(ModelFormatError, match=rf"'{DOWN}' has values too large for torch\.float16"):
        load(tmp_path, torch.float16)


def test_shapes_are_checked_before_anything_is_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path)
    change_json(tmp_path / "config.json", lambda config: config.update(vocab_size=2**31 - 1))

    def refuse(*_: Any, **__: Any) -> Tensor:
        raise AssertionError("allocated before the shapes were checked")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(ModelFormatError, match=rf"{EMBEDDING}' has shape \[37, 24\]; .* \[2147483647, 24\]"):
        load(tmp_path)


def header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01\x02",
        struct.pack("<Q", 2**62),
        struct.pack("<Q", 100 * 2**20 + 1) + b"{}",
        header(b"not json"),
        header(b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}') + bytes(8),
        header(b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 16]}}') + bytes(16),
        header(
            b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},'
            b' "b": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}}'
        )
        + bytes(24),
        header(b'{"a": {"dtype": "F32", "shape": [4294967296, 4294967296], "data_offsets": [0, 0]}}'),
        header(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}') + bytes(16),
    ],
    ids=[
        "empty",
        "cut header",
        "header longer than any file",
        "oversized header",
        "header not JSON",
        "truncated",
        "shape does not fit",
        "overlapping",
        "overflowing shape",
        "more bytes than tensors",
    ],
)
def test_a_corrupt_file_is_an_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    save_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelFormatError, match=r"model\.safetensors is not a valid safetensors file"):
        load(tmp_path)


def test_a_truncated_download_is_an_error(tmp_path: Path) -> None:
    save_model(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelFormatError, match="not a valid safetensors file"):
        load(tmp_path)


def test_a_directory_in_the_place_of_a_file_is_an_error(tmp_path: Path) -> None:
    save_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ModelFormatError, match=r"model\.safetensors is missing or not a regular file"):
        load(tmp_path)


@pytest.mark.parametrize(
    "shard",
    [
        "../model.safetensors",
        "/etc/model.safetensors",
        "a/b.safetensors",
        "..\\b.safetensors",
        "C:b.safetensors",
        "a\0.safetensors",
        "model.bin",
        "..",
        "",
        None,
        7,
    ],
)
def test_a_shard_name_must_be_a_plain_name(tmp_path: Path, shard: Any) -> None:
    save_model(tmp_path, "4KB")
    change_json(tmp_path / "model.safetensors.index.json", lambda index: index["weight_map"].update({DOWN: shard}))
    with pytest.raises(ModelFormatError, match=f"tensor '{DOWN}' is in .*: a shard must be a plain .safetensors"):
        load(tmp_path)


def test_shards_may_be_links_as_in_a_hub_cache(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    save_model(blobs, "4KB")
    snapshot.mkdir()
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert load(snapshot).nbytes == load(blobs).nbytes


@pytest.mark.parametrize("weight_map", [None, {}, [], "model.safetensors"])
def test_an_index_without_a_weight_map_is_an_error(tmp_path: Path, weight_map: Any) -> None:
    save_model(tmp_path, "4KB")
    change_json(tmp_path / "model.safetensors.index.json", lambda index: index.update(weight_map=weight_map))
    with pytest.raises(ModelFormatError, match=r"index\.json: weight_map must be an object"):
        load(tmp_path)


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    save_model(tmp_path, "4KB")
    index = tmp_path / "model.safetensors.index.json"
    original = index.read_text()
    weight_map = json.loads(original)["weight_map"]
    elsewhere = next(shard for shard in weight_map.values() if shard != weight_map[DOWN])

    change_json(index, lambda contents: contents["weight_map"].update({DOWN: elsewhere}))
    with pytest.raises(ModelFormatError, match=f"'{DOWN}' is in '{weight_map[DOWN]}'; the index says '{elsewhere}'"):
        load(tmp_path)

    index.write_text(original)
    change_json(index, lambda contents: contents["weight_map"].pop(DOWN))
    with pytest.raises(ModelFormatError, match=rf"{weight_map[DOWN]}: tensor '{DOWN}' is not in .*index\.json"):
        load(tmp_path)

    index.write_text(original)
    change_json(index, lambda contents: contents["weight_map"].update({"ghost": elsewhere}))
    with pytest.raises(ModelFormatError, match="tensor 'ghost' is not in any shard; the index says"):
        load(tmp_path)

    index.write_text(original)
    (tmp_path / weight_map[DOWN]).unlink()
    with pytest.raises(ModelFormatError, match=f"{weight_map[DOWN]} is missing or not a regular file"):
        load(tmp_path)


def test_a_tensor_in_two_shards_is_an_error(tmp_path: Path) -> None:
    save_model(tmp_path, "4KB")
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    other = next(shard for shard in weight_map.values() if shard != weight_map[DOWN])
    save_file(load_file(tmp_path / other) | {DOWN: torch.ones(24, 20)}, tmp_path / other)
    with pytest.raises(ModelFormatError, match=f"tensor '{DOWN}' is in both .*{min(other, weight_map[DOWN])} and"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("pytorch_model.bin", "pickled weights are never loaded; convert them: d3engine weights convert bin .* DST"),
        ("model.pth", "d3engine weights convert bin"),
        ("consolidated.00.pth", "d3engine weights convert meta .* DST"),
        ("notes.txt", r"has neither model\.safetensors nor model\.safetensors\.index\.json$"),
    ],
)
def test_a_directory_without_safetensors_names_the_converter(tmp_path: Path, file: str, message: str) -> None:
    save_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / file).write_bytes(b"")
    with pytest.raises(ModelFormatError, match=message):
        load(tmp_path)


def test_headers_tell_sizes_without_reading(tmp_path: Path) -> None:
    save_model(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        entry = checkpoint.entries[DOWN]
    assert (entry.shape, entry.dtype, entry.num_values, entry.nbytes) == ((24, 20), "F32", 480, 1920)


@pytest.mark.parametrize("tied", [False, True])
def test_random_weights_have_the_shapes_of_loaded_ones_and_follow_the_seed(tmp_path: Path, tied: bool) -> None:
    save_model(tmp_path, tie_word_embeddings=tied)
    config = ModelConfig.from_directory(tmp_path)
    loaded = load(tmp_path)
    made = random_weights(config, dtype=torch.float32, device="cpu", seed=3)
    assert made.nbytes == loaded.nbytes
    assert (made.lm_head is made.embedding) == tied
    assert [tensor.shape for tensor in made.layers[1].tensors()] == [
        tensor.shape for tensor in loaded.layers[1].tensors()
    ]
    again = random_weights(config, dtype=torch.float32, device="cpu", seed=3)
    other = random_weights(config, dtype=torch.float32, device="cpu", seed=4)
    assert torch.equal(made.layers[1].down, again.layers[1].down)
    assert not torch.equal(made.layers[1].down, other.layers[1].down)
    assert made.layers[0].gate_up.std().item() == pytest.approx(0.02, rel=0.1)
    assert made.layers[0].down.std().item() == pytest.approx(0.01, rel=0.15)  # 0.02 / sqrt(2 * 2 layers)


def test_expected_tensors_are_those_transformers_saves(tmp_path: Path) -> None:
    state = save_model(tmp_path).state_dict()
    expected = expected_tensors(ModelConfig.from_directory(tmp_path))
    assert expected == {name: tuple(tensor.shape) for name, tensor in state.items()}
