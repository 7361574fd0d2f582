"""The tensors that a model's files must hold, their checks, and the fingerprint of them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import TypeVar

import torch
from torch import Tensor

from d3engine.errors import ModelFormatError
from d3engine.model.checkpoint import (
    FLOAT_DTYPES,
    SCALES,
    VALUES,
    Checkpoint,
    TensorEntry,
    dtype_of,
    is_layer_matrix,
    quantized_tensors,
)
from d3engine.model.config import ModelConfig
from d3engine.model.family import NO_CAPS, Multipliers, TensorNames
from d3engine.model.quantization_config import SCHEMES
from d3engine.model.source import CONFIG_FILE, ModelSource, files_of

EMBEDDING = TensorNames().embedding
FINAL_NORM = TensorNames().final_norm
LM_HEAD = "lm_head.weight"
"""A Llama's names, which converters write; other families may have others for the first two."""

HEAD_NORMS = ("q_norm.weight", "k_norm.weight")
"""The norms of queries and of keys, of each head or of all, under "self_attn.", where a family has them."""

_Part = TypeVar("_Part")

# Rope frequencies that old versions of transformers saved; `Rope` computes its own.
_IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape, as in the file, of every tensor that a model of this config must have.

    Names are transformers' for the model's family. In a quantized model `X.qweight` and `X.scales` replace each
    quantized matrix `X.weight`.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in _float_tensors(config).items():
        scheme = scheme_of(name, config)
        found |= {name: shape} if scheme is None else quantized_tensors(name, shape, scheme)
    return found


def float_matrices(config: ModelConfig) -> list[str]:
    """Names of the expected float matrices, the embedding included."""
    return [
        name
        for name, shape in expected_tensors(config).items()
        if len(shape) == 2 and not name.endswith((VALUES, SCALES))
    ]


def scheme_of(name: str, config: ModelConfig) -> str | None:
    """The scheme of a tensor, by its name as a float; None for floats. Layer matrices and the LM head have one.

    An embedding that is no head stays float: a token reads only one row of it.
    """
    if is_layer_matrix(name):
        return config.quantization
    head = config.tensor_names.embedding if config.tie_word_embeddings else LM_HEAD
    return config.head_quantization if name == head else None


def allowed_dtypes(name: str, config: ModelConfig) -> tuple[str, ...]:
    """The dtypes, in safetensors' names, that an expected tensor of a model may have in its file."""
    if name.endswith(VALUES):
        scheme = scheme_of(name.removesuffix(VALUES) + ".weight", config)
        assert scheme is not None, "names of values come from a scheme"
        return (SCHEMES[scheme].dtype,)
    return ("F32",) if name.endswith(SCALES) else FLOAT_DTYPES


