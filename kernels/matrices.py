"""What stands where an operation has a weight matrix [N, K]."""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from d3engine.kernels.bf12 import PackedWeight
from d3engine.kernels.blocks import BlockLanesWeight, BlockWeight, StackedWeight
from d3engine.kernels.interleaved import Int8LanesWeight, LanesWeight
from d3engine.kernels.quantized import Int8Weight, QuantizedWeight

Weight: TypeAlias = (
    Tensor | QuantizedWeight | PackedWeight | LanesWeight | BlockWeight | BlockLanesWeight | StackedWeight
)
"""Floats, or a matrix of one of the schemes, in the order of its rows or in another one."""

Table: TypeAlias = Tensor | Int8Weight | Int8LanesWeight | BlockWeight | BlockLanesWeight
"""A matrix [V, K] of which single rows are read: an embedding."""


def looked_up(table: Table, places: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [T, K] of a table at int64 `places` [T], in `dtype`: those of other formats are rounded once."""
    if isinstance(table, Tensor):
        return F.embedding(places, table).to(dtype)
    return table.at(places).dequantize(dtype)
