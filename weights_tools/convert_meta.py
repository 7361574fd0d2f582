"""Converts Meta's own checkpoints (consolidated.*.pth, params.json) into safetensors directories.

The one idea: every tensor has a transformers name and one dimension along which model parallelism cut it, so
a small table joins any number of shards. Query and key rows come as adjacent pairs and leave in half-split
order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from d3engine.errors import NOTHING, InvalidValueError, ModelFormatError, require_integer
from d3engine.files import is_there
from d3engine.model.expected_tensors import EMBEDDING, FINAL_NORM, LM_HEAD
from d3engine.model.fields import read_json_object
from d3engine.model.head_order import to_half_split
from d3engine.weights_tools.convert import load_pickled
from d3engine.weights_tools.writing import (
    DEFAULT_SHARD_BYTES,
    PendingTensor,
    add_tokenizer,
    hf_config,
    output_directory,
    write_configs,
    write_weights,
)

_META_PARAMS = frozenset(
    {
        "dim",
        "n_layers",
        "n_heads",
        "n_kv_heads",
        "vocab_size",
        "multiple_of",
        "ffn_dim_multiplier",
        "norm_eps",
        "rope_theta",
        "use_scaled_rope",
        "max_batch_size",
        "max_seq_len",
    }
)

# Meta's name of a layer's tensor: transformers' name, and the dimension along which model parallelism cut it.
_META_LAYER: dict[str, tuple[str, int | None]] = {
    "attention_norm": ("input_layernorm", None),
    "attention.wq": ("self_attn.q_proj", 0),
    "attention.wk": ("self_attn.k_proj", 0),
    "attention.wv": ("self_attn.v_proj", 0),
    "attention.wo": ("self_attn.o_proj", 1),
    "ffn_norm": ("post_attention_layernorm", None),
    "feed_forward.w1": ("mlp.gate_proj", 0),
    "feed_forward.w2": ("mlp.down_proj", 1),
    "feed_forward.w3": ("mlp.up_proj", 0),
}
_META_EMBEDDING = "tok_embeddings.weight"
_META_OUTPUT = "output.weight"
_META_IGNORED = frozenset({"rope.freqs"})


def convert_meta(
    source: Path,
    destination: Path,
    *,
    max_position_embeddings: int | None = None,
    rope_factor: float | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
    show_progress: bool = True,
) -> list[str]:
    """Convert a directory of Meta's (consolidated.*.pth, params.json, tokenizer.model) to a model directory.

    params.json does not say how long a context the model was trained for, nor by how much a "scaled" rope is
    stretched; where they cannot be told from the rest, the two arguments must be given. Returns notes for the
    user, such as a tokenizer that was left out. Raises `ModelFormatError` and `InvalidValueError`.
    """
    model = _read_meta(source)
    tensors = _meta_tensors(model)
    raw = _meta_config(model, tensors, max_position_embeddings, rope_factor)
    notes: list[str] = []
    with output_directory(destination, overwrite=overwrite) as folder:
        config = write_configs(folder, raw)
        if is_there(source / "tokenizer.model"):
            try:
                add_tokenizer(source / "tokenizer.model", folder, config.vocab_size)
            except InvalidValueError as error:
                notes.append(f"left out: {error}; put the model's tokenizer.json into {destination}")
        else:
            notes.append(f"{source} has no tokenizer.model; put a tokenizer into {destination}")
        write_weights(folder, config, tensors, shard_bytes=shard_bytes, show_progress=show_progress)
    return notes


@dataclass(frozen=True)
class _MetaModel:
    """params.json and the model-parallel shards, memory-mapped, in order."""

    params_file: Path
    params: dict[str, Any]
    files: list[Path]
    shards: list[dict[str, Tensor]]

    def number(self, name: str, default: float | None = None) -> float:
        value = self.params.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ModelFormatError(f"{self.params_file}: {name} must be a number above 0; got {value!r}")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if not isinstance(value, int):
            raise ModelFormatError(f"{self.params_file}: {name} must be an integer above 0; got {value!r}")
        return value

    def parts(self, name: str) -> list[Tensor]:
        for file, shard in zip(self.files, self.shards, strict=True):
            if name not in shard:
                raise ModelFormatError(f"{file}: tensor {name!r} is missing")
        return [shard[name] for shard in self.shards]


def _read_meta(source: Path) -> _MetaModel:
    params_file = source / "params.json"
    params = read_json_object(params_file)
    for name in params:
        if name not in _META_PARAMS:
            allowed = ", ".join(sorted(_META_PARAMS))
            raise ModelFormatError(f"{params_file}: {name!r} is not supported; the known fields are {allowed}")
    files = sorted(source.glob("consolidated.*.pth"))
    if not files:
        raise ModelFormatError(f"{source} has no consolidated.*.pth")
    return _MetaModel(params_file, params, files, [load_pickled(file) for file in files])


def _meta_tensors(model: _MetaModel) -> dict[str, PendingTensor]:
    """Name every tensor as transformers does and describe how its parts are joined."""
    num_heads = model.integer("n_heads")
    num_kv_heads = model.integer("n_kv_heads", num_heads)
    heads = {"attention.wq": num_heads, "attention.wk": num_kv_heads}
    if num_kv_heads % len(model.files):
        raise ModelFormatError(
            f"{model.params_file}: n_kv_heads must be a multiple of the {len(model.files)} shards; got {num_kv_heads}"
        )
    tensors: dict[str, PendingTensor] = {}
    for name in sorted({name for shard in model.shards for name in shard} - _META_IGNORED):
        target, dimension, key = _meta_name(model, name)
        tensors[target] = _join(model, name, dimension, heads.get(key))
    return tensors


def _meta_name(model: _MetaModel, name: str) -> tuple[str, int | None, str]:
    """Return transformers' name, the dimension the shards were cut along (None: not cut), and the key."""
    if name == "norm.weight":
        return FINAL_NORM, None, name
    if name == _META_OUTPUT:
        return LM_HEAD, 0, name
    if name == _META_EMBEDDING:
        # Llama 1 and 2 cut the columns, Llama 3 the rows: only the shape tells.
        return EMBEDDING, 0 if model.parts(name)[0].shape[-1] == model.integer("dim") else 1, name
    prefix, _, rest = name.partition(".")
    layer, _, key = rest.removesuffix(".weight").partition(".")
    if prefix != "layers" or not layer.isdecimal() or key not in _META_LAYER or not name.endswith(".weight"):
        raise ModelFormatError(f"{model.files[0]}: tensor {name!r} is unexpected in a Llama checkpoint")
    target, dimension = _META_LAYER[key]
    return f"model.layers.{layer}.{target}.weight", dimension, key


