"""Quantized matrices: exact where they can be, bounded where not, and multiplied as what they stand for."""

import math
from typing import Any

import pytest
import torch
from e4m3 import E4M3, nearest
from quantized_weights import SCHEMES, SHAPES, random_matrix
from torch import Tensor

from d3engine.kernels import quantized, reference
from d3engine.kernels.quantized import INT4_DIVISORS, QUANTIZERS, Int4Weight, quantize_fp8, quantize_int4, quantize_int8
from d3engine.model.weights import quantize_matrix


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_is_off_by_half_a_step_at_most(shape: tuple[int, int], dtype: torch.dtype) -> None:
    matrix = random_matrix(*shape, dtype)
    weight = quantize_int8(matrix)
    assert weight.shape == matrix.shape
    assert (weight.values.dtype, weight.scales.dtype) == (torch.int8, torch.float32)
    largest = matrix.double().abs().amax(dim=1)
    torch.testing.assert_close(weight.scales.double(), largest / 127, rtol=1e-6, atol=0)
    error = (weight.dequantize(torch.float64) - matrix.double()).abs()
    assert bool((error <= largest[:, None] / 127 * 0.50001).all())
    assert weight.values.abs().amax(dim=1).eq(127).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_int4_takes_for_each_group_the_best_of_its_scales(shape: tuple[int, int], dtype: torch.dtype) -> None:
    matrix = random_matrix(*shape, dtype)
    weight = quantize_int4(matrix)
    assert weight.shape == matrix.shape

    def errors(weight: Int4Weight) -> Tensor:
        """The squared error of each group."""
        off = (weight.dequantize(torch.float64) - matrix.double()).square()
        return torch.stack([group.sum(dim=1) for group in off.split(128, dim=1)], dim=1)

    alone = torch.stack([errors(quantize_int4(matrix, (divisor,))) for divisor in INT4_DIVISORS])
    torch.testing.assert_close(errors(weight), alone.amin(dim=0), rtol=1e-4, atol=1e-12)
    plain = quantize_int4(matrix, (7.0,))
    for column in range(shape[1]):
        off = (plain.dequantize(torch.float64) - matrix.double())[:, column].abs()
        assert bool((off <= plain.scales[:, column // 128].abs() * 0.50001).all())


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_representable_comes_back_exactly(shape: tuple[int, int]) -> None:
    rows, columns = shape
    generator = torch.Generator().manual_seed(columns)
    groups = -(-columns // 128)
    # Scales of few bits, as those of a bfloat16 file are: the products below are exact in float32.
    steps = torch.rand(rows, groups, generator=generator).add(0.1).bfloat16().float()
    wide = torch.randint(-127, 128, shape, generator=generator)
    wide[:, 0] = torch.tensor([127, -127]).repeat(rows)[:rows]
    matrix = wide * steps[:, :1]
    weight = quantize_int8(matrix)
    assert torch.equal(weight.values, wide.to(torch.int8))
    assert torch.equal(weight.dequantize(torch.float32), matrix)
    for extreme in (-8, 7, -7):
        narrow = torch.randint(-7, 7, shape, generator=generator)
        narrow[:, ::128] = extreme
        matrix = narrow * steps.repeat_interleave(128, dim=1)[:, :columns]
        assert torch.equal(quantize_int4(matrix).dequantize(torch.float32), matrix)


def test_byte_holds_channels_j_and_j_plus_64() -> None:
    """A byte holds channels j and j plus 64 and the padding stands for zero."""
    rows, columns = 3, 352
    whole = torch.randint(-8, 8, (rows, columns), generator=torch.Generator().manual_seed(0))
    whole[:, ::128] = -8
    weight = quantize_int4(whole.float())
    assert weight.packed.shape == (rows, 3 * 64)
    assert (weight.packed.dtype, weight.scales.dtype) == (torch.uint8, torch.float32)
    assert torch.equal(weight.scales, torch.ones(rows, 3))
    padded = torch.nn.functional.pad(whole, (0, 3 * 128 - columns))
    for row in range(rows):
        for group in range(3):
            for j in range(64):
                byte = int(weight.packed[row, 64 * group + j])
                assert byte & 15 == padded[row, 128 * group + j] + 8
                assert byte >> 4 == padded[row, 128 * group + 64 + j] + 8
    assert weight.nbytes == rows * 3 * 64 + rows * 3 * 4


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_of_zeros_and_of_almost_nothing_stay_what_they_are(scheme: str) -> None:
    matrix = torch.zeros(3, 200)
    matrix[1] = 1e-45  # the least float32 there is: its scale is 0
    matrix[2, 7] = 3.0
    weight = QUANTIZERS[scheme](matrix)
    assert bool(weight.scales.isfinite().all())
    torch.testing.assert_close(weight.dequantize(torch.float32), matrix, rtol=1e-6, atol=1e-44)
    zero = 8 << 4 | 8 if scheme == "int4" else 0
    assert bool(weight.tensors[0].view(torch.uint8)[:2].eq(zero).all())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_cannot_be_quantized_is_refused(scheme: str) -> None:
    for bad in (math.nan, math.inf, -math.inf):
        matrix = torch.ones(3, 130)
        matrix[1, 129] = bad
        with pytest.raises(ValueError, match="NaN or infinity"):
            QUANTIZERS[scheme](matrix)
    for matrix in (torch.ones(4), torch.ones(2, 3, dtype=torch.int8), torch.ones(2, 0)):
        with pytest.raises(ValueError, match=r"weights must be a float matrix \[N, K\]"):
            QUANTIZERS[scheme](matrix)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_large_matrix_is_quantized_by_runs_of_rows(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = random_matrix(11, 300)
    whole = quantize_matrix(matrix, scheme)
    monkeypatch.setattr(quantized, "_VALUES_AT_ONCE", 4 * 300)
    for one, other in zip(whole.tensors, quantize_matrix(matrix, scheme).tensors, strict=True):
        assert torch.equal(one, other)


# -- 8-bit floats ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_fp8_value_is_the_nearest_there_is(shape: tuple[int, int], dtype: torch.dtype) -> None:
    matrix = random_matrix(*shape, dtype)
    weight = quantize_fp8(matrix)
    assert weight.shape == matrix.shape
    assert (weight.values.dtype, weight.scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert torch.equal(weight.scales, matrix.float().abs().amax(dim=1) / 448)
    assert torch.equal(weight.values.float(), nearest(matrix.float() / weight.scales[:, None]))
    assert weight.nbytes == matrix.numel() + 4 * shape[0]


def test_fp8_values_come_back_and_ties_go_to_even() -> None:
    grid = torch.tensor(E4M3, dtype=torch.float64)
    ties = (grid[:-1] + grid[1:]) / 2
    weight = quantize_fp8(torch.cat([grid, -grid, ties])[None].float())
    assert weight.scales.tolist() == [1.0]
    below = torch.arange(126)
    expected = torch.cat([torch.arange(127), torch.arange(127) + 128, below + (below & 1)])
    assert torch.equal(weight.values.view(torch.uint8)[0].long(), expected)


def test_fp8_of_a_denormal_scale_stays_finite() -> None:
    matrix = torch.zeros(1, 200)
    matrix[0, 5] = 9e-43  # 448 scales would be less
    weight = quantize_fp8(matrix)
    assert weight.values[0, 5].item() == 448
    torch.testing.assert_close(weight.dequantize(torch.float32), matrix, rtol=1e-6, atol=4e-43)


# -- the operations ----------------------------------------------------------------------------------------------


def outputs_of(weight: Any, dtype: torch.dtype, num_rows: Tensor | None = None) -> list[Tensor]:
    """What every linear operation makes of a weight [96, 160]."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    hidden, norm, bias, residual = random(3, 160), random(160), random(96), random(3, 96)
    pool = torch.zeros(2, 2, 4, 2, 16, dtype=dtype)
    rotations = torch.polar(torch.ones(3, 8), torch.rand(3, 8, generator=generator))
    entries = torch.arange(6).view(3, 2)
    queries = reference.qkv(hidden, norm, 1e-5, weight, bias, rotations, pool, entries, 2, num_rows=num_rows)
    reference.linear_residual(hidden, weight, bias, residual, num_rows=num_rows)
    return [
        queries,
        pool,
        residual,
        reference.gate_up(hidden, norm, 1e-5, weight, bias, num_rows=num_rows),
        reference.lm_head(hidden, norm, 1e-5, weight, num_rows=num_rows),
        reference.lm_head_argmax(hidden, norm, 1e-5, weight, num_rows=num_rows)[0],
    ]


@pytest.mark.parametrize("rows_at_once", [96, 7])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_quantized_operation_is_that_of_the_dequantized_matrix(
    scheme: str, dtype: torch.dtype, tolerance: float, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "_rows_at_once", lambda num_tokens, num_columns: rows_at_once)
    weight = quantize_matrix(random_matrix(96, 160), scheme)
    for num_rows in (None, torch.tensor([2], dtype=torch.int32)):
        ours = outputs_of(weight, dtype, num_rows)
        theirs = outputs_of(weight.dequantize(dtype), dtype, num_rows)
        for one, other in zip(ours[:-1], theirs[:-1], strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * 10, equal_nan=True)
        if dtype == torch.float32:
            assert torch.equal(ours[-1], theirs[-1])


def test_float16_products_do_not_overflow_before_they_are_scaled() -> None:
    weight = quantize_int8(torch.full((2, 128), 0.01))
    out = torch.zeros(1, 2, dtype=torch.float16)
    reference.linear_residual(torch.full((1, 128), 100.0, dtype=torch.float16), weight, None, out)
    torch.testing.assert_close(out, torch.full((1, 2), 128.0, dtype=torch.float16), rtol=1e-2, atol=0)
