"""bfloat16 matrices in 12 bits a weight, without loss: for decoding bound by memory.

The exponents of a matrix are nearly all among fifteen neighbours, so four bits say which. Sign and
mantissa stay as they are. The few weights of other exponents lie beside the matrix, in whose places are zeros.

A row is groups of 64 columns, the last one filled up with zeros: 64 bytes of signs and mantissas, then 32 of codes.
Byte 16 l + 8 a + 2 j + b (l, j < 4; a, b < 2) is about column 32 a + 16 b + 4 l + j, so that bytes that are zipped
become lanes of neighbouring columns. Byte i of the codes has the code of byte i in its low half and that of byte 32 + i
in its high one. Code 0 is the exponent 0 of zeros, code c the exponent `exponent` + c.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from d3engine.kernels.weight_format import WeightFormat

PACKED_GROUP = 64
"""Columns of a group."""

PACKED_BYTES = 96
"""Bytes of a group."""


@dataclass(frozen=True, eq=False)
class PackedWeight(WeightFormat):
    """A bfloat16 matrix [N, K] as `packed` uint8 [N, 96 * groups of 64 columns], see above, and the weights beside it.

    These are `weights` bfloat16 [M] in `columns` int32 [M], row by row and in the order of columns; `starts` int64
    [N + 1] says where those of each row begin.
    """

    packed: Tensor
    exponent: int
    starts: Tensor
    columns: Tensor
    weights: Tensor
    num_columns: int  # K
    native_kind = 6
    native_isas = frozenset({"amx"})
    float_dtype = torch.bfloat16

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.packed.shape[0], self.num_columns))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.packed, self.starts, self.columns, self.weights

    def rows(self, start: int, stop: int) -> PackedWeight:
        """Output channels [start, stop) alone; the packed weights are not copied."""
        stop = min(stop, self.packed.shape[0])
        first, last = int(self.starts[start]), int(self.starts[stop])
        return PackedWeight(
            self.packed[start:stop],
            self.exponent,
            self.starts[start : stop + 1] - first,
            self.columns[first:last],
            self.weights[first:last],
            self.num_columns,
        )

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The matrix [N, K] in `dtype`: in bfloat16 or float32 what was packed, to the bit."""
        from d3engine.kernels.native.bf12 import unpacked  # which knows this class

        return unpacked(self).to(dtype)
