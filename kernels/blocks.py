"""Matrices in blocks: those of ggml, as a GGUF file has them, and groups of whole numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from d3engine.kernels.integer_groups import scales_of_integer_groups, unpack_integer_groups
from d3engine.kernels.interleaved import LANES
from d3engine.kernels.weight_format import WeightFormat

if TYPE_CHECKING:
    from d3engine.kernels.split_blocks import SplitBlockWeight

_Given = TypeVar("_Given")


@dataclass(frozen=True)
class BlockFormat:
    """A block of `columns` columns in `nbytes` bytes; ggml's have float16 numbers at `halves`.

    Others are groups of whole numbers of `bits` bits (`integer_groups.py`).
    """

    columns: int
    nbytes: int
    halves: tuple[int, ...] = ()
    bits: int | None = None


BLOCK_FORMATS = {
    "Q4_0": BlockFormat(32, 18, (0,)),
    "Q4_1": BlockFormat(32, 20, (0, 2)),
    "Q5_0": BlockFormat(32, 22, (0,)),
    "Q5_1": BlockFormat(32, 24, (0, 2)),
    "Q8_0": BlockFormat(32, 34, (0,)),
    "Q2_K": BlockFormat(256, 84, (80, 82)),
    "Q3_K": BlockFormat(256, 110, (108,)),
    "Q4_K": BlockFormat(256, 144, (0, 2)),
    "Q5_K": BlockFormat(256, 176, (0, 2)),
    "Q6_K": BlockFormat(256, 210, (208,)),
    "IQ4_NL": BlockFormat(32, 18, (0,)),
    "IQ4_XS": BlockFormat(256, 136, (0,)),
    "U4_32": BlockFormat(32, 20, bits=4),
    "U4_128": BlockFormat(128, 68, bits=4),
    "U8_32": BlockFormat(32, 36, bits=8),
    "U8_128": BlockFormat(128, 132, bits=8),
}
"""By ggml's names of the types, then by our own; in the order of the native library's kinds (`types.h`)."""

BLOCK_TYPES = tuple(BLOCK_FORMATS)
_FIRST_KIND = 11
INTEGER_TYPES = frozenset(name for name, block in BLOCK_FORMATS.items() if block.bits is not None)
"""Those of published checkpoints in safetensors files."""


@dataclass(frozen=True, eq=False)
class BlockWeight(WeightFormat):
    """A matrix [N, K] of the type `type_name` of `BLOCK_FORMATS`.

    `blocks` uint8 [N, bytes of a row's blocks]; `num_columns` is K. With `order` a block holds other input channels
    than those of its place: columns of GPTQ that share a scale.
    """

    type_name: str
    blocks: Tensor
    num_columns: int
    order: Tensor | None = None

    @property
    def native_kind(self) -> int:
        return _FIRST_KIND + BLOCK_TYPES.index(self.type_name)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.blocks.shape[0], self.num_columns))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.blocks,)

    def rows(self, start: int, stop: int) -> BlockWeight:
        """Output channels [start, stop) alone, without a copy."""
        return replace(self, blocks=self.blocks[start:stop])

    def at(self, places: Tensor) -> BlockWeight:
        """The rows at int64 `places` [T], copied."""
        return replace(self, blocks=self.blocks[places])

    def above(self, others: Sequence[Any]) -> BlockWeight:
        """This matrix on top of others of its type, copied."""
        return replace(self, blocks=torch.cat([self.blocks, *(o.blocks for o in others)]))

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        from d3engine.kernels.native.library import LibraryMissing, read_block_rows  # which knows this class

        try:
            return read_block_rows(self).to(dtype)
        except LibraryMissing:
            return self.unpacked().to(dtype)

    def unpacked(self) -> Tensor:
        """The float32 matrix [N, K] without the native library: the same numbers, slowly."""
        layout = BLOCK_FORMATS[self.type_name]
        if layout.bits is not None:
            return in_channels(unpack_integer_groups(self.blocks, layout.columns, layout.bits), self.order)
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        values = dequantize(self.blocks.numpy(), GGMLQuantizationType[self.type_name])
        return torch.from_numpy(values.astype(np.float32, copy=False))

    @property
    def is_finite(self) -> bool:
        """Whether all scales and minima of blocks are finite, and so all weights."""
        layout = BLOCK_FORMATS[self.type_name]
        if layout.bits is not None:
            return bool(torch.isfinite(scales_of_integer_groups(self.blocks, layout.columns, layout.bits)).all())
        blocks = self.blocks.numpy().reshape(-1, layout.nbytes)
        # A half is no number where all bits of its exponent are set; they lie in its upper byte.
        return not any((blocks[:, place + 1] & 0x7C == 0x7C).any() for place in layout.halves)


def in_channels(values: Tensor, order: Tensor | None) -> Tensor:
    """Stored columns `values` [N, K] of that order as input channels."""
    if order is None:
        return values
    made = torch.empty_like(values)
    made[:, order] = values
    return made


ROUNDED_COLUMNS = 32
"""Columns of a matrix that `quantize_blocks` takes are a multiple of this."""

ROUNDED_ROWS = 128
"""Rows that it rounds at once."""


def quantize_blocks(matrix: Tensor, type_name: str) -> BlockWeight:
    """Round a float matrix [N, K] to ggml's Q4_0 or Q5_0: 4 or 5 bits and a float16 scale for 32 columns.

    Of two scales a block takes the one with the smaller squared error. Raises `ValueError` for other columns than
    multiples of 32, and for NaN or infinity.
    """
    if matrix.shape[1] % ROUNDED_COLUMNS or not bool(torch.isfinite(matrix).all()):
        raise ValueError("a matrix of finite numbers, with a multiple of 32 columns")
    blocks = torch.cat([_quantized(rows, type_name) for rows in torch.split(matrix, ROUNDED_ROWS)])
    return BlockWeight(type_name, blocks.contiguous(), matrix.shape[1])


def _quantized(matrix: Tensor, type_name: str) -> Tensor:
    """The blocks, uint8 [N, bytes], of so few rows that what comes in between stays in a processor's cache."""
    half = {"Q4_0": 8, "Q5_0": 16}[type_name]
    groups = matrix.float().view(matrix.shape[0], -1, ROUNDED_COLUMNS)
    extremes = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
    best = torch.zeros_like(groups, dtype=torch.uint8)
    scales, least = torch.zeros_like(extremes), torch.full_like(extremes, torch.inf)
    for divisor in (-half, 1 - half):  # the largest is met exactly, or its mirror image is in reach too
        scale = (extremes / divisor).half().float()
        codes = torch.where(scale == 0, float(half), groups / scale + half).round_().clamp_(0, 2 * half - 1)
        error = ((codes - half) * scale - groups).square().sum(dim=2, keepdim=True)
        better = error < least
        best = torch.where(better, codes.to(torch.uint8), best)
        scales, least = torch.where(better, scale, scales), torch.minimum(error, least)
    low = best & 15
    made = [scales.half().contiguous().view(torch.uint8).view(*best.shape[:2], 2)]
    if type_name == "Q5_0":
        fifth = (best >> 4).view(*best.shape[:2], 4, 8) << torch.arange(8, dtype=torch.uint8)
        made.append(fifth.sum(3, dtype=torch.uint8))
    made.append(low[:, :, :16] | low[:, :, 16:] << 4)
    return torch.cat(made, dim=2).flatten(1)


@dataclass(frozen=True, eq=False)
class StackedWeight(WeightFormat):
    """Matrices of the same columns on top of each other, in several formats."""

    parts: tuple[Stackable, ...]
    native_kind = None

    @property
    def shape(self) -> torch.Size:
        return torch.Size((sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(
            tensor for part in self.parts for tensor in ((part,) if isinstance(part, Tensor) else part.tensors)
        )

    @property
    def type_name(self) -> tuple[str | None, ...]:
        """Those of the parts; None for floats."""
        return tuple(None if isinstance(part, Tensor) else part.type_name for part in self.parts)

    def rows(self, start: int, stop: int) -> StackedWeight:
        """Output channels [start, stop) alone; of parts in lanes as float32."""
        found: list[Stackable] = []
        before = 0
        for part in self.parts:
            first, last = max(start - before, 0), min(stop - before, part.shape[0])
            if first < last:
                rows = part[first:last] if isinstance(part, Tensor) else part.rows(first, last)
                found.append(rows.dequantize(torch.float32) if isinstance(rows, RowsInLanes) else rows)
            before += part.shape[0]
        return StackedWeight(tuple(found))

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return torch.cat(
            [part.to(dtype) if isinstance(part, Tensor) else part.dequantize(dtype) for part in self.parts]
        )


Stackable: TypeAlias = "BlockWeight | BlockLanesWeight | SplitBlockWeight | Tensor"


def stacked(parts: Sequence[Stackable]) -> Stackable | StackedWeight:
    """The matrices on top of each other: neighbours of one format become one matrix, copied."""
    found: list[Stackable] = []
    for _, group in groupby(parts, key=_format_of):
        same = list(group)
        first, others = same[0], same[1:]
        if not others or isinstance(first, BlockLanesWeight):
            found += same
        elif isinstance(first, Tensor):
            found.append(torch.cat([part for part in same if isinstance(part, Tensor)]))
        else:
            found.append(first.above(others))
    return found[0] if len(found) == 1 else StackedWeight(tuple(found))


def _format_of(part: Stackable) -> object:
    """What neighbours must have in common to become one matrix."""
    if isinstance(part, Tensor):
        return Tensor
    order = getattr(part, "order", None)
    return type(part), part.type_name, None if order is None else order.numpy().tobytes()


@dataclass(frozen=True, eq=False)
class BlockLanesWeight(WeightFormat):
    """The matrix [N, K] of a `BlockWeight` with sixteen rows in lanes as `cells` uint8 [N / 16, bytes].

    N is a multiple of 32. `kernels/native/formats/interleaved_blocks.inc` describes the cells; vectors of 8 bits meet
    them.
    """

    type_name: str
    cells: Tensor
    num_columns: int
    order: Tensor | None = None
    meets_bytes = True

    def rounded(self, x: Tensor) -> Tensor:
        return in_eight_bits(x, self.order)

    @property
    def native_kind(self) -> int:
        return _FIRST_KIND + len(BLOCK_TYPES) + BLOCK_TYPES.index(self.type_name)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.cells.shape[0] * LANES, self.num_columns))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.cells,)

    def rows(self, start: int, stop: int) -> RowsInLanes:
        """Output channels [start, stop) alone, without a copy."""
        return RowsInLanes(self, ((start, min(stop, self.shape[0])),))

    def at(self, places: Tensor) -> RowsInLanes:
        """The rows at int64 `places` [T], without a copy."""
        return RowsInLanes(self, tuple((place, place + 1) for place in places.tolist()))

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return self.rows(0, self.shape[0]).dequantize(dtype)


