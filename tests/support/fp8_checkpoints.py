"""Checkpoints in 8-bit floats, written as those who publish them do, and the floats that they stand for."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FP8_MAX = 448.0


@dataclass(frozen=True)
class Published:
    """How one publisher writes: `shares` says what shares a scale, `block` in rows and columns."""

    quantization: dict[str, Any]
    shares: str = "row"
    block: tuple[int, int] = (16, 16)
    scale_name: str = "weight_scale"
    scale_dtype: torch.dtype = torch.float32
    scalar_shape: tuple[int, ...] = (1,)
    others: tuple[str, ...] = ()
    ignored: tuple[str, ...] = field(default=("lm_head", "embed_tokens"))

    def takes(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor is quantized: matrices but those left out."""
        return tensor.dim() == 2 and not any(word in name for word in self.ignored)


def _groups(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False, **more}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    return {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}


def _compressed(strategy: str, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": _groups(strategy, **more),
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
    }


PUBLISHED: dict[str, Published] = {
    "a scale a row": Published(_compressed("channel"), scale_dtype=torch.bfloat16),
    "a scale a matrix": Published(_compressed("tensor"), "matrix", others=("input_scale",), scale_dtype=torch.bfloat16),
    "a scale a block": Published(_compressed("block", block_structure=[16, 16]), "block"),
    "AutoFP8": Published(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        "matrix",
        scalar_shape=(),
        others=("input_scale",),
    ),
    "Qwen": Published(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [16, 16]},
        "block",
        scale_name="weight_scale_inv",
        scale_dtype=torch.bfloat16,
    ),
    "blocks that the last ones do not fill": Published(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 36]},
        "block",
        (32, 36),
        scale_name="weight_scale_inv",
    ),
    "blocks of 128 columns": Published(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [24, 128]},
        "block",
        (24, 128),
        scale_name="weight_scale_inv",
        scale_dtype=torch.bfloat16,
    ),
    "blocks wider than a matrix": Published(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 128]},
        "block",
        (32, 128),
        scale_name="weight_scale_inv",
    ),
    "equal blocks of 128 columns": Published(_compressed("block"), "block", (16, 128)),
    "Meta": Published({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, others=("input_scale_ub",)),
    "NVIDIA, the head too": Published(
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        "matrix",
        scalar_shape=(),
        others=("input_scale", "k_scale", "v_scale"),
        ignored=("embed_tokens",),
    ),
}


def publish(source: Path, directory: Path, published: Published) -> dict[str, Tensor]:
    """Write the model of `source` so; returns its tensors with the floats that the quantized ones stand for."""
    tensors = load_file(source / "model.safetensors")
    written, meant = {}, dict(tensors)
    for name, tensor in tensors.items():
        if not published.takes(name, tensor):
            written[name] = tensor
            continue
        values, scales, meant[name] = quantized(tensor, published)
        module = name.removesuffix("weight")
        written |= {name: values, module + published.scale_name: scales}
        written |= {module + other: torch.tensor([0.25]) for other in published.others}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(written, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": published.quantization}))
    return meant


def quantized(matrix: Tensor, published: Published) -> tuple[Tensor, Tensor, Tensor]:
    """The values and scales of a matrix, and what they stand for, worked out block by block."""
    rows, columns = matrix.shape
    high, wide = {"row": (1, columns), "matrix": (rows, columns), "block": published.block}[published.shares]
    values = torch.empty_like(matrix, dtype=torch.float8_e4m3fn)
    meant = torch.empty_like(matrix)
    scales = torch.empty(-(-rows // high), -(-columns // wide), dtype=published.scale_dtype)
    for down, row in enumerate(range(0, rows, high)):
        for across, column in enumerate(range(0, columns, wide)):
            place = slice(row, row + high), slice(column, column + wide)
            scales[down, across] = matrix[place].abs().max() / FP8_MAX
            scale = scales[down, across].float()
            values[place] = (matrix[place] / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
            meant[place] = values[place].float() * scale
    if published.shares == "matrix":
        scales = scales.reshape(published.scalar_shape)
    return values, scales, meant
