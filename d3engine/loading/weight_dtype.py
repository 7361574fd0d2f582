"""In which dtype float matrices are held: that of activations, or on a CPU a narrower one under float32 activations.

The one idea: a checkpoint's bfloat16 values are float32 values with half of the bytes, so matrices can stay as they are
in the file, and every product is still float32's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from d3engine.environment import KERNELS
from d3engine.errors import InvalidValueError, require
from d3engine.kernels.kv_pool import FP8_CAPABILITY
from d3engine.loading.device import DTYPES, capability
from d3engine.loading.settings import EngineSettings, ExecutorKind
from d3engine.model.checkpoint import FLOAT_DTYPES, TensorEntry
from d3engine.model.config import FP8_GROUPS, ModelConfig
from d3engine.model.expected_tensors import float_matrices
from d3engine.model.gguf_file import TENSOR_TYPES as GGUF_TYPES
from d3engine.model.mapped_file import dtype_of
from d3engine.model.source import open_checkpoint

READ_AS_THEY_LIE: dict[ExecutorKind, frozenset[torch.dtype]] = {"native": frozenset({torch.bfloat16})}
"""Dtypes in which "auto" leaves a checkpoint's matrices under float32 activations on a CPU, by what decodes.

The one place that decides it: decoding has to read them straight from memory. The operations in plain torch do not:
they widen a matrix for each product, which at batch 1 takes longer than reading float32 would.
"""


def resolve_weight_dtype(
    weight_dtype: str | torch.dtype, *, dtype: torch.dtype, device: torch.device, kept: torch.dtype | None
) -> torch.dtype:
    """The dtype of float matrices and the embedding under activations of `dtype`.

    "auto" is `kept` where operations widen that to `dtype`, and `dtype` otherwise. Raises `InvalidValueError` for a
    dtype that cannot be multiplied with `dtype` here.
    """
    allowed = (dtype, *_narrower(dtype, device))
    if weight_dtype == "auto":
        return kept if kept in allowed and kept is not None else dtype
    resolved = DTYPES.get(weight_dtype) if isinstance(weight_dtype, str) else weight_dtype
    if resolved is None or resolved not in allowed:
        names = ["auto", *(name for name, known in DTYPES.items() if known in allowed)]
        where = f"{device.type} with dtype={str(dtype).removeprefix('torch.')}"
        raise InvalidValueError("weight_dtype", weight_dtype, f"one of {', '.join(names)} on {where}")
    return resolved


def check_packing(settings: EngineSettings) -> None:
    """Refuse to pack matrices that nobody reads as packed, or that are not bfloat16."""
    require(settings.executor == "native", "pack_weights", True, "False where the native library does not decode")
    held = str(settings.weight_dtype).removeprefix("torch.")
    allowed = f'False where matrices are {held} (weight_dtype="bfloat16" would make them bfloat16)'
    require(settings.weight_dtype == torch.bfloat16, "pack_weights", True, allowed)


def held_config(config: ModelConfig, device: torch.device) -> ModelConfig:
    """`config`, its matrices of 8-bit floats called floats on a GPU that converts none: 8.9 is the first that does."""
    if config.quantization not in ("fp8", FP8_GROUPS) or device.type != "cuda" or capability(device) >= FP8_CAPABILITY:
        return config
    return replace(config, quantization=None)


def kept_by_default(
    dtype: str | torch.dtype, directory: Path, config: ModelConfig, executor: ExecutorKind
) -> torch.dtype | None:
    """The dtype that the matrices of a directory stay in where the user names no `dtype`; None for that of activations.

    Who names one, as in vLLM, means the weights too.
    """
    readable = READ_AS_THEY_LIE.get(executor)
    if dtype != "auto" or not readable:
        return None
    found = dtype_in_files(directory, config)
    return found if found in readable else None


def dtype_in_files(directory: Path, config: ModelConfig) -> torch.dtype | None:
    """The dtype that loses nothing worth having of a model's float matrices, from headers alone; None where their
    files have several, or there is none.

    What config.json calls the model's dtype is not asked: a matrix of more bits would lose them. A GGUF file with
    matrices in blocks is bfloat16: its values were rounded to at most 8 bits, far coarser than bfloat16 rounds them.
    Raises `ModelFormatError` as `open_checkpoint`.
    """
    with open_checkpoint(directory) as checkpoint:
        entries = [checkpoint.entries.get(name) for name in float_matrices(config)]
    types = {_held_in_file(entry) for entry in entries if entry is not None}
    if any(name in GGUF_TYPES and name not in FLOAT_DTYPES for name in types):
        return torch.bfloat16
    found = {dtype_of(name) for name in types}
    return found.pop() if len(found) == 1 else None


def _held_in_file(entry: TensorEntry) -> str:
    """In what type a file holds a tensor: of a GGUF file ggml's own, and else the dtype that is read."""
    return entry.type_name if entry.type_name in GGUF_TYPES else entry.dtype


def _narrower(dtype: torch.dtype, device: torch.device) -> tuple[torch.dtype, ...]:
    """The dtypes of weights that operations widen to `dtype`."""
    widens = device.type == "cpu" and dtype == torch.float32 and KERNELS.read() != "triton"
    return (torch.bfloat16, torch.float16) if widens else ()
