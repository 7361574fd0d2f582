"""The table of tiles: what each kernel is cut into, by what weights or entries are stored as and by rows, and why.

A line is found by its kernel, its form and the number of rows, a limit of registers by its name;
`python -m d3engine.kernels.inspect --tiles` prints all, and `benchmarks.gpu_round` times others in the place of each.
What depends on a matrix and on the device (how many outputs keep it busy, split-K) is in `products.py`, and what
depends on heads and entries in `paged_attention.py`. None has been measured on a GPU yet: reasons are those of machine
code, of the Triton that a line names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from d3engine.kernels.matrices import Weight
from d3engine.kernels.quantized import GROUP
from d3engine.kernels.split_blocks import SplitBlockWeight
from d3engine.kernels.triton.block_values import BLOCK


@dataclass(frozen=True, slots=True)
class Line:
    """One line: up to `rows` rows of this form get `tile_rows` x `outputs`, at most, a program, `columns` a step."""

    kernel: str
    form: str
    rows: float
    tile_rows: int
    outputs: int
    columns: int
    warps: int
    stages: int
    weights_first: bool
    reason: str
    triton: str = "3.9"


@dataclass(frozen=True, slots=True)
class Limit:
    """Registers of a thread at most; `early` under programmatic launch, where what is loaded before the wait stays."""

    registers: int
    reason: str
    early: int | None = None
    triton: str = "3.9"

    @property
    def options(self) -> dict[str, Any]:
        """What a `Launch` takes."""
        early = {} if self.early is None else {"programmatic_options": {"maxnreg": self.early}}
        return {"options": {"maxnreg": self.registers}} | early


_OUTPUTS_LEFT = "few rows: outputs are the left operand, of which tensor cores take 64"
_SMALL_LEFT = "values become floats in registers, where only the left operand can stay"
_FROM_REGISTERS = "float32 has no tensor cores: small steps, from registers"
_PAIRS = "two warps of 16 or 32 outputs: no value becomes a float twice"
_STEP = BLOCK  # of blocks: a largest one
_ALL = math.inf

LINES = (
    Line("product", "float", 32, 32, 128, 64, 8, 4, True, _OUTPUTS_LEFT),
    Line("product", "float", 64, 64, 128, 64, 8, 4, False, "each program reads the rows from L2: many outputs"),
    Line("product", "float", _ALL, 128, 128, 64, 8, 3, False, "a fourth stage has no room beside 128 rows"),
    Line("product", "bytes", 32, 32, 128, 128, 8, 4, True, _SMALL_LEFT),
    Line("product", "bytes", 64, 64, 128, 128, 8, 3, True, "a fourth stage does not fit 99 KB"),
    Line("product", "bytes", _ALL, 128, 128, 64, 8, 4, True, "half of a step beside 128 rows fits 99 KB"),
    Line("product", "int4", 32, 32, 128, GROUP, 8, 4, True, _SMALL_LEFT + "; a step is one group"),
    Line("product", "int4", 64, 64, 128, GROUP, 8, 4, True, _SMALL_LEFT + "; a step is one group"),
    Line("product", "int4", _ALL, 128, 128, GROUP, 8, 2, True, "more stages of 128 rows do not fit 99 KB"),
    Line("product", "blocks", 32, 32, 64, _STEP, 4, 2, True, _SMALL_LEFT),
    Line("product", "blocks", _ALL, 64, 64, _STEP, 4, 2, True, "rows of a step are 32 KB: two stages fit 99 KB"),
    Line("product of float32", "float", 32, 32, 64, 32, 4, 2, False, _FROM_REGISTERS),
    Line("product of float32", "float", _ALL, 64, 64, 32, 4, 2, False, _FROM_REGISTERS),
    Line("product of float32", "bytes", 32, 32, 64, 32, 4, 2, True, _FROM_REGISTERS),
    Line("product of float32", "bytes", _ALL, 64, 64, 32, 4, 2, True, _FROM_REGISTERS),
    Line("product of float32", "int4", 32, 32, 64, GROUP, 4, 4, True, _FROM_REGISTERS + "; a step is one group"),
    Line("product of float32", "int4", _ALL, 64, 64, GROUP, 4, 3, True, _FROM_REGISTERS + "; a step is one group"),
    Line("product of float32", "blocks", 32, 32, 64, _STEP, 4, 1, True, _FROM_REGISTERS + "; a step is one block"),
    Line("product of float32", "blocks", _ALL, 64, 32, _STEP, 4, 1, True, _FROM_REGISTERS + "; a step is one block"),
    Line("few rows", "float", 8, 8, 64, 128, 4, 4, True, "rows are the right operand, of which tensor cores take 8"),
    Line("few rows", "float", 16, 16, 64, 128, 4, 4, True, "rows are the right operand"),
    Line("few rows", "bytes", 8, 8, 64, 128, 2, 6, True, _PAIRS),
    Line("few rows", "bytes", 16, 16, 64, 128, 2, 6, True, _PAIRS),
    Line("few rows", "int4", 8, 8, 64, 2 * GROUP, 2, 3, True, _PAIRS),
    Line("few rows", "int4", 16, 16, 64, 2 * GROUP, 2, 3, True, _PAIRS),
    Line("few rows", "blocks", 8, 8, 32, _STEP, 2, 3, True, _PAIRS + "; many programs hide what that takes"),
    Line("few rows", "blocks", 16, 16, 32, _STEP, 2, 3, True, _PAIRS + "; many programs hide what that takes"),
    Line("few rows, few programs", "bytes", 16, 16, 32, 256, 2, 4, True, "shorter rounds have too little under way"),
    Line("few rows, few programs", "int4", 8, 8, 64, 2 * GROUP, 4, 3, True, "two warps have too few loads under way"),
    Line("few rows, few programs", "int4", 16, 16, 64, 2 * GROUP, 4, 3, True, "two warps have too few loads under way"),
    *(
        Line("few rows of float32", form, rows, rows, 64, step, 4, 2, True, _FROM_REGISTERS)
        for form, step in (("float", 32), ("bytes", 32), ("int4", GROUP), ("blocks", _STEP))
        for rows in (8, 16)
    ),
)

LIMITS = {
    "product of two warps": Limit(168, "six programs have room; left alone, ptxas saves registers and spills", 200),
    "product of two warps, 64 outputs beside 16 rows": Limit(168, "four have room by shared memory", 240),
    "product of blocks, two warps": Limit(
        255, "four have room by shared memory; left less, Q6_K spills beside 16 rows"
    ),
    "product of blocks, four warps": Limit(168, "three programs have room; left less, Ampere's spill, or left alone"),
    "one row, 8-bit floats": Limit(112, "four programs have room, or seven of half as many threads"),
    "one row, 8-bit floats with scales of groups": Limit(128, "as above, and the scales", 144),
    "attention of single rows, three programs": Limit(168, "three programs of four warps have room"),
    "attention of single rows, two programs": Limit(255, "left alone, ptxas saves registers for more programs"),
    "attention of chunks, four warps": Limit(255, "left alone, ptxas saves registers, and spills on Blackwell"),
    "last launch of a choice with cuts": Limit(128, "left alone, ptxas keeps to 64, and spills"),
    "logits of 64 rows": Limit(128, "two programs have room; left alone, ptxas saves for four and spills on Blackwell"),
}
"""Of registers, by kernel."""


def form_of(weight: Weight) -> str:
    """How the table calls what a matrix is stored as; nothing for what Triton's kernels do not read."""
    if isinstance(weight, Tensor):
        return "float"
    return "blocks" if isinstance(weight, SplitBlockWeight) else {1: "bytes", 2: "int4"}.get(weight.values_a_byte, "")


def line_of(kernel: str, form: str, rows: float) -> Line:
    """The first line of a kernel and a form that has room for these rows."""
    return next(line for line in LINES if (line.kernel, line.form) == (kernel, form) and rows <= line.rows)


def table() -> str:
    """All lines, as `inspect --tiles` prints them."""
    header = ("kernel", "form", "rows", "tile", "step", "warps", "stages", "left", "Triton", "reason")
    rows = [
        (
            line.kernel,
            line.form,
            "more" if line.rows == math.inf else f"{line.rows:.0f}",
            f"{line.tile_rows}x{line.outputs}",
            str(line.columns),
            str(line.warps),
            str(line.stages),
            "weights" if line.weights_first else "rows",
            line.triton,
            line.reason,
        )
        for line in LINES
    ]
    limits = [
        (name, str(limit.registers), str(limit.early or limit.registers), limit.triton, limit.reason)
        for name, limit in LIMITS.items()
    ]
    names = ("registers of", "at most", "early", "Triton", "reason")
    return aligned([header, *rows]) + "\n\n" + aligned([names, *limits])


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """The cells of rows in columns as wide as their widest."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
