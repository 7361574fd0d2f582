"""bfloat16 matrices for rows rounded to bfloat16: some processors multiply and add pairs of such numbers at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from d3engine.kernels.matrices import Weight
from d3engine.kernels.weight_format import WeightFormat


@dataclass(frozen=True, eq=False)
class PairsWeight(WeightFormat):
    """The bfloat16 matrix `values` [N, K], K even: its products are of rows rounded to bfloat16, with float32 sums."""

    values: Tensor
    native_kind = 10
    native_isas = frozenset({"avx512-vnni"})
    float_dtype = torch.bfloat16

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values,)

    def rounded(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).to(x.dtype)

    def rows(self, start: int, stop: int) -> PairsWeight:
        """Output channels [start, stop) alone, without a copy."""
        return PairsWeight(self.values[start:stop])

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return self.values.to(dtype)


def in_pairs(matrix: Weight) -> Weight:
    """`matrix` for rows rounded to bfloat16, not copied; as it is where it is no bfloat16, or its columns are odd."""
    if not isinstance(matrix, Tensor) or matrix.dtype != torch.bfloat16 or matrix.shape[1] % 2:
        return matrix
    return PairsWeight(matrix)
