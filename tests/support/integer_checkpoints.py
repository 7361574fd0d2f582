"""Checkpoints of whole numbers in groups, written as AutoAWQ, GPTQ and llm-compressor do, and what they stand for."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output channels of eight neighbours, from the lowest bits of a word on."""


@dataclass(frozen=True)
class Published:
    """How a tool writes matrices: `group` input channels share a scale, 0: all of a row."""

    quantization: dict[str, Any]
    group: int
    bits: int = 4
    is_symmetric: bool = False
    scale_dtype: torch.dtype = torch.float16
    act_order: bool = False
    is_uneven: bool = False  # one column more in the first group than in the last
    in_bytes: bool = False
    has_zero_biases: bool = False
    ends: Published | None = None  # of the embedding and the LM head; None: floats

    @property
    def method(self) -> str:
        return str(self.quantization["quant_method"])


def _awq(group: int, **more: Any) -> Published:
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Published(config | {"modules_to_not_convert": None}, group, **more)


def _gptq(group: int, bits: int = 4, version: str = "gptq", **more: Any) -> Published:
    config: dict[str, Any] = {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "sym": False}
    config |= {"desc_act": bool(more.get("act_order")), "checkpoint_format": version, "damp_percent": 0.01}
    return Published(config, group, bits, **more)


def _compressed(group: int, bits: int = 4, form: str = "pack-quantized", **more: Any) -> Published:
    weights = {"num_bits": bits, "type": "int", "symmetric": more.get("is_symmetric", False), "dynamic": False}
    weights |= {"strategy": "group" if group else "channel", "group_size": group or None, "actorder": None}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}
    return Published(config, group, bits, in_bytes=form == "int-quantized", **more)


def _mixed(layers: Published, ends: Published) -> Published:
    group = ends.quantization["config_groups"]["group_0"] | {"targets": ["Embedding", "lm_head"]}
    groups = layers.quantization["config_groups"] | {"group_1": group}
    return replace(layers, quantization=layers.quantization | {"config_groups": groups, "ignore": []}, ends=ends)


PUBLISHED: dict[str, Published] = {
    "AWQ, 128": _awq(128),
    "AWQ, 32": _awq(32, scale_dtype=torch.bfloat16),
    "GPTQ, 128": _gptq(128),
    "GPTQ, 64, without an offset": _gptq(64, version="gptq_v2", has_zero_biases=True),
    "GPTQ, a row": _gptq(0),
    "GPTQ in 8 bits": _gptq(128, bits=8),
    "GPTQ in the order of activations": _gptq(32, act_order=True),
    "GPTQ in groups of unequal sizes": _gptq(32, act_order=True, is_uneven=True),
    "W4A16, symmetric": _compressed(128, is_symmetric=True, scale_dtype=torch.bfloat16),
    "W4A16": _compressed(32),
    "W8A16, packed": _compressed(64, bits=8),
    "W8A16, a row": _compressed(0, bits=8, form="int-quantized", is_symmetric=True, scale_dtype=torch.bfloat16),
    "W4A16 with ends in 8 bits": _mixed(_compressed(32), _compressed(0, bits=8, is_symmetric=True)),
    "W8A16 with ends in 4 bits": _mixed(_compressed(32, bits=8), _compressed(64, is_symmetric=True)),
    "float32 scales": _compressed(64, scale_dtype=torch.float32),
}


def publish(source: Path, directory: Path, published: Published) -> dict[str, Tensor]:
    """Write the model of `source` so; returns its tensors with the floats that the quantized ones stand for."""
    tensors = load_file(source / "model.safetensors")
    written, meant = {}, dict(tensors)
    for name, tensor in tensors.items():
        form = published if "proj" in name else published.ends
        if tensor.dim() != 2 or form is None:
            written[name] = tensor
            continue
        made, meant[name] = quantized(tensor, form)
        module = name.removesuffix(".weight")
        written |= {module + suffix: stored.contiguous() for suffix, stored in made.items()}
        if published.has_zero_biases:
            written[f"{module}.bias"] = torch.zeros(tensor.shape[0], dtype=torch.float16)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(written, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": published.quantization}))
    return meant


def quantized(matrix: Tensor, published: Published) -> tuple[dict[str, Tensor], Tensor]:
    """The stored tensors of a matrix by suffix, and the floats that it stands for, worked out column by column."""
    rows, columns = matrix.shape
    size, most = published.group or columns, 2**published.bits - 1
    groups = columns // size
    of_column = torch.arange(columns) // size
    if published.act_order:
        of_column = of_column[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
    if published.is_uneven:
        of_column[(of_column == groups - 1).nonzero()[0]] = 0
    scales, zeros = torch.empty(rows, groups, dtype=published.scale_dtype), torch.empty(rows, groups, dtype=torch.int64)
    codes = torch.empty(rows, columns, dtype=torch.int64)
    for group in range(groups):
        part = matrix[:, of_column == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if published.is_symmetric:
            low, high = -part.abs().amax(1), part.abs().amax(1)
        scales[:, group] = ((high - low) / most).clamp(min=1e-4)
        scale = scales[:, group].float()
        zeros[:, group] = (most + 1) // 2 if published.is_symmetric else (-low / scale).round().clamp(1, most).long()
    for column in range(columns):
        group = of_column[column]
        steps = (matrix[:, column] / scales[:, group].float()).round().long() + zeros[:, group]
        codes[:, column] = steps.clamp(0, most)
    meant = (codes - zeros[:, of_column]).float() * scales[:, of_column].float()
    return _stored(codes, zeros, scales, of_column, published), meant


def _stored(codes: Tensor, zeros: Tensor, scales: Tensor, indices: Tensor, published: Published) -> dict[str, Tensor]:
    bits = published.bits
    if published.method == "awq":
        order = [8 * (n // 8) + AWQ_ORDER[n % 8] for n in range(codes.shape[0])]
        packed = {".qweight": _words(codes[order].t(), bits), ".qzeros": _words(zeros[order].t(), bits)}
        return packed | {".scales": scales.t()}
    if published.method == "gptq":
        offset = int(published.quantization["checkpoint_format"] == "gptq")
        packed = {".qweight": _words(codes, bits).t(), ".qzeros": _words(zeros.t() - offset, bits)}
        return packed | {".scales": scales.t(), ".g_idx": indices.int()}
    middle = 2 ** (bits - 1)
    if published.in_bytes:
        return {".weight": (codes - middle).to(torch.int8), ".weight_scale": scales}
    shape = torch.tensor(codes.shape)
    made = {".weight_packed": _words(codes, bits), ".weight_scale": scales, ".weight_shape": shape}
    return made if published.is_symmetric else made | {".weight_zero_point": _words(zeros.t(), bits).t()}


def _words(numbers: Tensor, bits: int) -> Tensor:
    """Numbers [A, B] as int32 [A, B x bits / 32], the first in the lowest bits."""
    each = 32 // bits
    words = torch.zeros(numbers.shape[0], numbers.shape[1] // each, dtype=torch.int64)
    for nth in range(each):
        words |= numbers[:, nth::each] << bits * nth
    return torch.where(words >= 2**31, words - 2**32, words).int()
