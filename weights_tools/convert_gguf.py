"""Converts GGUF files of Llamas into safetensors directories.

The one idea: a key that could change what a model computes is either read or refused by its name; so are kinds of
tensors, of tokenizers and of rope. llama.cpp keeps the channels of query and key heads as adjacent pairs, as Meta does;
model directories are always in transformers' half-split order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from d3engine.errors import ModelFormatError, must_be, require
from d3engine.model.expected_tensors import EMBEDDING, FINAL_NORM, LM_HEAD
from d3engine.model.fields import Fields
from d3engine.model.gguf_file import GGUFFile, GGUFTensor, open_gguf
from d3engine.model.weights import to_half_split
from d3engine.weights_tools.gguf_tokenizer import add_gguf_tokenizer
from d3engine.weights_tools.writing import (
    DEFAULT_SHARD_BYTES,
    PendingTensor,
    hf_config,
    output_directory,
    write_configs,
    write_weights,
)

GGUF_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_NAMES = {
    "token_embd": EMBEDDING.removesuffix(".weight"),
    "output_norm": FINAL_NORM.removesuffix(".weight"),
    "output": LM_HEAD.removesuffix(".weight"),
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,4})\.(\w+)\.(weight|bias)")
_FREQ_FACTORS = "rope_freqs.weight"

_READ = frozenset(
    {
        *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
        *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
        *("attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base", "rope.scale_linear"),
        *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
        *("rope.scaling.finetuned", "tensor_data_layout"),
    }
)
"""The keys behind "llama." that are read, or say nothing that changes a result."""
_OFF = (None, 0, 0.0, False)

# Llama 3.1's and 3.2's own numbers, which a GGUF file holds only as what they come to for each channel.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def convert_gguf(
    source: Path,
    destination: Path,
    *,
    dtype: str = "float32",
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
    show_progress: bool = True,
) -> None:
    """Convert a GGUF file of the llama architecture to a model directory, its tensors dequantized to `dtype`.

    Tokenizer, special tokens and chat template come along. Raises `ModelFormatError` for a file that is damaged or
    holds what is not supported, `InvalidValueError` for a destination in use or another dtype, and `MissingExtraError`
    without the package `gguf`.
    """
    require(dtype in GGUF_DTYPES, "dtype", dtype, f"one of {', '.join(GGUF_DTYPES)}")
    file = open_gguf(source)
    raw = gguf_config(file, dtype)
    with output_directory(destination, overwrite=overwrite) as folder:
        config = write_configs(folder, raw)
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
        add_gguf_tokenizer(file, folder, config.vocab_size)
        tensors = dict(_tensors(file, GGUF_DTYPES[dtype], heads))
        write_weights(folder, config, tensors, shard_bytes=shard_bytes, show_progress=show_progress)


def gguf_config(file: GGUFFile, dtype: str) -> dict[str, Any]:
    """The config.json that says what the metadata of a GGUF file says. Raises `ModelFormatError`."""
    metadata = file.metadata
    if metadata.get("general.architecture") != "llama":
        _refuse(file, "general.architecture", "'llama'")
    if metadata.get("split.count", 1) not in (0, 1):
        _refuse(file, "split.count", "1: put the parts together first (llama-gguf-split --merge)")
    _refuse_unread(file)
    own = {key.removeprefix("llama."): value for key, value in metadata.items() if key.startswith("llama.")}
    fields = Fields(own, f"{file.path}: llama")
    num_heads = fields.integer("attention.head_count")
    hidden_size = fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", default=max(1, hidden_size // num_heads))
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(name, default=head_dim) != head_dim:
            fields.refuse(name, f"the length of a head, {head_dim}")
    max_positions = fields.integer("context_length")
    theta = fields.number("rope.freq_base", default=10_000.0)
    config = hf_config(
        vocab_size=_embedding(file).shape[0],
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=fields.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", default=num_heads),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=max_positions,
        tied="output.weight" not in file.tensors,
        dtype=dtype,
        rope_theta=theta,
        rope_scaling=_rope_scaling(file, fields, head_dim, theta),
    )
    return config | {
        "head_dim": head_dim,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        **_ends_of_text(file),
    }


def _refuse(file: GGUFFile, key: str, allowed: str) -> None:
    raise ModelFormatError(must_be(f"{file.path}: {key}", file.metadata.get(key), allowed))


def _refuse_unread(file: GGUFFile) -> None:
    """A key of the architecture's that is not read could change the result, unless it says that something is off."""
    for key, value in file.metadata.items():
        if key.startswith("llama.") and key.removeprefix("llama.") not in _READ and value not in _OFF:
            _refuse(file, key, "absent, since it is not supported")


