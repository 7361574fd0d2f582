"""Weight-only quantized matrices: what every linear operation takes in place of a float matrix [N, K].

Activations, norms, biases and sums stay as they are; only the matrix is small. All schemes are symmetric, so that a
product needs one multiplication by the scale and no zero point.

- int8: one scale an output channel.
- fp8: 8-bit floats (e4m3: four bits of exponent, three of mantissa), one scale an output channel, or, as some are
  published, one for each group of 128 input channels of it.
- int4: one scale for each group of 128 input channels of an output channel. A byte holds two values of one group, j and
  j + 64, so that a kernel unpacks a tile of bytes into two tiles of neighbouring channels and shuffles nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from d3engine.kernels.kv_pool import FP8, FP8_CAPABILITY, LARGEST
from d3engine.kernels.target import Target
from d3engine.kernels.weight_format import WeightFormat

if TYPE_CHECKING:
    from d3engine.kernels.matrices import Weight

GROUP = 128
"""Input channels that share the scale of a group."""


@dataclass(frozen=True, eq=False)
class ByteWeight(WeightFormat):
    """A matrix [N, K] as `values` [N, K] of a byte each times float32 `scales`, [N] but for some of `Fp8Weight`."""

    values: Tensor
    scales: Tensor
    values_a_byte = 1

    @classmethod
    def of(cls, values: Tensor, scales: Tensor, num_columns: int) -> Self:
        """The matrix of a checkpoint's two tensors."""
        return cls(values, scales)

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.values, self.scales

    def rows(self, start: int, stop: int) -> Self:
        """Output channels [start, stop) alone, without a copy."""
        return replace(self, values=self.values[start:stop], scales=self.scales[start:stop])

    @property
    def has_groups(self) -> bool:
        """Whether a row has several scales, one for each 128 input channels."""
        return self.scales.dim() == 2

    @property
    def row_scales(self) -> Tensor | None:
        return None if self.has_groups else self.scales

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        scales = self.scales[:, None]
        if self.has_groups:
            scales = self.scales.repeat_interleave(GROUP, dim=1)[:, : self.values.shape[1]]
        return self.values.float().mul_(scales).to(dtype)


class Int8Weight(ByteWeight):
    """Its values are int8, in [-127, 127]."""

    native_kind = 2
    native_isas = frozenset({"amx"})

    def at(self, places: Tensor) -> Int8Weight:
        """The rows at int64 `places` [T], copied."""
        return Int8Weight(self.values[places], self.scales[places])


class Fp8Weight(ByteWeight):
    """Its values are float8_e4m3fn, all finite. One scale for a whole matrix is the same number in every row.

    Where blocks of a matrix share scales, as some publish it, these are [N, groups].
    """

    least_capability = FP8_CAPABILITY

    @property
    def native_kind(self) -> int:
        return 4 if self.has_groups else 3


class Fp8RowsWeight(Fp8Weight):
    """The same matrix, which many rows of Triton's operations meet in 8-bit floats too: `takes_fp8_rows`."""


def has_fp8_products(dtype: torch.dtype, target: Target) -> bool:
    """Whether `torch._scaled_mm` has 8-bit floats with a scale a row, and results of `dtype`, on that GPU.

    NVIDIA's libraries have them from compute capability 8.9 on, with results in bfloat16.
    """
    return dtype == torch.bfloat16 and target.is_cuda and target.has(FP8_CAPABILITY)


def takes_fp8_rows(weight: Weight, dtype: torch.dtype, target: Target) -> bool:
    """Whether rows of `dtype`, rounded to 8-bit floats, can be multiplied by this matrix on that GPU.

    It must have one scale an output, and whole sixteens of columns and of outputs.
    """
    is_of_rows = isinstance(weight, Fp8Weight) and not weight.has_groups and not any(size % 16 for size in weight.shape)
    return is_of_rows and has_fp8_products(dtype, target)


def for_fp8_rows(weight: Weight, dtype: torch.dtype, target: Target) -> Weight:
    """`weight` as an `Fp8RowsWeight` where it can be one, in the same memory; any other as it is."""
    if isinstance(weight, Fp8Weight) and takes_fp8_rows(weight, dtype, target):
        return Fp8RowsWeight(*weight.tensors)
    return weight


