"""Quantizes a model directory: its matrices become int8, fp8 or int4."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from d3engine.depth.policy import POLICY_FILE
from d3engine.errors import InvalidValueError
from d3engine.model.checkpoint import Checkpoint, TensorEntry, dtype_of, quantized_tensors, value_dtype
from d3engine.model.checkpoint_formats import floats_of_rows
from d3engine.model.config import ModelConfig
from d3engine.model.expected_tensors import check_tensors, check_values, expected_tensors, scheme_of
from d3engine.model.quantization_config import DEFAULT_HEAD_SCHEME, QUANTIZATION_METHOD, QUANTIZATION_SCHEMES
from d3engine.model.source import CONFIG_FILE, files_of, open_checkpoint
from d3engine.model.weights import check_head_scheme, quantize_matrix
from d3engine.weights_tools.writing import (
    DEFAULT_SHARD_BYTES,
    PendingTensor,
    copy_companions,
    output_directory,
    write_json,
    write_weights,
)


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
    embedding keep the dtype of the file. Configs, tokenizer and chat template are copied, and config.json gets a
    `quantization_config`. A d3.json is left out, as it was calibrated on the float weights. Raises `ModelFormatError`
    for what the loader would refuse, `InvalidValueError` for an unknown scheme, one that the head cannot have, a
    source that is quantized already and a destination in use.
    """
    if scheme not in QUANTIZATION_SCHEMES:
        raise InvalidValueError("scheme", scheme, f"one of {', '.join(QUANTIZATION_SCHEMES)}")
    config = ModelConfig.from_directory(source)
    if files_of(source).scheme_of_others() is not None:
        config = config.quantized(None)  # dequantized below
    if config.quantization is not None:
        raise InvalidValueError("MODEL", str(source), f"a model with float weights (this one is {config.quantization})")
    check_head_scheme(lm_head, config.tie_word_embeddings)
    if destination.exists() and destination.samefile(source):
        raise InvalidValueError("DST", str(destination), "another directory than MODEL")
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


def _pending_tensors(checkpoint: Checkpoint, config: ModelConfig, quantized: ModelConfig) -> dict[str, PendingTensor]:
    pending = {}
    for name in expected_tensors(config):
        entry = checkpoint.entries[name]
        scheme = scheme_of(name, quantized)
        if scheme is None:
            dtype = dtype_of(entry.dtype)
            pending[name] = PendingTensor(entry.file, entry.shape, dtype, partial(_read, checkpoint, entry, dtype))
            continue
        matrix = _Matrix(checkpoint, entry, scheme)
        (values, values_shape), (scales, scales_shape) = quantized_tensors(name, entry.shape, scheme).items()
        pending[values] = PendingTensor(entry.file, values_shape, value_dtype(scheme), matrix.values)
        pending[scales] = PendingTensor(entry.file, scales_shape, torch.float32, matrix.scales)
    return pending


class _Matrix:
    """One matrix of the source, quantized when its values are read; its scales are read after them."""

    def __init__(self, checkpoint: Checkpoint, entry: TensorEntry, scheme: str) -> None:
        self._checkpoint, self._entry, self._scheme = checkpoint, entry, scheme
        self._scales: Tensor | None = None

    def values(self) -> Tensor:
        matrix = _read(self._checkpoint, self._entry, torch.float32)
        values, self._scales = quantize_matrix(matrix, self._scheme).tensors
        self._checkpoint.give_back(self._entry.name)
        return values

    def scales(self) -> Tensor:
        scales, self._scales = self._scales, None
        assert scales is not None, "values are written before scales, in the order of expected_tensors"
        return scales


def _read(checkpoint: Checkpoint, entry: TensorEntry, dtype: torch.dtype) -> Tensor:
    tensor = checkpoint.read(entry.name)
    converted = tensor.to(dtype)
    check_values(entry, tensor, converted)
    return converted
