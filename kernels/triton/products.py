"""The host's side of all projections: which tile a product gets, and its launch.

The device's side, the loop itself, is in `product_kernels.py`; what is left to torch in `matmul.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from d3engine.kernels.blocks import StackedWeight
from d3engine.kernels.matrices import Weight
from d3engine.kernels.quantized import GROUP
from d3engine.kernels.split_blocks import SplitBlockWeight
from d3engine.kernels.target import processors_of
from d3engine.kernels.triton import launches
from d3engine.kernels.triton.launches import Launch, row_counts, strided
from d3engine.kernels.triton.product_kernels import FEW_ROWS
from d3engine.kernels.triton.tiles import LIMITS, Line, form_of, line_of
from d3engine.kernels.weight_format import WeightFormat

MATMUL_ROWS = 64
"""Products of more rows go to torch.matmul (cuBLAS) with a kernel for the rest of the operation around it.

Not yet measured on a GPU. Of quantized weights beside float32, too.
"""

UNPACK_ROWS = 512
"""Up to this many rows of half precision read quantized weights as they lie; more need them unpacked for torch.matmul.

Unpacking costs 3 bytes a weight of 8 bits whatever the rows, and each 128 rows make floats of all weights anew: by
arithmetic the two are even somewhere between 350 and 750 rows. Not yet measured on a GPU.
"""

INVARIANT_ROWS = 64
"""Rows of the one tile that a product has whose sums must not depend on how many rows there are."""

MIN_PROGRAMS: int | None = None
"""Programs that leave no processor without work; None: as many as the device has, see `_least_programs`."""

MIN_STEPS = 4  # of a program that shares its outputs with others: below, filling its pipeline is most of its time
FIVE_BITS = ("Q5_0", "Q5_1")
FEW_FIVE_BIT_ROWS = 8  # of these: beside 16 rows, with their norm, ptxas spills what their bits take
MIN_BLOCK_STEPS = 2  # the same of blocks, whose steps are longer


@dataclass(frozen=True, slots=True)
class Tile:
    """How one launch cuts a product: rows x outputs per program, columns per step."""

    rows: int
    outputs: int
    columns: int
    warps: int
    stages: int
    weights_first: bool = False  # whether the weights are the left operand of the tensor cores
    parts: int = 1  # programs that share the columns of one tile of outputs (split-K)
    stack: tuple[Tile, ...] = ()  # of each part of a `StackedWeight`, where this is that of the first

    @property
    def is_normed(self) -> bool:
        """Whether it takes rows to which a norm has been applied."""
        return bool(self.rows > FEW_ROWS.value)

    def is_arranged(self, weight: Weight, dtype: torch.dtype) -> bool:
        """Whether it takes rows of `dtype` in the order of `places_of` beside that weight."""
        return self.is_normed and not isinstance(weight, Tensor | SplitBlockWeight) and dtype != torch.float32

    def part_columns(self, columns: int) -> int:
        """Columns of each part, in whole steps; the last may have fewer."""
        return int(triton.cdiv(triton.cdiv(columns, self.columns), self.parts)) * self.columns


def product_tile(
    rows: int, weight: Weight, dtype: torch.dtype, *, may_split: bool = False, batch_invariant: bool = False
) -> Tile | None:
    """The tile for `rows` rows of `dtype` times `weight` [N, K] transposed; None: leave it to torch.matmul.

    What the operations share. With `may_split` a tile may have parts, but that of a stack has one for each of its
    matrices, and `sums_launches` alone takes it. With `batch_invariant` it is the same tile, of as
    many parts, for any number of rows, so that a row meets the same instructions in the same order whatever stands
    beside it. Then `may_split` must not follow from the rows either.

    The numbers are for Hopper, and fit the 99 KB of shared memory that consumer cards have: the first path has two
    tiles in flight, the others 2 to 5 stages (see `inspect`).
    """
    if isinstance(weight, StackedWeight):
        tiles = [product_tile(rows, part, dtype, batch_invariant=batch_invariant) for part in weight.parts]
        found = [tile for tile in tiles if tile is not None]
        return replace(found[0], stack=tuple(found)) if len(found) == len(tiles) else None
    outputs, columns = weight.shape
    if batch_invariant:
        rows = INVARIANT_ROWS
    if rows <= 1 and form_of(weight) in ("float", "bytes"):
        return _single_row_tile(outputs, columns, weight)
    reads_small = not isinstance(weight, Tensor) and dtype != torch.float32
    if rows > (UNPACK_ROWS if reads_small else MATMUL_ROWS) and not batch_invariant:
        return None
    has_five_bits = isinstance(weight, SplitBlockWeight) and weight.type_name in FIVE_BITS
    if rows <= (FEW_FIVE_BIT_ROWS if has_five_bits else FEW_ROWS.value):
        tile = _few_rows_tile(rows, weight, dtype, may_split)
        return _split(tile, weight) if may_split else tile
    if dtype == torch.float32:
        return _many_float32_rows_tile(rows, weight)
    return _many_rows_tile(rows, weight, may_split)


def _tile_of(line: Line) -> Tile:
    return Tile(line.tile_rows, line.outputs, line.columns, line.warps, line.stages, line.weights_first)


def _many_float32_rows_tile(rows: int, weight: Weight) -> Tile:
    tile = _tile_of(line_of("product of float32", form_of(weight), rows))
    return replace(tile, outputs=_enough_programs(tile.outputs, weight.shape[0], _least_programs(weight), least=32))


def _many_rows_tile(rows: int, weight: Weight, may_split: bool) -> Tile:
    """For more than 16 rows of half precision, in parts or narrower where that keeps the device busy."""
    tile = _tile_of(line_of("product", form_of(weight), rows))
    outputs, columns = weight.shape
    row_tiles, enough = triton.cdiv(rows, tile.rows), _least_programs(weight)
    programs = row_tiles * triton.cdiv(outputs, tile.outputs)
    if may_split:
        parts = min((enough + programs // 2) // programs, triton.cdiv(columns, tile.columns) // MIN_STEPS)
        parts = triton.cdiv(columns, replace(tile, parts=max(1, parts)).part_columns(columns))  # none is empty
        return replace(tile, parts=parts)
    # Two programs of three processors: narrower tiles would read the rows twice as often.
    while tile.outputs > 32 and 3 * row_tiles * triton.cdiv(outputs, tile.outputs) < 2 * enough:
        tile = replace(tile, outputs=tile.outputs // 2, warps=4)
    return tile


def _few_rows_tile(rows: int, weight: Weight, dtype: torch.dtype, may_split: bool) -> Tile:
    """For up to 16 rows, which are the right operand: of the left one tensor cores take 16 or 64 rows, of this 8."""
    (outputs, columns), enough, form = weight.shape, _least_programs(weight), form_of(weight)
    many, half = outputs >= 2 * 64 * enough, outputs >= 64 * enough
    block_outputs = _enough_programs(64 if many and form != "blocks" else 32, outputs, enough, least=16)
    if dtype == torch.float32 or isinstance(weight, Tensor):
        kernel = "few rows of float32" if dtype == torch.float32 else "few rows"
        return replace(_tile_of(line_of(kernel, form, rows)), outputs=block_outputs)
    tile = _tile_of(line_of("few rows", form, rows))
    if form == "bytes":
        if rows > 8 and half:
            block_outputs = 64
        elif rows > 8 and not (may_split or weight.row_scales is None or columns % 256 or launches.PROGRAMMATIC):
            tile = _tile_of(line_of("few rows, few programs", form, rows))
        return replace(tile, outputs=block_outputs, warps=max(1, min(tile.warps, block_outputs // 16)))
    if form == "int4" and columns % tile.columns:
        tile = replace(tile, columns=GROUP)
    if form == "int4" and half and not (many or may_split):
        wide = _tile_of(line_of("few rows, few programs", form, rows))
        return replace(wide, columns=tile.columns)
    return replace(tile, outputs=block_outputs, warps=max(1, min(tile.warps, block_outputs // 16)))


def _single_row_tile(outputs: int, columns: int, weight: Weight) -> Tile:
    # Exactly 16 bytes a thread along the columns: then row and weights get one layout. With any other step Triton
    # moves every weight through shared memory.
    each = 16 // weight.element_size() if isinstance(weight, Tensor) else 16
    padded = max(16, triton.next_power_of_2(columns))
    # Under programmatic launch the first step is taken before the loop, and a loop of one is not pipelined.
    least_steps = 4 if launches.PROGRAMMATIC else 1
    warps = min(4, max(1, padded // (least_steps * 32 * each)))
    return Tile(
        1, _enough_programs(8, outputs, _least_programs(weight)), min(warps * 32 * each, padded), warps, stages=3
    )


def _split(tile: Tile, weight: Weight) -> Tile:
    """`tile` with parts, if that gives a processor two programs (four of int4, six of blocks) where there were fewer.

    Then outputs are many a program, since each program reads the rows: these would be half of what it moves.
    """
    outputs, columns = weight.shape
    form = form_of(weight)
    each, least = {"int4": (4, MIN_STEPS), "blocks": (6, MIN_BLOCK_STEPS)}.get(form, (2, MIN_STEPS))
    wide = replace(tile, outputs=64 if each == 2 else 32, columns=GROUP if form == "int4" else tile.columns)
    if not isinstance(weight, Tensor) and tile.warps < 4:
        wide = replace(wide, warps=2)
    programs = triton.cdiv(outputs, wide.outputs)
    parts = min(each * _least_programs(weight) // programs, triton.cdiv(columns, wide.columns) // least)
    if parts < 2:
        return tile
    parts = triton.cdiv(columns, replace(wide, parts=parts).part_columns(columns))  # none is empty
    return replace(wide, parts=parts, stages=5 if form == "int4" and tile.warps < 4 else tile.stages)


def _enough_programs(most: int, outputs: int, enough: int, least: int = 2) -> int:
    """`most` outputs a program, or half as often as needed for `enough` programs, but not below `least`."""
    each = most
    while each > least and outputs < each * enough:
        each //= 2
    return each


def _least_programs(weight: Weight) -> int:
    """`MIN_PROGRAMS` on the device where a matrix is: its processors, in sixteens, as outputs are: of an H100 128."""
    if MIN_PROGRAMS is not None:
        return MIN_PROGRAMS
    device = (weight if isinstance(weight, Tensor) else weight.tensors[0]).device
    return max(16, processors_of(device) // 16 * 16)


def product_launch(
    kernel: Any,
    tile: Tile,
    x: Tensor,
    weight: Weight,
    num_rows: Tensor | None,
    **others: object,
) -> Launch:
    """The launch of a kernel around `tile_product`: program (i, j, k) has row tile i, output tile j and part k.

    `others` are the arguments that this kernel alone has.
    """
    rows = x.shape[0]
    arguments = {
        **strided(x=x),
        **weight_arguments(weight),
        **row_counts(num_rows, rows),
        "K": weight.shape[1],
        "BLOCK_T": tile.rows,
        "BLOCK_N": tile.outputs,
        "BLOCK_K": tile.columns,
        "WEIGHTS_FIRST": tile.weights_first,
        "STAGES": tile.stages,
        **others,
    }
    grid = (triton.cdiv(rows, tile.rows), triton.cdiv(weight.shape[0], tile.outputs), tile.parts)
    limits: dict[str, Any] = {}
    is_block = isinstance(weight, SplitBlockWeight)
    if is_block and (tile.warps == 2 or (tile.warps == 4 and x.dtype != torch.float32)):
        limits = LIMITS[f"product of blocks, {'two' if tile.warps == 2 else 'four'} warps"].options
    elif tile.warps == 2:
        is_large = tile.rows > 8 and tile.outputs >= 64
        limits = LIMITS["product of two warps" + (", 64 outputs beside 16 rows" if is_large else "")].options
    if tile.rows == 1 and isinstance(weight, WeightFormat) and weight.least_capability:
        groups = " with scales of groups" if weight.row_scales is None else ""
        limits = LIMITS["one row, 8-bit floats" + groups].options
    # Beside 128 rows small weights wait for tensor cores, and for becoming floats; blocks do so beside more than a few.
    streams = tile.rows <= (FEW_ROWS.value if is_block else 64) or isinstance(weight, Tensor)
    least = least_capability(weight)
    return Launch(kernel, grid, arguments, tile.warps, tile.stages, **limits, least_capability=least, streams=streams)


def least_capability(weight: Weight) -> int:
    """The first compute capability that reads such a matrix, without the point; 0 for any."""
    return 0 if isinstance(weight, Tensor) else weight.least_capability


def parts_of(weight: Weight) -> Iterator[tuple[int, Weight]]:
    """The matrices of a stack, each with the first of its outputs; any other matrix alone."""
    first = 0
    for part in weight.parts if isinstance(weight, StackedWeight) else (weight,):
        yield first, part
        first += part.shape[0]


def weight_arguments(weight: Weight) -> dict[str, object]:
    """The kernel arguments that say where a matrix is: what it holds follows from the pointer's type."""
    stored: Tensor
    scales: Tensor | None = None
    if isinstance(weight, Tensor):
        stored = weight
    else:
        assert form_of(weight), "only the native library reads packed matrices"
        stored, scales = weight.tensors  # scales of one group, [N, 1], lie as those of rows do
    return {
        **strided(weight=stored),
        "scales_ptr": scales,
        "SCALES_STRIDE": 0 if scales is None else scales.stride(0),
        "TYPE": weight.type_name if isinstance(weight, SplitBlockWeight) else None,
    }


def need_unit_stride(**tensors: Weight | None) -> None:
    """Raise `ValueError` for a tensor whose last dimension is not contiguous: kernels read 16 bytes at a time."""
    for name, tensor in tensors.items():
        if isinstance(tensor, StackedWeight):
            need_unit_stride(**{f"{name}.parts[{nth}]": part for nth, part in enumerate(tensor.parts)})
        elif isinstance(tensor, WeightFormat):
            values, scales = tensor.tensors
            need_unit_stride(**{f"{name}.values": values, f"{name}.scales": scales})
        elif isinstance(tensor, Tensor) and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} has stride {tensor.stride()}; its last dimension must have stride 1")
