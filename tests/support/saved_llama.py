"""A saved Llama of transformers, and edits to its files."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from d3engine.model.checkpoint_formats import to_half_split
from d3engine.model.config import ModelConfig
from d3engine.model.weights import LlamaWeights, load_weights

SIZES: dict[str, Any] = {"vocab_size": 37, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "attention_bias": True, "mlp_bias": True}
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


def put(name: str, tensor: Tensor | None) -> Callable[[dict[str, Tensor]], Any]:
    """The edit that puts a tensor in its place; None: that leaves it out."""
    return lambda tensors: tensors.pop(name) if tensor is None else tensors.update({name: tensor})


def change_json(file: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    contents = json.loads(file.read_text())
    edit(contents)
    file.write_text(json.dumps(contents))


def assert_in_place(weights: LlamaWeights, state: Mapping[str, Tensor]) -> None:
    """Weights of four heads over two are the tensors `state`, by transformers' names, to the bit."""
    assert torch.equal(weights.embedding, state[EMBEDDING])
    assert torch.equal(weights.final_norm, state["model.norm.weight"])
    assert torch.equal(weights.lm_head, state["lm_head.weight"])
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}."
        of = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        stacks = {"weight": (layer.qkv, layer.gate_up), "bias": (layer.qkv_bias, layer.gate_up_bias)}
        for kind in ("weight", "bias") if "mlp.up_proj.bias" in of else ("weight",):
            qkv, gate_up = stacks[kind]
            query, key, value = (of[f"self_attn.{name}_proj.{kind}"] for name in "qkv")
            own_query, own_key, own_value = qkv.split([len(query), len(key), len(value)])
            assert torch.equal(to_half_split(own_query, 4), query)
            assert torch.equal(to_half_split(own_key, 2), key)
            assert torch.equal(own_value, value)
            assert torch.equal(gate_up, torch.cat([of[f"mlp.gate_proj.{kind}"], of[f"mlp.up_proj.{kind}"]]))
        others = {"attention_norm": "input_layernorm.weight", "mlp_norm": "post_attention_layernorm.weight"}
        others |= {"output": "self_attn.o_proj.weight", "output_bias": "self_attn.o_proj.bias"}
        others |= {"down": "mlp.down_proj.weight", "down_bias": "mlp.down_proj.bias"}
        for field, name in others.items():
            own = getattr(layer, field)
            assert own is None if name not in of else torch.equal(own, of[name])
