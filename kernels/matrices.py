"""What stands where an operation has a weight matrix [N, K]."""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from d3engine.kernels.blocks import BlockLanesWeight, BlockWeight
from d3engine.kernels.interleaved import Int8LanesWeight
from d3engine.kernels.quantized import Int8Weight
from d3engine.kernels.split_blocks import SplitBlockWeight
from d3engine.kernels.weight_format import WeightFormat

Weight: TypeAlias = Tensor | WeightFormat
"""Floats, or a matrix of one of the formats: `quantized.py`, `interleaved.py`, `blocks.py`, `split_blocks.py` and
`bf12.py` and `bfloat16_pairs.py` have them."""

Table: TypeAlias = Tensor | Int8Weight | Int8LanesWeight | BlockWeight | BlockLanesWeight | SplitBlockWeight
"""A matrix [V, K] of which single rows are read: an embedding."""


def float_dtype(weight: Weight) -> torch.dtype | None:
    """The dtype of the floats that a matrix holds; None where it holds none."""
    return weight.dtype if isinstance(weight, Tensor) else weight.float_dtype


def tensors_of(weight: Weight) -> tuple[Tensor, ...]:
    """What a matrix is made of."""
    return (weight,) if isinstance(weight, Tensor) else weight.tensors


def looked_up(table: Table, places: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [T, K] of a table at int64 `places` [T], in `dtype`: those of other formats are rounded once."""
    if isinstance(table, Tensor):
        return F.embedding(places, table).to(dtype)
    return table.at(places).dequantize(dtype)
