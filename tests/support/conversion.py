"""Small models to convert in every form that a converter reads, and what a test asks of them before and after."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner, Result

from d3engine.cli.weights import app
from d3engine.errors import ModelFormatError
from d3engine.model.checkpoint_formats import to_adjacent_pairs

SHARED_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
STORIES = SHARED_DATA / "stories260K"
LLAMA2_TOKENIZER = SHARED_DATA / "llama2" / "tokenizer.model"

SIZES: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
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


def assert_refuses(
    message: str,
    convert: Callable[..., Any],
    *arguments: Path,
    error: type[Exception] = ModelFormatError,
    **options: Any,
) -> None:
    """A conversion must be refused with this message."""
    with pytest.raises(error, match=message):
        convert(*arguments, show_progress=False, **options)


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
