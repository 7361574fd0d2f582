"""A saved Llama of transformers, and edits to its files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

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


def change_json(file: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    contents = json.loads(file.read_text())
    edit(contents)
    file.write_text(json.dumps(contents))
