"""int8 and int4 with sixteen rows in lanes: the same values in another order."""

from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch

from d3engine.kernels import reference
from d3engine.kernels.interleaved import Int4LanesWeight, Int8LanesWeight, LanesWeight, in_lanes
from d3engine.kernels.matrices import looked_up
from d3engine.kernels.quantized import Int4Weight, Int8Weight, quantize_fp8, quantize_int4, quantize_int8

Quantize: TypeAlias = Callable[[torch.Tensor], Int8Weight | Int4Weight]
SHAPES = [(32, 64), (64, 200), (96, 576), (32, 7)]


def matrix(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns))


@pytest.mark.parametrize("quantize", [quantize_int8, quantize_int4])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_values_are_the_same(rows: int, columns: int, quantize: Quantize) -> None:
    given = quantize(matrix(rows, columns))
    made = in_lanes(given)
    assert isinstance(made, LanesWeight)
    assert made.shape == given.shape
    assert torch.equal(made.dequantize(torch.float32), given.dequantize(torch.float32))
    for start, stop in ((0, 5), (7, 31), (16, 32), (3, 17), (20, rows + 40)):
        assert torch.equal(
            made.rows(start, stop).dequantize(torch.float32), given.dequantize(torch.float32)[start:stop]
        )


def test_the_bytes_of_int4_are_those_that_are_described() -> None:
    given = quantize_int4(matrix(64, 300))
    made = in_lanes(given)
    assert isinstance(made, Int4LanesWeight)
    assert made.packed.shape == (4, 3 * 16, 16, 4)
    assert made.packed.data_ptr() % 64 == 0
    for row, byte in ((0, 0), (17, 5), (63, 191), (40, 100)):
        assert made.packed[row // 16, byte // 4, row % 16, byte % 4] == given.packed[row, byte]
        assert made.scales[row // 16, byte // 64, row % 16] == given.scales[row, byte // 64]
    assert made.nbytes == given.nbytes


def test_the_bytes_of_int8_are_128_more_than_the_values() -> None:
    given = quantize_int8(matrix(32, 100))
    made = in_lanes(given)
    assert isinstance(made, Int8LanesWeight)
    assert made.packed.shape == (2, 32, 16, 4)
    for row, column in ((0, 0), (17, 5), (31, 99)):
        assert int(made.packed[row // 16, column // 4, row % 16, column % 4]) == int(given.values[row, column]) + 128
    assert torch.equal(made.packed[:, 25:], torch.full((2, 7, 16, 4), 128, dtype=torch.uint8))  # behind the last column
    assert made.scales is given.scales


def test_single_rows_of_int8_are_looked_up() -> None:
    given = quantize_int8(matrix(64, 100))
    made = in_lanes(given)
    assert isinstance(made, Int8LanesWeight)
    places = torch.tensor([3, 63, 0, 3, 31])
    assert torch.equal(looked_up(made, places, torch.float32), looked_up(given, places, torch.float32))


def test_what_has_no_lanes_stays_as_it_is() -> None:
    """Floats, 8-bit floats, and rows that are no multiple of 32, of which a half would end between lanes."""
    for given in (
        matrix(32, 32),
        quantize_fp8(matrix(32, 32)),
        quantize_int8(matrix(48, 32)),
        quantize_int4(matrix(31, 64)),
    ):
        assert in_lanes(given) is given
    turned = in_lanes(quantize_int8(matrix(32, 32)))
    assert in_lanes(turned) is turned


@pytest.mark.parametrize("quantize", [quantize_int8, quantize_int4])
def test_pytorch_multiplies_by_it(quantize: Quantize) -> None:
    given = quantize(matrix(96, 300))
    made = in_lanes(given)
    x, residual = torch.randn(5, 300), torch.zeros(5, 96)
    wanted = residual.clone()
    reference.linear_residual(x, given.dequantize(torch.float32), None, wanted)
    reference.linear_residual(x, made, None, residual)
    torch.testing.assert_close(residual, wanted, rtol=1e-5, atol=1e-5)