@dataclass(frozen=True, eq=False)
class PackedValues(WeightFormat):
    """`packed` uint8 and float32 `scales`, which stand for a matrix of `num_columns` columns."""

    packed: Tensor
    scales: Tensor
    num_columns: int  # K

    @classmethod
    def of(cls, values: Tensor, scales: Tensor, num_columns: int) -> Self:
        """The matrix of a checkpoint's two tensors."""
        return cls(values, scales, num_columns)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.packed, self.scales


class Int4Weight(PackedValues):
    """A matrix [N, K] as 4-bit values in groups of 128 input channels.

    `packed` uint8 [N, groups * 64]: byte 64 g + j holds the values of channels 128 g + j (low four bits) and
    128 g + 64 + j (high), each plus 8, so in [0, 15]. `scales` float32 [N, groups], of either sign. The
    channels that fill up the last group stand for 0 (the byte's half is 8).
    """

    values_a_byte = 2
    native_kind = 5
    native_isas = frozenset({"amx", "avx512-vnni"})

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.packed.shape[0], self.num_columns))

    def rows(self, start: int, stop: int) -> Int4Weight:
        """Output channels [start, stop) alone, without a copy."""
        return Int4Weight(self.packed[start:stop], self.scales[start:stop], self.num_columns)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        rows, groups = self.scales.shape
        bytes_of_groups = self.packed.view(rows, groups, GROUP // 2)
        unsigned = torch.empty(rows, groups, 2, GROUP // 2, dtype=torch.uint8, device=self.packed.device)
        torch.bitwise_and(bytes_of_groups, 15, out=unsigned[:, :, 0])
        torch.bitwise_right_shift(bytes_of_groups, 4, out=unsigned[:, :, 1])
        values = unsigned.sub_(8).view(torch.int8)  # 0 - 8 wraps around to what is -8 as a signed byte
        matrix = values.view(rows, groups, GROUP).float().mul_(self.scales[:, :, None])
        return matrix.view(rows, groups * GROUP)[:, : self.num_columns].to(dtype)


QuantizedWeight: TypeAlias = Int8Weight | Fp8Weight | Int4Weight
"""A matrix of one of the schemes."""

INT4_DIVISORS = (7.0, -8.0, 6.0, 6.5, 7.5, 8.0, -6.5, -7.0, -7.5, -8.5, -9.0)
"""Scales that `quantize_int4` tries, each as what the value of largest magnitude is divided by.

7 maps that value to 7, and -8 maps it to -8, the one value without a mirror image: these two restore every group that
is representable. Smaller divisors leave steps unused, larger ones (up to 9) clip the extreme for finer steps.
"""

_VALUES_AT_ONCE = 2**22
"""Matrices are quantized by runs of rows of about this many values, so that temporaries stay small."""


def quantize_int8(matrix: Tensor) -> Int8Weight:
    """Round `matrix` [N, K], of any float dtype, to int8; the scale of a row is its largest magnitude / 127.

    An error is at most half a scale, and a row of whole numbers in [-127, 127] times a scale comes back as it was if
    127 or -127 is among them. A row of zeros has the scale 0. Raises `ValueError` for NaN or infinity, and for what is
    no float matrix.
    """
    _check(matrix)
    values = torch.empty(matrix.shape, dtype=torch.int8, device=matrix.device)
    scales = torch.empty(matrix.shape[0], dtype=torch.float32, device=matrix.device)
    for rows in _row_runs(matrix):
        wide = matrix[rows].float()
        scales[rows] = wide.abs().amax(dim=1) / 127
        values[rows] = _in_steps(wide, scales[rows, None]).clamp_(-127, 127)
    return Int8Weight(values, _finite(scales))


def quantize_fp8(matrix: Tensor) -> Fp8Weight:
    """Round `matrix` [N, K], of any float dtype, to float8_e4m3fn; the scale of a row is its largest magnitude / 448.

    Quotients by the scale are rounded to the nearest value, ties to even. An error is at most 1/16 of the number, or
    2**-10 scales where the number is below 2**-6 scales. A row of zeros has the scale 0. Raises as `quantize_int8`.
    """
    _check(matrix)
    values = torch.empty(matrix.shape, dtype=FP8, device=matrix.device)
    scales = torch.empty(matrix.shape[0], dtype=torch.float32, device=matrix.device)
    for rows in _row_runs(matrix):
        wide = matrix[rows].float()
        scales[rows] = wide.abs().amax(dim=1) / LARGEST
        steps = scales[rows, None]
        # A scale that is denormal has few bits, so that a quotient may be larger than the largest value.
        quotients = torch.where(steps == 0, 0.0, wide / steps).clamp_(-LARGEST, LARGEST)
        values[rows] = quotients.to(FP8)
    return Fp8Weight(values, _finite(scales))


def quantize_int4(matrix: Tensor, divisors: Sequence[float] = INT4_DIVISORS) -> Int4Weight:
    """Round `matrix` [N, K], of any float dtype, to 4 bits in [-8, 7], in groups of 128 input channels.

    Each group takes, of the scales `extreme / divisor`, the one with the least squared error; `extreme` is the group's
    value of largest magnitude, with its sign, so a scale may be negative. Groups of zeros have the scale 0. Raises
    `ValueError` as `quantize_int8` does.
    """
    _check(matrix)
    num_rows, num_columns = matrix.shape
    groups = -(-num_columns // GROUP)
    packed = torch.empty(num_rows, groups * GROUP // 2, dtype=torch.uint8, device=matrix.device)
    scales = torch.empty(num_rows, groups, dtype=torch.float32, device=matrix.device)
    for rows in _row_runs(matrix):
        filled = F.pad(matrix[rows].float(), (0, groups * GROUP - num_columns)).view(-1, groups, GROUP)
        scales[rows] = _best_scales(filled, divisors)
        values = _in_steps(filled, scales[rows, :, None]).clamp_(-8, 7)
        low, high = (values + 8).to(torch.uint8).chunk(2, dim=2)
        packed[rows] = (low | high << 4).flatten(1)
    return Int4Weight(packed, _finite(scales), num_columns)


def _best_scales(groups: Tensor, divisors: Sequence[float]) -> Tensor:
    """For `groups` [N, groups, 128] the scales [N, groups] with the least squared error; of equal ones the first."""
    extremes = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
    best = extremes / divisors[0]
    least = torch.full_like(best, torch.inf)
    for divisor in divisors:
        scales = extremes / divisor
        errors = _in_steps(groups, scales).clamp_(-8, 7).mul_(scales).sub_(groups)
        error = torch.linalg.vector_norm(errors, dim=2, keepdim=True)
        best = torch.where(error < least, scales, best)
        least = torch.minimum(error, least)
    return best.squeeze(2)


def _in_steps(values: Tensor, scales: Tensor) -> Tensor:
    """`values` as the nearest whole numbers of `scales`; 0 where the scale is 0 (or so small that it became 0)."""
    return torch.where(scales == 0, 0.0, values / scales).round_()


def _row_runs(matrix: Tensor) -> Iterator[slice]:
    step = max(1, _VALUES_AT_ONCE // matrix.shape[1])
    return (slice(start, start + step) for start in range(0, matrix.shape[0], step))


def _check(matrix: Tensor) -> None:
    if matrix.dim() != 2 or not matrix.is_floating_point() or not matrix.numel():
        raise ValueError(f"weights must be a float matrix [N, K]; got a {matrix.dtype} of shape {list(matrix.shape)}")


def _finite(scales: Tensor) -> Tensor:
    """NaN and infinity in a matrix end up in its scales, so that one look at these is enough."""
    if not torch.isfinite(scales).all():
        raise ValueError("a matrix to quantize holds NaN or infinity, or a value too large for float32")
    return scales


FORMATS: Mapping[str, type[QuantizedWeight]] = {
    "int8": Int8Weight,
    "fp8": Fp8Weight,
    "fp8_groups": Fp8Weight,
    "int4": Int4Weight,
}
"""Scheme of a checkpoint -> its format."""
QUANTIZERS: Mapping[str, Callable[[Tensor], QuantizedWeight]] = {
    "int8": quantize_int8,
    "int4": quantize_int4,
    "fp8": quantize_fp8,
}
"""Scheme -> what makes such a matrix of floats [N, K]."""