@dataclass(frozen=True, eq=False)
class RowsInLanes:
    """Rows of a matrix in lanes: those of each of `spans`, [start, stop)."""

    weight: BlockLanesWeight
    spans: tuple[tuple[int, int], ...]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The rows [T, K], rounded once to `dtype`."""
        from d3engine.kernels.native.library import read_block_rows  # which knows this class

        return torch.cat([read_block_rows(self.weight, *span) for span in self.spans]).to(dtype)


def in_eight_bits(x: Tensor, order: Tensor | None = None) -> Tensor:
    """`x` [T, K], K a multiple of 32, as whole numbers from -127 to 127 times a scale for each 32 of a row.

    With an order these are 32 stored columns of a matrix.
    """
    groups = (x if order is None else x[:, order]).view(x.shape[0], -1, 32)
    largest = groups.abs().amax(dim=-1, keepdim=True)
    by = torch.where(largest > 1e-30, 127 / largest, 0.0)
    return in_channels(((groups * by).round() * (largest / 127)).view(x.shape), order)


def blocks_in_lanes(weight: _Given) -> _Given | BlockWeight | BlockLanesWeight | SplitBlockWeight | StackedWeight:
    """`weight` interleaved, in new memory, where it is in blocks; as it is where its rows are no multiple of 32.

    Of a stack, neighbours of one format become one matrix.
    """
    if isinstance(weight, BlockWeight):
        return _in_lanes([weight])
    if not isinstance(weight, StackedWeight):
        return weight
    found: list[Stackable] = []
    for _, group in groupby(weight.parts, key=_format_of):
        same = list(group)
        blocks = [part for part in same if isinstance(part, BlockWeight)]
        found += [_in_lanes(blocks)] if blocks else same
    return found[0] if len(found) == 1 and not isinstance(found[0], Tensor) else StackedWeight(tuple(found))


def _in_lanes(parts: Sequence[BlockWeight]) -> BlockWeight | BlockLanesWeight:
    """Matrices of one format as one, read where they lie."""
    if any(part.shape[0] % (2 * LANES) for part in parts):
        parts = [parts[0].above(parts[1:])] if len(parts) > 1 else parts
    first, rows = parts[0], sum(part.shape[0] for part in parts)
    if rows % (2 * LANES):
        return first
    from d3engine.kernels.native.library import interleave_blocks  # which knows this class

    return BlockLanesWeight(first.type_name, interleave_blocks(parts), first.num_columns, first.order)