def _embedding(file: GGUFFile) -> GGUFTensor:
    tensor = file.tensors.get("token_embd.weight")
    if tensor is None or len(tensor.shape) != 2:
        raise ModelFormatError(f"{file.path}: the matrix 'token_embd.weight' is missing")
    return tensor


def _ends_of_text(file: GGUFFile) -> dict[str, Any]:
    """BOS, and every id that ends an answer: of the text, of a turn, of a message to a tool."""
    fields = Fields(file.metadata, str(file.path))
    names = [f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "eom")]
    given = [fields.integer(name, low=0) if fields.get(name) is not None else None for name in names]
    ends = list(dict.fromkeys(end for end in given[1:] if end is not None))
    return {"bos_token_id": given[0], "eos_token_id": ends if len(ends) != 1 else ends[0]}


def _rope_scaling(file: GGUFFile, fields: Fields, head_dim: int, theta: float) -> dict[str, Any] | None:
    kind = fields.get("rope.scaling.type")
    if kind not in (None, "none", "linear", "yarn"):
        fields.refuse("rope.scaling.type", "one of none, linear, yarn")
    if _FREQ_FACTORS in file.tensors:
        if kind in ("linear", "yarn"):
            fields.refuse("rope.scaling.type", f"none beside {_FREQ_FACTORS}")
        return _llama3_scaling(file, head_dim, theta)
    old = fields.get("rope.scale_linear")  # how files of 2023 say it
    if kind is None and old is not None and old != 1:
        return {"rope_type": "linear", "factor": fields.number("rope.scale_linear")}
    if kind in (None, "none"):
        return None
    scaling = {"rope_type": kind, "factor": fields.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = fields.integer("rope.scaling.original_context_length")
    return scaling


def _llama3_scaling(file: GGUFFile, head_dim: int, theta: float) -> dict[str, Any]:
    """The rope that one divisor for each channel comes from; raises `ModelFormatError` where it is not Llama 3's."""
    if file.tensors[_FREQ_FACTORS].shape != (head_dim // 2,):
        raise ModelFormatError(f"{file.path}: {_FREQ_FACTORS} must have head_dim / 2 = {head_dim // 2} values")
    given = file.read(_FREQ_FACTORS)
    largest = float(given.max())
    if math.isfinite(largest) and largest >= 1:
        expected = _llama3_divisors(head_dim, theta, largest)
        if torch.allclose(given, expected, rtol=1e-4, atol=0):
            return {"rope_type": "llama3", "factor": largest, **_LLAMA3}
    allowed = ", ".join(f"{name} {value:g}" for name, value in _LLAMA3.items())
    raise ModelFormatError(f"{file.path}: {_FREQ_FACTORS} must be what Llama 3 makes of any factor with {allowed}")


def _llama3_divisors(head_dim: int, theta: float, factor: float) -> Tensor:
    """By what Llama 3.1 divides each channel's frequency: 1 where waves are short, `factor` where they are long."""
    low, high, original = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"], 8192
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    turns = original * theta**-exponents / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).float()


def _tensors(file: GGUFFile, dtype: torch.dtype, heads: dict[str, int]) -> Iterator[tuple[str, PendingTensor]]:
    for name, tensor in file.tensors.items():
        if name == _FREQ_FACTORS:
            continue
        new = _name_of(file, name)
        num_heads = heads.get(new.split(".")[-2])
        if num_heads is not None and tensor.shape[0] % (2 * num_heads):
            raise ModelFormatError(f"{file.path}: tensor {name!r} of shape {tensor.shape} is not {num_heads} heads")
        yield new, PendingTensor(file.path, tensor.shape, dtype, partial(_read, file, name, dtype, num_heads))


def _name_of(file: GGUFFile, name: str) -> str:
    """transformers' name of a tensor; raises `ModelFormatError` for one that no Llama has."""
    module, _, kind = name.rpartition(".")
    if module in _NAMES and kind == "weight":
        return f"{_NAMES[module]}.weight"
    found = _LAYER.fullmatch(name)
    if found is None or found[2] not in _LAYER_NAMES:
        raise ModelFormatError(f"{file.path}: tensor {name!r} is not supported: no plain Llama has it")
    return f"model.layers.{found[1]}.{_LAYER_NAMES[found[2]]}.{found[3]}"


def _read(file: GGUFFile, name: str, dtype: torch.dtype, num_heads: int | None) -> Tensor:
    tensor = file.read(name).to(dtype)
    return tensor if num_heads is None else to_half_split(tensor, num_heads)
