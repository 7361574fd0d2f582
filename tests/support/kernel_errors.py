"""How far results of the Triton kernels may lie from float64, and what their tests compare them with."""

import torch
from torch import Tensor

EPS = 1e-5
# About twice what was measured. Half precision: one rounding of the result, and one of the normed row where products
# run on tensor cores. Casts to bfloat16 truncate in the interpreter; a GPU rounds, and its errors are half of these.
LIMITS = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 1e-2}


def relative_error(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def assert_close(out: Tensor, expected: Tensor, limit: float | None = None) -> None:
    assert out.shape == expected.shape
    error = relative_error(out, expected)
    assert error < (limit or LIMITS[out.dtype]), f"relative error {error:.2e}"


def normed(hidden: Tensor, weight: Tensor) -> Tensor:
    wide = hidden.double()
    return wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


def row_count(value: int, device: torch.device) -> Tensor:
    return torch.tensor([value], dtype=torch.int32, device=device)
