"""Matrices of 8-bit floats: the nearest of the values that there are, and multiplied as what they stand for."""

import math

import pytest
import torch
from quantized_weights import SHAPES, random_matrix
from torch import Tensor

from d3engine.kernels import quantized, reference
from d3engine.kernels.quantized import quantize_fp8


def magnitudes() -> Tensor:
    """What the bytes 0 to 126 stand for, float64, by the definition of e4m3; byte 127 is NaN."""
    return torch.tensor(
        [math.ldexp(byte & 7, -9) if byte < 8 else math.ldexp(8 + (byte & 7), (byte >> 3) - 10) for byte in range(127)],
        dtype=torch.float64,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_value_is_the_nearest_there_is(shape: tuple[int, int], dtype: torch.dtype) -> None:
    matrix = random_matrix(*shape, dtype)
    weight = quantize_fp8(matrix)
    assert weight.shape == matrix.shape
    assert (weight.values.dtype, weight.scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert torch.equal(weight.scales, matrix.float().abs().amax(dim=1) / 448)
    quotients = (matrix.float() / weight.scales[:, None]).double()
    least = (quotients.abs()[..., None] - magnitudes()).abs().amin(dim=2)
    assert torch.equal((weight.values.double() - quotients).abs(), least)
    assert weight.nbytes == matrix.numel() + 4 * shape[0]


def test_values_come_back_and_ties_go_to_even() -> None:
    grid = magnitudes()
    ties = (grid[:-1] + grid[1:]) / 2
    row = torch.cat([grid, -grid, ties])
    weight = quantize_fp8(row[None].float())
    assert weight.scales.tolist() == [1.0]
    below = torch.arange(126)
    expected = torch.cat([torch.arange(127), torch.arange(127) + 128, below + (below & 1)])
    assert torch.equal(weight.values.view(torch.uint8)[0].long(), expected)


def test_rows_of_zeros_and_of_almost_nothing_stay_finite() -> None:
    matrix = torch.zeros(4, 200)
    matrix[1] = 1e-45  # the least float32 there is: its scale is 0
    matrix[2, 7] = 3.0
    matrix[3, 5] = 9e-43  # 448 scales would be less
    weight = quantize_fp8(matrix)
    assert weight.scales[:2].tolist() == [0.0, 0.0]
    assert weight.values[3, 5].item() == 448
    torch.testing.assert_close(weight.dequantize(torch.float32), matrix, rtol=1e-6, atol=4e-43)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    matrix = torch.ones(3, 130)
    matrix[1, 129] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize_fp8(matrix)


def test_runs_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = random_matrix(11, 300)
    whole = quantize_fp8(matrix).dequantize(torch.float32)
    monkeypatch.setattr(quantized, "_VALUES_AT_ONCE", 4 * 300)
    weight = quantize_fp8(matrix)
    assert torch.equal(weight.dequantize(torch.float32), whole)
    assert torch.equal(weight.rows(3, 7).dequantize(torch.float32), whole[3:7])


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 4e-3)])
def test_products_are_those_of_what_it_stands_for(dtype: torch.dtype, bound: float) -> None:
    weight = quantize_fp8(random_matrix(352, 300))
    x = random_matrix(5, 300).to(dtype)
    expected = x.double() @ weight.dequantize(torch.float64).T
    out = torch.zeros(5, 352, dtype=dtype)
    reference.linear_residual(x, weight, None, out)
    off = (out.double() - expected).abs().amax()
    assert off <= bound * expected.abs().amax()