def _join(model: _MetaModel, name: str, dimension: int | None, num_heads: int | None) -> PendingTensor:
    parts = model.parts(name)
    shape = list(parts[0].shape)
    if any(list(part.shape) != shape or part.dtype != parts[0].dtype for part in parts):
        raise ModelFormatError(f"{model.files[0].parent}: tensor {name!r} differs in shape or dtype between shards")
    if dimension is not None:
        if dimension >= len(shape):
            raise ModelFormatError(f"{model.files[0]}: tensor {name!r} has shape {shape}: a matrix is expected")
        shape[dimension] *= len(parts)
    if num_heads is not None and shape[0] % (2 * num_heads):
        raise ModelFormatError(f"{model.files[0]}: tensor {name!r} has {shape[0]} rows for {num_heads} heads")

    def read() -> Tensor:
        whole = parts[0] if dimension is None else torch.cat(parts, dimension)
        return whole if num_heads is None else to_half_split(whole, num_heads)

    return PendingTensor(model.files[0], tuple(shape), parts[0].dtype, read)


def _meta_config(
    model: _MetaModel,
    tensors: Mapping[str, PendingTensor],
    max_position_embeddings: int | None,
    rope_factor: float | None,
) -> dict[str, Any]:
    gate = "model.layers.0.mlp.gate_proj.weight"
    for name in (EMBEDDING, gate):
        if name not in tensors:
            raise ModelFormatError(f"{model.files[0]}: no tensor for {name!r}")
    vocab_size = tensors[EMBEDDING].shape[0]
    num_heads = model.integer("n_heads")
    is_llama3 = vocab_size == 128256
    return hf_config(
        vocab_size=vocab_size,
        hidden_size=model.integer("dim"),
        intermediate_size=tensors[gate].shape[0],
        num_layers=model.integer("n_layers"),
        num_heads=num_heads,
        num_kv_heads=model.integer("n_kv_heads", num_heads),
        rms_norm_eps=model.number("norm_eps"),
        max_position_embeddings=_meta_max_positions(model, max_position_embeddings),
        tied=_meta_is_tied(tensors),
        dtype=str(tensors[EMBEDDING].dtype).removeprefix("torch."),
        rope_theta=float(model.number("rope_theta", 10_000.0)),
        rope_scaling=_meta_rope_scaling(model, rope_factor),
        bos_token_id=128000 if is_llama3 else 1,
        # End of text, of message and of turn; a base model never emits the last two.
        eos_token_id=[128001, 128008, 128009] if is_llama3 else 2,
    )


def _meta_is_tied(tensors: Mapping[str, PendingTensor]) -> bool:
    return LM_HEAD not in tensors or torch.equal(tensors[LM_HEAD].read(), tensors[EMBEDDING].read())


def _meta_max_positions(model: _MetaModel, given: int | None) -> int:
    if given is not None:
        return require_integer("max_position_embeddings", given, 1)
    if model.params.get("use_scaled_rope"):
        return 131_072
    if model.params.get("rope_theta") == 500_000.0:
        return 8192
    raise InvalidValueError(
        "max_position_embeddings",
        NOTHING,
        "given, since params.json does not say (2048 for Llama 1, 4096 for Llama 2)",
    )


def _meta_rope_scaling(model: _MetaModel, factor: float | None) -> dict[str, Any] | None:
    """Llama 3.1's constants, which Meta keeps in code and not in params.json; only the factor varies."""
    if not model.params.get("use_scaled_rope"):
        if factor is not None:
            raise InvalidValueError("rope_factor", factor, "absent, since params.json does not set use_scaled_rope")
        return None
    if factor is None:
        raise InvalidValueError(
            "rope_factor", NOTHING, "given, since params.json does not say (8 for Llama 3.1, 32 for Llama 3.2)"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
