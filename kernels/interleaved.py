"""int8 and int4 matrices with sixteen rows in lanes: for processors that multiply bytes, four of each lane at a time.

An instruction that multiplies bytes of sixteen rows by the same four numbers needs no sum across its
lanes, and finds all that it needs in 64 bytes that lie together. So the bytes of a matrix are there in another order:
memory is read in one stream, and no row is turned into lanes for a product.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from d3engine.kernels.quantized import Int4Weight, Int8Weight, PackedValues, QuantizedWeight

_Given = TypeVar("_Given")

LANES = 16
"""Rows that lie in lanes together."""

_TOGETHER = 4
"""Neighbouring bytes of a row in a lane."""

_STEP = 64
"""Bytes of a row that are always there; those that fill it up are a weight of 0."""


class LanesWeight(PackedValues):
    """A matrix [N, K], N a multiple of 32, as `packed` uint8 [N / 16, M, 16, 4]: byte [n, i, r, j] is byte 4 i + j of
    row 16 n + r, of which each row has 4 M, a multiple of 64.
    """

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.packed.shape[0] * LANES, self.num_columns))

    @abstractmethod
    def rows(self, start: int, stop: int) -> QuantizedWeight:
        """Output channels [start, stop) as rows, copied."""

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return self.rows(0, self.shape[0]).dequantize(dtype)


class Int8LanesWeight(LanesWeight):
    """A byte is a value of the `Int8Weight` plus 128; `scales` are its own, float32 [N]."""

    native_kind = 8
    native_isas = frozenset({"avx512-vnni"})

    def rows(self, start: int, stop: int) -> Int8Weight:
        return self._of(_bytes_of_rows(self.packed, start, stop), self.scales[start:stop])

    def at(self, places: Tensor) -> Int8Weight:
        """The rows at int64 `places` [T], copied."""
        return self._of(self.packed[places // LANES, :, places % LANES].flatten(1), self.scales[places])

    def _of(self, bytes_of_rows: Tensor, scales: Tensor) -> Int8Weight:
        return Int8Weight((bytes_of_rows[:, : self.num_columns] ^ 128).view(torch.int8), scales)


class Int4LanesWeight(LanesWeight):
    """A byte is that of the `Int4Weight`; `scales` float32 [N / 16, groups, 16], at [n, g, r] row 16 n + r's of g."""

    native_kind = 7
    native_isas = frozenset({"avx512-vnni"})

    def rows(self, start: int, stop: int) -> Int4Weight:
        first, last = start // LANES, -(-stop // LANES)
        scales = self.scales[first:last].transpose(1, 2).flatten(0, 1)[start - first * LANES : stop - first * LANES]
        return Int4Weight(_bytes_of_rows(self.packed, start, stop), scales, self.num_columns)


def in_lanes(weight: _Given) -> _Given | LanesWeight:
    """`weight` with its rows in lanes, copied; as it is where it is of another kind, or its rows no multiple of 32.

    Half of them must fill lanes too: the gates of a layer and the values that they let through are a half each.
    """
    if not isinstance(weight, Int8Weight | Int4Weight) or weight.shape[0] % (2 * LANES):
        return weight
    if isinstance(weight, Int4Weight):
        scales = weight.scales.view(-1, LANES, weight.scales.shape[1]).transpose(1, 2).contiguous()
        return Int4LanesWeight(_turned(weight.packed), scales, weight.num_columns)
    num_columns = weight.shape[1]
    biased = F.pad(weight.values.view(torch.uint8) ^ 128, (0, -num_columns % _STEP), value=128)
    return Int8LanesWeight(_turned(biased), weight.scales, num_columns)


def _turned(rows: Tensor) -> Tensor:
    """uint8 rows [N, 4 M] as [N / 16, M, 16, 4]."""
    words = rows.contiguous().view(torch.int32)  # four bytes at once are sooner moved
    turned = words.view(-1, LANES, words.shape[1]).transpose(1, 2).contiguous()
    return turned.view(torch.uint8).view(*turned.shape, _TOGETHER)


def _bytes_of_rows(packed: Tensor, start: int, stop: int) -> Tensor:
    """Rows [start, stop) of what `_turned` made: uint8 [stop - start, 4 M]."""
    first, last = start // LANES, -(-stop // LANES)
    words = packed[first:last].flatten(2).view(torch.int32)
    rows = words.transpose(1, 2).contiguous().flatten(0, 1).view(torch.uint8)
    return rows[start - first * LANES : stop - first * LANES]
