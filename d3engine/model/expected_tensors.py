"""What tensors a model's files must hold: names, shapes, dtypes and values, checked before and while loading.

The one idea: the config says everything. `expected_tensors` spells it out, and whatever is missing, unexpected or
different is an error that names tensor and file, before anything is allocated for it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from d3engine.errors import ModelFormatError
from d3engine.kernels.quantized import GROUP
from d3engine.model.checkpoint import FLOAT_DTYPES, FP8, Checkpoint, TensorEntry
from d3engine.model.config import FP8_GROUPS, ModelConfig
from d3engine.model.families import TensorNames
from d3engine.model.mapped_file import dtype_of
from d3engine.model.model_files import CONFIG_FILE

EMBEDDING = TensorNames().embedding
FINAL_NORM = TensorNames().final_norm
LM_HEAD = "lm_head.weight"
"""A Llama's own names, which converters write; other families may call the first two something else."""

HEAD_NORMS = ("q_norm.weight", "k_norm.weight")
"""The norms of a query's head and of a key's, under "self_attn.", where a family has them."""

VALUES, SCALES = ".qweight", ".scales"
"""What stands in the place of ".weight" in the names of a quantized matrix's two tensors."""

_Part = TypeVar("_Part")

_VALUE_DTYPES = {"int8": "I8", "fp8": FP8, FP8_GROUPS: FP8, "int4": "U8"}
"""Of the values of a quantized matrix, by its scheme, in safetensors' names."""

# Buffers that old versions of transformers saved beside the weights; rope.py makes its own.
_IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape in the file of every tensor a model of this config must have.

    Names are those that transformers gives them in the model's family. Of a quantized model, `X.qweight` and `X.scales`
    stand for each matrix `X.weight` that is quantized.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in _float_tensors(config).items():
        scheme = scheme_of(name, config)
        found |= {name: shape} if scheme is None else quantized_tensors(name, shape, scheme)
    return found


def float_matrices(config: ModelConfig) -> list[str]:
    """Names of the expected tensors that are matrices of floats: what is multiplied, and the embedding."""
    return [
        name
        for name, shape in expected_tensors(config).items()
        if len(shape) == 2 and not name.endswith((VALUES, SCALES))
    ]


def scheme_of(name: str, config: ModelConfig) -> str | None:
    """How a tensor is quantized, by the name that it has as a float: the layers' matrices, and the LM head.

    Of an embedding that is no head only one row is read for a token, so it stays float.
    """
    if is_layer_matrix(name):
        return config.quantization
    head = config.tensor_names.embedding if config.tie_word_embeddings else LM_HEAD
    return config.head_quantization if name == head else None


def is_layer_matrix(name: str) -> bool:
    """Whether a tensor, by the name that it has as a float, is one of the layers' matrices."""
    return name.endswith("_proj.weight")


def has_groups(scheme: str | None) -> bool:
    """Whether 128 input channels of an output channel share a scale."""
    return scheme in ("int4", FP8_GROUPS)


def value_dtype(scheme: str) -> torch.dtype:
    """The dtype of the values of a matrix that is quantized so."""
    return dtype_of(_VALUE_DTYPES[scheme])


def quantized_tensors(name: str, shape: tuple[int, ...], scheme: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the values and the scales that stand for a matrix `name` of `shape` (N, K)."""
    module = name.removesuffix(".weight")
    rows, columns = shape
    if not has_groups(scheme):
        return {module + VALUES: (rows, columns), module + SCALES: (rows,)}
    groups = -(-columns // GROUP)
    stored = groups * GROUP // 2 if scheme == "int4" else columns
    return {module + VALUES: (rows, stored), module + SCALES: (rows, groups)}


def allowed_dtypes(name: str, config: ModelConfig) -> tuple[str, ...]:
    """The dtypes, in safetensors' names, that an expected tensor of a model may have in its file."""
    if name.endswith(VALUES):
        scheme = scheme_of(name.removesuffix(VALUES) + ".weight", config)
        assert scheme is not None, "names of values come from a scheme"
        return (_VALUE_DTYPES[scheme],)
    return ("F32",) if name.endswith(SCALES) else FLOAT_DTYPES


def held_dtype(entry: TensorEntry, dtype: torch.dtype) -> torch.dtype:
    """What a loaded tensor has as its dtype: `dtype`, but quantized values and scales stay what they are."""
    if entry.dtype in _VALUE_DTYPES.values():
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
        *((f"mlp.{name}", (sum(rows), hidden), biases.mlp) for name, rows in gate_up.items()),
        ("mlp.down_proj", (hidden, intermediate), biases.mlp),
    ]
    shapes: dict[str, tuple[int, ...]] = {names.embedding: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = names.layer(layer)
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        if config.has_head_norms:
            shapes |= {f"{prefix}self_attn.{name}": (config.head_dim,) for name in HEAD_NORMS}
        for name, shape, has_bias in products:
            shapes[f"{prefix}{name}.weight"] = shape
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = shape[:1]
    shapes[names.final_norm] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    return shapes


def rows_of(modules: Sequence[str], parts: Sequence[_Part]) -> dict[str, list[_Part]]:
    """Which parts of a stacked matrix, from top to bottom, each module of a checkpoint holds: one, or all of them."""
    if len(modules) == 1:
        return {modules[0]: list(parts)}
    return {module: [part] for module, part in zip(modules, parts, strict=True)}


def is_ignored_tensor(name: str) -> bool:
    """True for what a checkpoint may carry although it is no weight: precomputed rope frequencies."""
    return _IGNORED.search(name) is not None


def check_tensors(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Raise `ModelFormatError` unless the checkpoint holds exactly the tensors that `config` asks for, of the right
    shapes and dtypes.

    A tied model may carry an lm_head.weight equal to its embedding. If the two differ the model is refused:
    transformers 4 drops that lm_head and transformers 5 unties it, so no answer would be right for everyone.
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
        if name not in expected and not is_ignored_tensor(name) and not is_copy:
            raise ModelFormatError(f"{entry.file}: tensor {name!r} is unexpected for this {CONFIG_FILE}")
    if has_float_copy and LM_HEAD in entries:
        _check_stray_lm_head(checkpoint, config.tensor_names.embedding)


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
