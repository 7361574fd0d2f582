"""Weights arrive in the engine's layout, whatever the form in which a directory holds them."""

from pathlib import Path

import pytest
import torch
from saved_llama import DOWN, EMBEDDING, QUERY, assert_in_place, change, load, save_model
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from d3engine.errors import ModelFormatError
from d3engine.model.checkpoint_formats import to_adjacent_pairs, to_half_split
from d3engine.model.config import ModelConfig
from d3engine.model.llama import Rope
from d3engine.model.weights import random_weights


@pytest.mark.parametrize("shards", ["1GB", "4KB"])
def test_every_tensor_of_a_model_arrives_in_its_place(tmp_path: Path, shards: str) -> None:
    state = save_model(tmp_path, shards).state_dict()
    assert (tmp_path / "model.safetensors").exists() == (shards == "1GB")
    weights = load(tmp_path)
    assert len(weights.layers) == 2
    assert all(layer.qkv_bias is not None for layer in weights.layers)
    assert_in_place(weights, state)
    assert weights.nbytes == sum(tensor.nbytes for tensor in state.values())


def test_adjacent_pairs_are_channels_j_and_j_plus_half() -> None:
    rows = torch.arange(12)  # two heads of six channels
    assert to_adjacent_pairs(rows, 2).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert torch.equal(to_half_split(to_adjacent_pairs(rows, 2), 2), rows)


def test_complex_rope_on_permuted_rows_is_transformers(tmp_path: Path) -> None:
    """Complex rope on the permuted rows gives transformers' attention logits."""
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


def test_stray_lm_head_of_a_tied_model_must_equal_embedding(tmp_path: Path) -> None:
    """A stray lm head of a tied model must equal the embedding."""
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


@pytest.mark.parametrize("tied", [False, True])
def test_random_weights_have_loaded_shapes_and_follow_seeds(tmp_path: Path, tied: bool) -> None:
    """Random weights have the shapes of loaded ones and follow the seed."""
    save_model(tmp_path, tie_word_embeddings=tied)
    config = ModelConfig.from_directory(tmp_path)
    loaded = load(tmp_path)
    made = random_weights(config, dtype=torch.float32, device="cpu", seed=3)
    assert made.nbytes == loaded.nbytes
    assert (made.lm_head is made.embedding) == tied
    assert [one.shape for one in made.layers[1].tensors()] == [one.shape for one in loaded.layers[1].tensors()]
    again = random_weights(config, dtype=torch.float32, device="cpu", seed=3)
    other = random_weights(config, dtype=torch.float32, device="cpu", seed=4)
    assert torch.equal(made.layers[1].down, again.layers[1].down)
    assert not torch.equal(made.layers[1].down, other.layers[1].down)
    assert made.layers[0].gate_up.std().item() == pytest.approx(0.02, rel=0.1)
    assert made.layers[0].down.std().item() == pytest.approx(0.01, rel=0.15)  # 0.02 / sqrt(2 * 2 layers)
