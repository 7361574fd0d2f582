"""Products that are left to torch: those of many rows, for which the matrix library has every way to use the device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from d3engine.kernels.matrices import Weight
from d3engine.kernels.quantized import Fp8RowsWeight
from d3engine.kernels.triton.fp8_rows import fp8_rows_steps
from d3engine.kernels.triton.operations import Step, TorchCall
from d3engine.kernels.triton.unpack import unpack_steps

_REDUCED = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
_settings_lock = threading.Lock()
_found: list[list[bool]] = []
"""What these settings were before, for each thread that needs them off."""


def matmul(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """`x` [T, K] times `weight` [N, K] transposed, plus `bias` [N]: torch's product, for many rows."""
    out, steps = matmul_steps(x, weight, bias)
    for step in steps:
        step.run()
    return out


def matmul_steps(x: Tensor, weight: Weight, bias: Tensor | None = None) -> tuple[Tensor, list[Step]]:
    """The result of `matmul`, and the steps that compute it."""
    if isinstance(weight, Fp8RowsWeight):
        return fp8_rows_steps(x, weight, bias)
    matrix, steps = unpack_steps(weight, x.dtype)
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    return out, [*steps, TorchCall(_multiply_into, (out, x, matrix, bias))]


def add_matmul_steps(target: Tensor, x: Tensor, weight: Weight, bias: Tensor | None) -> list[Step]:
    """Add `x` [T, K] times `weight` [N, K] transposed, and `bias` [N], to `target` [T, N], in place."""
    if isinstance(weight, Fp8RowsWeight):
        product, steps = fp8_rows_steps(x, weight, bias)
        return [*steps, TorchCall(_add_onto, (target, product))]
    matrix, steps = unpack_steps(weight, x.dtype)
    return [*steps, TorchCall(_multiply_onto, (target, x, matrix, bias))]


def _multiply_into(out: Tensor, x: Tensor, matrix: Tensor, bias: Tensor | None) -> None:
    with float32_sums():
        if bias is None:
            torch.mm(x, matrix.t(), out=out)
        else:
            torch.addmm(bias, x, matrix.t(), out=out)


def _multiply_onto(target: Tensor, x: Tensor, matrix: Tensor, bias: Tensor | None) -> None:
    with float32_sums():
        target.addmm_(x, matrix.t())
    if bias is not None:
        target.add_(bias)


def _add_onto(target: Tensor, product: Tensor) -> None:
    target.add_(product)


@contextmanager
def float32_sums() -> Iterator[None]:
    """Within it the matrix library keeps the sums of half precision in float32 to the end, as all kernels here do.

    torch lets it add up parts of a long sum in half precision by default. Its settings are the process's: of several
    threads the last one puts them back.
    """
    settings = torch.backends.cuda.matmul
    with _settings_lock:
        _found.append(_found[0] if _found else [getattr(settings, name) for name in _REDUCED])
        for name in _REDUCED:
            setattr(settings, name, False)
    try:
        yield
    finally:
        with _settings_lock:
            found = _found.pop()
            if not _found:
                for name, value in zip(_REDUCED, found, strict=True):
                    setattr(settings, name, value)
