"""Many rows rounded to 8-bit floats, a scale for each, and torch's product of them and a matrix of such floats."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from d3engine.kernels.kv_pool import FP8, FP8_CAPABILITY, LARGEST, SMALLEST
from d3engine.kernels.quantized import Fp8RowsWeight, quantize_fp8
from d3engine.kernels.triton.launches import Launch, ModelShape, meta, row_counts, strided
from d3engine.kernels.triton.operations import Step, TorchCall
from d3engine.kernels.triton.product_kernels import NOT_SPECIALIZED, live_rows, wait_for_previous
from d3engine.kernels.triton.rms_norm import tuning

_LARGEST = tl.constexpr(LARGEST)
_SMALLEST = tl.constexpr(SMALLEST)
_COLUMNS = 4096
"""Of a row that are read at once."""
_TRIED = (64, 256, 48)
"""Rows, columns and outputs of the trial."""
_NEAR = 0.01
"""Relative error of a trial that is passed: bfloat16's own is 0.002."""


def fp8_rows_steps(x: Tensor, weight: Fp8RowsWeight, bias: Tensor | None) -> tuple[Tensor, list[Step]]:
    """`x` [T, K], rounded to 8-bit floats, times `weight` [N, K] transposed, plus `bias` [N]: [T, N], and its steps.

    Sums are float32, and rounded before the bias is added.
    """
    rows, columns = x.shape
    values = torch.empty(rows, columns, dtype=FP8, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    out = torch.empty(rows, weight.shape[0], dtype=x.dtype, device=x.device)
    product = TorchCall(_multiply_into, (out, values, scales, *weight.tensors, bias))
    return out, [fp8_rows_launch(x, values, scales), product]


def _multiply_into(
    out: Tensor, values: Tensor, scales: Tensor, matrix: Tensor, of_outputs: Tensor, bias: Tensor | None
) -> None:
    # Sums are float32 to the end: by default there is no fast accumulation.
    torch._scaled_mm(values, matrix.t(), scale_a=scales, scale_b=of_outputs[None, :], out_dtype=out.dtype, out=out)
    if bias is not None:
        out.add_(bias)


def fp8_rows_launch(x: Tensor, values: Tensor, scales: Tensor) -> Launch:
    """`values` float8_e4m3fn [T, K] and `scales` float32 [T, 1], contiguous, are written: the rows of `x` [T, K]."""
    rows, columns = x.shape
    arguments = {
        **strided(x=x),
        "values_ptr": values,
        "scales_ptr": scales,
        **row_counts(None, rows),
        "K": columns,
        "BLOCK_K": min(triton.next_power_of_2(columns), _COLUMNS),
    }
    tuned = tuning(min(columns, _COLUMNS))
    return Launch(_fp8_rows_kernel, (rows,), arguments, tuned, least_capability=FP8_CAPABILITY)


def fault(device: torch.device, dtype: torch.dtype) -> str | None:
    """What is wrong with such products of rows of `dtype` on `device`; None if nothing is. Never raises."""
    rows, columns, outputs = _TRIED
    generator = torch.Generator().manual_seed(0)
    try:
        x = torch.randn(rows, columns, generator=generator).to(device, dtype)
        made = quantize_fp8(torch.randn(outputs, columns, generator=generator).to(device))
        out, steps = fp8_rows_steps(x, Fp8RowsWeight(*made.tensors), None)
        for step in steps:
            step.run()
        rounded = quantize_fp8(x)
        exact = rounded.dequantize(torch.float64) @ made.dequantize(torch.float64).t()
        error = float((out.double() - exact).norm() / exact.norm())
        return None if error <= _NEAR else f"its relative error is {error:.3g}"
    except Exception as error:  # of the driver, torch or the compiler
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def launches(shape: ModelShape, dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
    """What `kernels/inspect.py` compiles."""
    for label, columns in (("hidden", shape.hidden_size), ("gates", shape.intermediate_size)):
        values, scales = meta(512, columns, dtype=FP8), meta(512, 1, dtype=torch.float32)
        yield label, fp8_rows_launch(meta(512, columns, dtype=dtype), values, scales)


@triton.jit(**NOT_SPECIALIZED)
def _fp8_rows_kernel(
    x_ptr,
    x_stride,
    values_ptr,
    scales_ptr,
    num_rows_ptr,
    total_rows,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    if row >= live_rows(num_rows_ptr, total_rows):
        return
    largest = tl.zeros((BLOCK_K,), tl.float32)
    for start in range(0, K, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + row * x_stride + columns, mask=columns < K, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
    scale = tl.maximum(tl.max(largest, 0), _SMALLEST) / _LARGEST
    tl.store(scales_ptr + row, scale)
    for start in range(0, K, BLOCK_K):  # once more, from the cache: whole rows spill with Triton 3.6
        columns = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + row * x_stride + columns, mask=columns < K, other=0.0).to(tl.float32)
        tl.store(values_ptr + row * K + columns, (x / scale).to(values_ptr.dtype.element_ty), mask=columns < K)
