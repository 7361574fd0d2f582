"""The table of tiles: what is launched stands in it, and each line says why."""

import subprocess
import sys
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from d3engine.kernels.triton import products
from d3engine.kernels.triton.launches import meta_weight
from d3engine.kernels.triton.tiles import LIMITS, LINES, line_of


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "MIN_PROGRAMS", None)
    monkeypatch.setattr(products, "MATMUL_ROWS", 64)


def test_every_line_is_found_and_says_why() -> None:
    for line in LINES:
        assert line_of(line.kernel, line.form, min(line.rows, 1e6)) is line
        assert line.reason
        assert line.triton
    assert all(limit.reason for limit in LIMITS.values())


@pytest.mark.parametrize(("dtype", "rows"), list(product((torch.bfloat16, torch.float32), (2, 8, 16, 17, 64))))
@pytest.mark.parametrize("form", ["", "int8", "int4", "Q4_K"])
def test_a_tile_is_that_of_a_line(form: str, dtype: torch.dtype, rows: int) -> None:
    """But for how many outputs keep a device busy, and the warps that so few have."""
    shapes = ((4096, 4096), (11008, 4096), (32000, 4096), (64, 4096))
    of_dtype = [line for line in LINES if line.kernel.endswith("float32") is (dtype == torch.float32)]
    lines = {(line.tile_rows, line.columns, line.stages, line.weights_first): line for line in of_dtype}
    for outputs, columns in shapes:
        tile: Any = products.product_tile(rows, meta_weight(outputs, columns, dtype=dtype, weights=form), dtype)
        line = lines[tile.rows, tile.columns, tile.stages, tile.weights_first]
        assert tile.outputs <= line.outputs
        assert tile.rows <= max(line.rows, 32)


def test_inspect_prints_the_table_and_compiles_nothing() -> None:
    command = [sys.executable, "-m", "d3engine.kernels.inspect", "--tiles"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for name in {line.kernel for line in LINES} | LIMITS.keys():
        assert name in printed
    assert "3.9" in printed
