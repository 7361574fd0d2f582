"""Weight-only quantized matrices: what every linear operation takes in place of a float matrix [N, K].

Activations, norms, biases and sums stay as they are; only the matrix is small. Both schemes are symmetric, so that a
product needs one multiplication by the scale and no zero point.

- int8: one scale an output channel.
- int4: one scale for each group of 128 input channels of an output channel. A byte holds two values of one group, j and
  j + 64, so that a kernel unpacks a tile of bytes into two tiles of neighbouring channels and shuffles nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

GROUP = 128
"""Input channels that share a scale under int4."""


@dataclass(frozen=True, eq=False)
class Int8Weight:
    """A matrix [N, K] as int8 `values` [N, K], in [-127, 127], times float32 `scales` [N]."""

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        """(N, K)."""
        return self.values.shape

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The matrix [N, K] it stands for, rounded once to `dtype`."""
        return (self.values.float() * self.scales[:, None]).to(dtype)


@dataclass(frozen=True, eq=False)
class Int4Weight:
    """A matrix [N, K] as 4-bit values in groups of 128 input channels.

    `packed` uint8 [N, groups * 64]: byte 64 g + j holds the values of channels 128 g + j (low four bits) and
    128 g + 64 + j (high), each plus 8, so in [0, 15]. `scales` float32 [N, groups]. The channels that fill up the last
    group stand for 0 (the byte's half is 8).
    """

    packed: Tensor
    scales: Tensor
    num_columns: int  # K

    @property
    def shape(self) -> torch.Size:
        """(N, K)."""
        return torch.Size((self.packed.shape[0], self.num_columns))

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales.nbytes

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The matrix [N, K] it stands for, rounded once to `dtype`."""
        rows, groups = self.scales.shape
        halves = self.packed.view(rows, groups, 1, GROUP // 2)
        values = torch.cat((halves & 15, halves >> 4), dim=2).float().view(rows, groups, GROUP) - 8
        matrix = (values * self.scales[:, :, None]).view(rows, groups * GROUP)
        return matrix[:, : self.num_columns].to(dtype)


Weight: TypeAlias = Tensor | Int8Weight | Int4Weight
"""What stands where an operation has a weight matrix."""
