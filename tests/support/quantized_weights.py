"""What the tests of quantized weights share: schemes, matrices and the layouts of the models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typer.testing import CliRunner, Result

from d3engine.cli.weights import app
from d3engine.kernels.kv_pool import FP8
from d3engine.kernels.matrices import Weight
from d3engine.kernels.quantized import GROUP, Fp8Weight, quantize_fp8
from d3engine.model.config import ModelConfig
from d3engine.model.weights import LlamaWeights, load_weights

SCHEMES = ("int8", "int4", "fp8")
SHAPES = [(5, 123), (3, 128), (7, 352), (2, 1), (1, 129)]
LAYOUTS: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "biases": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    "tied": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "more than one group": {"hidden_size": 144, "intermediate_size": 200},
}
QUERY = "model.layers.1.self_attn.q_proj"
TEXT = "\n".join(f"Tom has {n} pens. Ann finds {n % 9}. How many pens do they have now?" for n in range(60))
"""What four bits in groups are fitted to."""
OPTIONS: dict[str, Any] = {"device": "cpu", "kv_cache_memory_bytes": 2**22}


def random_matrix(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(rows * columns)
    return (torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator)).to(dtype)


def fp8_of_groups(matrix: Tensor) -> Fp8Weight:
    """A matrix whose groups of 128 columns have scales of their own."""
    parts = [quantize_fp8(part.contiguous()) for part in matrix.split(GROUP, dim=1)]
    values = torch.cat([part.values.view(torch.uint8) for part in parts], dim=1).view(FP8)
    return Fp8Weight(values, torch.stack([part.scales for part in parts], dim=1))


def load(directory: Path) -> LlamaWeights:
    config = ModelConfig.from_directory(directory)
    return load_weights(directory, config, dtype=torch.float32, device="cpu", show_progress=False)


def dense(matrix: Weight) -> Tensor:
    """A matrix in float32, of quantized ones what they stand for."""
    return matrix if isinstance(matrix, Tensor) else matrix.dequantize(torch.float32)


def all_tensors(weights: LlamaWeights) -> list[Tensor]:
    ends = [weights.final_norm]
    for matrix in (weights.embedding, weights.lm_head):
        ends += [matrix] if isinstance(matrix, Tensor) else matrix.tensors
    return ends + [tensor for layer in weights.layers for tensor in layer.tensors()]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


QuantizedDirectory = Callable[[str, str], tuple[Path, Path]]
