"""Quantizes a model directory: its matrices become int8, fp8 or int4, or 4 bits in groups with zero points."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from d3engine.depth.policy import POLICY_FILE
from d3engine.errors import InvalidValueError, require
from d3engine.model.checkpoint import (
    Checkpoint,
    TensorEntry,
    dtype_of,
    is_layer_matrix,
    quantized_tensors,
    value_dtype,
)
from d3engine.model.checkpoint_formats import floats_of_rows
from d3engine.model.config import ModelConfig
from d3engine.model.expected_tensors import LM_HEAD, check_tensors, check_values, expected_tensors, scheme_of
from d3engine.model.quantization_config import DEFAULT_HEAD_SCHEME, QUANTIZATION_METHOD, QUANTIZATION_SCHEMES
from d3engine.model.source import CONFIG_FILE, files_of, open_checkpoint
from d3engine.model.weights import check_head_scheme, quantize_matrix
from d3engine.weights_tools.fitting_text import fitting_tokens
from d3engine.weights_tools.group_quantizer import (
    GROUP_SIZES,
    Groups,
    LayerQuantizer,
    round_rows,
)
from d3engine.weights_tools.mixture import check_bits, matrices_of_8_bits
from d3engine.weights_tools.writing import (
    DEFAULT_SHARD_BYTES,
    PendingTensor,
    copy_companions,
    output_directory,
    write_json,
    write_shards,
    write_weights,
)

DEFAULT_GROUP_SIZE = 32
GROUPED_HEADS = ("int8", "float")
"""What an LM head and an embedding may be beside matrices in groups."""


def quantize_model(
    source: Path,
    destination: Path,
    scheme: str,
    *,
    lm_head: str = DEFAULT_HEAD_SCHEME,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
    show_progress: bool = True,
) -> None:
    """Write the model directory or GGUF file `source`, its matrices quantized by `scheme`, to `destination`.

    The LM head, and an embedding tied to it, become `lm_head`, one of LM_HEAD_SCHEMES. Norms, biases and an untied
    embedding keep the dtype of the file, or become float16 where it has them quantized. Configs, tokenizer and chat
    template are copied, and config.json gets a `quantization_config`. A d3.json is left out, as it was calibrated on
    the float weights. Raises `ModelFormatError` for what the loader would refuse, `InvalidValueError` for an unknown
    scheme, one that the head cannot have, a source that is quantized already and a destination in use.
    """
    if scheme not in QUANTIZATION_SCHEMES:
        raise InvalidValueError("scheme", scheme, f"one of {', '.join(QUANTIZATION_SCHEMES)}")
    config = _config_of_floats(source)
    check_head_scheme(lm_head, config.tie_word_embeddings)
    _check_destination(source, destination)
    with open_checkpoint(source) as given, output_directory(destination, overwrite=overwrite) as folder:
        checkpoint = floats_of_rows(given)
        check_tensors(checkpoint, config)
        copy_companions(source, folder, leave=[POLICY_FILE])
        quantization = {"quant_method": QUANTIZATION_METHOD, "scheme": scheme, "lm_head": lm_head}
        contents = files_of(source).read_json_object(CONFIG_FILE) | {"quantization_config": quantization}
        write_json(folder / CONFIG_FILE, contents)
        quantized = ModelConfig.from_directory(folder)
        write_weights(
            folder,
            quantized,
            _pending_tensors(checkpoint, config, quantized),
            shard_bytes=shard_bytes,
            show_progress=show_progress,
            description="quantizing",
        )


def _config_of_floats(source: Path) -> ModelConfig:
    """The config of a model as `floats_of_rows` reads it: with published 8-bit floats dequantized."""
    config = ModelConfig.from_directory(source)
    if files_of(source).scheme_of_others() is not None:
        return config.quantized(None)
    allowed = f"a model with float weights (this one is {config.quantization})"
    require(config.quantization is None, "MODEL", str(source), allowed)
    return config


def _pending_tensors(checkpoint: Checkpoint, config: ModelConfig, quantized: ModelConfig) -> dict[str, PendingTensor]:
    pending = {}
    for name in expected_tensors(config):
        entry = checkpoint.entries[name]
        scheme = scheme_of(name, quantized)
        if scheme is None:
            dtype = _float_dtype(entry)
            pending[name] = PendingTensor(entry.file, entry.shape, dtype, partial(_read, checkpoint, entry, dtype))
            continue
        pending |= _pending_scheme(checkpoint, entry, scheme)
    return pending


def _pending_scheme(checkpoint: Checkpoint, entry: TensorEntry, scheme: str) -> dict[str, PendingTensor]:
    """A matrix that is quantized when its values are read, which are written before its scales."""
    made: list[Tensor] = []

    def values() -> Tensor:
        codes, scales = quantize_matrix(_read(checkpoint, entry, torch.float32), scheme).tensors
        made.append(scales)
        checkpoint.give_back(entry.name)
        return codes

    dtypes, reads = (value_dtype(scheme), torch.float32), (values, made.pop)
    tensors = zip(quantized_tensors(entry.name, entry.shape, scheme).items(), dtypes, reads, strict=True)
    return {name: PendingTensor(entry.file, shape, dtype, read) for (name, shape), dtype, read in tensors}


def quantize_to_groups(
    source: Path,
    destination: Path,
    group_size: int = DEFAULT_GROUP_SIZE,
    *,
    lm_head: str = DEFAULT_HEAD_SCHEME,
    text: str | None = None,
    bits: float | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
    show_progress: bool = True,
) -> None:
    """Write the model directory or GGUF file `source`, its layers' matrices in 4 bits, to `destination`.

    `group_size` input channels, one of `GROUP_SIZES`, share a scale and a zero point, which are fitted to the
    activations of `text`; None: the documentation that comes with Python, and conversations that the model samples, for
    which all of it is in memory. Then one layer is, in float32. With `bits`, a mean for each weight of the layers,
    those matrices get 8 bits whose rounding costs the outputs most; to find them all matrices in 4 bits are in memory.
    The LM head and the embedding become `lm_head`, one of `GROUPED_HEADS`: 8 bits with a scale for each row, or floats,
    in float16 those that the source has quantized. The directory is one of compressed-tensors (W4A16). Raises as
    `quantize_model`, and `InvalidValueError` for `bits` that 4 and 8 bits do not allow.
    """
    require(group_size in GROUP_SIZES, "group_size", group_size, f"one of {', '.join(map(str, GROUP_SIZES))}")
    require(lm_head in GROUPED_HEADS, "lm_head", lm_head, f"one of {', '.join(GROUPED_HEADS)} with groups")
    config = _config_of_floats(source)
    for columns in (config.hidden_size, config.q_size, config.intermediate_size):
        allowed = f"a divisor of {columns}, the columns of a matrix (--rtn takes any)"
        require(columns % group_size == 0, "group_size", group_size, allowed)
    if bits is not None:
        check_bits(bits, config, group_size)
    _check_destination(source, destination)
    prompts = fitting_tokens(source, text, show_progress=show_progress)
    with open_checkpoint(source) as given, output_directory(destination, overwrite=overwrite) as folder:
        checkpoint = floats_of_rows(given)
        check_tensors(checkpoint, config)
        copy_companions(source, folder, leave=[POLICY_FILE])
        of_8_bits: frozenset[str] = frozenset()
        if bits is not None:
            of_8_bits = matrices_of_8_bits(checkpoint, config, prompts, group_size, bits, show_progress=show_progress)
        quantization = _of_groups(group_size, lm_head, config.tie_word_embeddings, of_8_bits)
        contents = files_of(source).read_json_object(CONFIG_FILE) | {"quantization_config": quantization}
        write_json(folder / CONFIG_FILE, contents)
        quantizer = LayerQuantizer(checkpoint, config, prompts, group_size, of_8_bits)
        write_shards(
            folder,
            _pending_groups(checkpoint, config, quantizer, lm_head, of_8_bits),
            shard_bytes=shard_bytes,
            show_progress=show_progress,
            description="quantizing",
        )


def _check_destination(source: Path, destination: Path) -> None:
    if destination.exists() and destination.samefile(source):
        raise InvalidValueError("DST", str(destination), "another directory than MODEL")


def _of_groups(group_size: int, lm_head: str, is_tied: bool, of_8_bits: Collection[str]) -> dict[str, Any]:
    def group(targets: list[str], **weights: Any) -> dict[str, Any]:
        common = {"type": "int", "dynamic": False, "actorder": None}
        return {"targets": targets, "weights": weights | common, "input_activations": None, "output_activations": None}

    groups = {"group_0": group(["Linear"], num_bits=4, symmetric=False, strategy="group", group_size=group_size)}
    targets = [name.removesuffix(".weight") for name in sorted(of_8_bits)]
    if lm_head != "float":
        targets += ["Embedding"] if is_tied else ["Embedding", "lm_head"]
    if targets:
        groups["group_1"] = group(targets, num_bits=8, symmetric=True, strategy="channel", group_size=None)
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ["lm_head"] if is_tied or lm_head == "float" else [],
    }


def _pending_groups(
    checkpoint: Checkpoint, config: ModelConfig, quantizer: LayerQuantizer, lm_head: str, of_8_bits: Collection[str]
) -> dict[str, PendingTensor]:
    """The tensors to write: the embedding, the head and what stays float, then the matrices layer by layer."""
    # What takes long comes last, so that a progress bar knows its pace.
    pending: dict[str, PendingTensor] = {}
    for name in expected_tensors(config):
        entry = checkpoint.entries[name]
        if name in (config.tensor_names.embedding, LM_HEAD) and lm_head != "float":
            pending |= _pending_matrix(entry, None, partial(_rows_of, checkpoint, entry))
        elif not is_layer_matrix(name):
            dtype = _float_dtype(entry)
            pending[name] = PendingTensor(entry.file, entry.shape, dtype, partial(_read, checkpoint, entry, dtype))
    for index in range(config.num_layers):
        prefix, layer = config.tensor_names.layer(index), cache(partial(quantizer.layer, index))
        for name in filter(is_layer_matrix, expected_tensors(config)):
            if name.startswith(prefix):
                group_size = None if name in of_8_bits else quantizer.group_size
                pending |= _pending_matrix(checkpoint.entries[name], group_size, partial(_take, layer, name))
    return pending


def _rows_of(checkpoint: Checkpoint, entry: TensorEntry) -> Groups:
    return round_rows(_read(checkpoint, entry, torch.float32))


def _take(layer: Callable[[], dict[str, Groups]], name: str) -> Groups:
    """A matrix of a layer, which is quantized when the first is asked for; each is asked for once."""
    return layer().pop(name)


def _pending_matrix(
    entry: TensorEntry, group_size: int | None, quantized: Callable[[], Groups]
) -> dict[str, PendingTensor]:
    """The tensors of a matrix in 4-bit groups; None: in 8 bits with a scale for each row.

    It is `quantized` when its codes are read, which come first.
    """
    rows, columns = entry.shape
    made: list[Groups] = []

    def codes() -> Tensor:
        made.append(quantized())
        return made[0].codes.view(torch.int32) if group_size is None else _words(made[0].codes)

    parts: dict[str, tuple[tuple[int, ...], torch.dtype, Callable[[], Tensor]]] = {
        "weight_packed": ((rows, columns // (4 if group_size is None else 8)), torch.int32, codes)
    }
    groups = 1 if group_size is None else columns // group_size
    if group_size is not None:
        shape = -(-rows // 8), groups
        parts["weight_zero_point"] = (shape, torch.int32, lambda: _words(made[0].zero_points.t()).t())
    parts["weight_scale"] = ((rows, groups), torch.float16, lambda: made.pop().scales)
    parts["weight_shape"] = ((2,), torch.int64, lambda: torch.tensor(entry.shape))
    module = entry.name.removesuffix("weight")
    return {module + suffix: PendingTensor(entry.file, *part) for suffix, part in parts.items()}


def _float_dtype(entry: TensorEntry) -> torch.dtype:
    """Of a tensor that stays float: the file's, and float16 where the file has it quantized."""
    floats = entry.packed is None or entry.packed.name in ("F16", "BF16")
    return dtype_of(entry.type_name) if floats else torch.float16


def _words(numbers: Tensor) -> Tensor:
    """Numbers [A, B] below 16 as int32 [A, B / 8, rounded up], the first in the lowest bits."""
    nibbles = F.pad(numbers, (0, -numbers.shape[1] % 8)).contiguous()
    pairs = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    return pairs.flatten().view(torch.int32).view(len(numbers), -1)  # one row may have any stride


def _read(checkpoint: Checkpoint, entry: TensorEntry, dtype: torch.dtype) -> Tensor:
    tensor = checkpoint.read(entry.name)
    converted = tensor.to(dtype)
    check_values(entry, tensor, converted)
    return converted