def held_dtype(entry: TensorEntry, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a loaded tensor: `dtype`, but quantized values and scales keep theirs."""
    if entry.dtype in [scheme.dtype for scheme in SCHEMES.values()]:
        return dtype_of(entry.dtype)
    return torch.float32 if entry.name.endswith(SCALES) else dtype


def _float_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    names, biases = config.tensor_names, config.biases
    qkv = rows_of(names.qkv, [config.q_size, config.kv_size, config.kv_size])
    gate_up = rows_of(names.gate_up, [intermediate, intermediate])
    products = [
        *((f"self_attn.{name}", (sum(rows), hidden), biases.qkv) for name, rows in qkv.items()),
        ("self_attn.o_proj", (hidden, config.q_size), biases.output),
        *((name, (sum(rows), hidden), biases.mlp) for name, rows in gate_up.items()),
        (names.down, (hidden, intermediate), biases.mlp),
    ]
    shapes: dict[str, tuple[int, ...]] = {names.embedding: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = names.layer(layer)
        shapes |= {f"{prefix}{name}.weight": (hidden,) for name in names.norms.all}
        shapes |= {f"{prefix}self_attn.{name}": (size,) for name, size in norm_sizes(config).items()}
        for name, shape, has_bias in products:
            shapes[f"{prefix}{name}.weight"] = shape
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = shape[:1]
    shapes[names.final_norm] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    return shapes


def norm_sizes(config: ModelConfig) -> dict[str, int]:
    """The sizes of `HEAD_NORMS`; none without such norms."""
    if config.has_projection_norms:
        return dict(zip(HEAD_NORMS, (config.q_size, config.kv_size), strict=True))
    return dict.fromkeys(HEAD_NORMS, config.head_dim) if config.has_head_norms else {}


def rows_of(modules: Sequence[str], parts: Sequence[_Part]) -> dict[str, list[_Part]]:
    """The parts of a stacked matrix, from top to bottom, that each module of a checkpoint holds: one, or all."""
    if len(modules) == 1:
        return {modules[0]: list(parts)}
    return {module: [part] for module, part in zip(modules, parts, strict=True)}


def is_ignored_tensor(name: str) -> bool:
    """True for precomputed rope frequencies, which a checkpoint may carry although they are no weights."""
    return _IGNORED.search(name) is not None


def check_tensors(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Raise `ModelFormatError` unless a checkpoint has exactly the tensors of `config`, with their shapes and dtypes.

    A tied model may have an lm_head.weight equal to its embedding. If the two differ the model is refused:
    transformers 4 drops that lm_head and transformers 5 unties it, so either choice would be wrong for some users.
    """
    entries = checkpoint.entries
    expected = expected_tensors(config)
    for name, shape in expected.items():
        if name not in entries:
            hint = ", and tie_word_embeddings is false" if name == LM_HEAD else ""
            raise ModelFormatError(f"tensor {name!r} is missing in {_files_of(checkpoint)}{hint}")
        entry, allowed = entries[name], allowed_dtypes(name, config)
        if entry.dtype not in allowed:
            raise ModelFormatError(
                f"{entry.file}: tensor {name!r} has dtype {entry.dtype}: allowed are {', '.join(allowed)}"
            )
        if entry.shape != shape:
            raise ModelFormatError(
                f"{entry.file}: tensor {name!r} has shape {list(entry.shape)}; {CONFIG_FILE} asks for {list(shape)}"
            )
    has_float_copy = config.tie_word_embeddings and config.head_quantization is None
    for name, entry in entries.items():
        is_copy = name == LM_HEAD and has_float_copy
        if name not in expected and not is_ignored_tensor(name) and not is_copy and not _is_no_bias(checkpoint, name):
            raise ModelFormatError(f"{entry.file}: tensor {name!r} is unexpected for this {CONFIG_FILE}")
    if has_float_copy and LM_HEAD in entries:
        _check_stray_lm_head(checkpoint, config.tensor_names.embedding)


def _is_no_bias(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a tensor is a bias of zeros, which GPTQ's tools add to matrices that have none."""
    matrix = checkpoint.entries.get(name.removesuffix("bias") + "weight")
    if not name.endswith(".bias") or matrix is None or matrix.packed is None:
        return False
    return not checkpoint.read(name).any()


def check_values(entry: TensorEntry, source: Tensor, converted: Tensor) -> None:
    """Raise `ModelFormatError` if a tensor, as read or as converted, holds NaN or infinity, or int8 values -128."""
    if source.dtype == torch.int8 and int(source.amin()) == -128:
        raise ModelFormatError(f"{entry.file}: tensor {entry.name!r} holds -128: allowed are -127 to 127")
    if not source.is_floating_point() or _is_finite(converted):
        return
    if _is_finite(source):
        raise ModelFormatError(f"{entry.file}: tensor {entry.name!r} has values too large for {converted.dtype}")
    raise ModelFormatError(f"{entry.file}: tensor {entry.name!r} holds NaN or infinity")


def _is_finite(tensor: Tensor) -> bool:
    if tensor.dtype == torch.float8_e4m3fn:  # has no infinity, and one NaN of each sign
        return not bool(tensor.view(torch.uint8).bitwise_and(127).eq_(127).any())
    # The extremes carry any NaN or infinity along, and need no second tensor as isfinite of the whole would.
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _check_stray_lm_head(checkpoint: Checkpoint, embedding: str) -> None:
    is_equal = torch.equal(checkpoint.read(LM_HEAD), checkpoint.read(embedding))
    for name in (LM_HEAD, embedding):
        checkpoint.give_back(name)
    if not is_equal:
        raise ModelFormatError(
            f"{checkpoint.entries[LM_HEAD].file}: tensor {LM_HEAD!r} differs from {embedding!r}, but "
            f"{CONFIG_FILE} sets tie_word_embeddings; set that to false to use it, or delete the tensor"
        )


def _files_of(checkpoint: Checkpoint) -> str:
    return ", ".join(str(file) for file in sorted({entry.file for entry in checkpoint.entries.values()}))


# Training changes nearly every value of every tensor, so a few rows tell two trainings apart. A file in which a few
# single values were edited by hand may keep its fingerprint.
ROWS = 4
"""Rows of each tensor in the fingerprint: the first, the last and those evenly between them."""

_COMPUTES = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings")
"""Fields of the config, besides rope's, that change what the same tensors compute; other sizes are their shapes."""


def fingerprint(model: ModelSource) -> str:
    """The fingerprint of a model's weights, by which `d3.json` and bridges name the weights that they are for.

    "sha256:" and the hex SHA-256 of the config's computing fields and of every tensor's name, dtype, shape and `ROWS`
    rows, in the order of the names. Shards do not matter. Reads a few kilobytes a tensor: about 20 MB of a model of
    seven billion parameters. Raises `ModelFormatError` for a directory without valid config and weights.
    """
    files = files_of(model)
    config = ModelConfig.from_directory(files)
    rope = {name: value for name, value in asdict(config.rope).items() if value is not None}
    computes: list[object] = [{name: getattr(config, name) for name in _COMPUTES}, rope]
    # Added only where they are set, so that a plain Llama keeps the fingerprint of older versions.
    if config.multipliers != Multipliers():
        computes.append(asdict(config.multipliers))
    if config.layers_without_rope:
        computes.append({"layers_without_rope": config.layers_without_rope})
    if any(config.windows):
        computes.append({"windows": config.windows})
    if config.has_interleaved_rope:
        computes.append("interleaved rope")
    if config.local_rope is not None:
        computes.append({"local_rope": asdict(config.local_rope)})
    if config.soft_caps != NO_CAPS:
        computes.append(asdict(config.soft_caps))
    if (config.activation, config.norm_offset, config.embedding_scale) != ("silu", 0.0, 1.0):
        computes.append([config.activation, config.norm_offset, config.embedding_scale])
    digest = hashlib.sha256()
    digest.update(_json(computes))
    with files.open_checkpoint() as checkpoint:
        for name in sorted(checkpoint.entries):
            if is_ignored_tensor(name):
                continue
            entry = checkpoint.entries[name]
            digest.update(_json([name, entry.dtype, entry.shape]))
            rows = entry.shape[0] if entry.shape else 0
            for row in sorted({place * (rows - 1) // (ROWS - 1) for place in range(ROWS)} if rows else ()):
                digest.update(checkpoint.read_row(name, row))
    return f"sha256:{digest.hexdigest()}"


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
