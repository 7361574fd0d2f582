"""Products that are left to torch: those of many rows, for which the matrix library has every way to use the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from d3engine.kernels.quantized import Weight
from d3engine.kernels.triton.unpack import unpack

_REDUCED = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


def matmul(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """`x` [T, K] times `weight` [N, K] transposed, plus `bias` [N]: torch's product, for many rows."""
    with float32_sums():
        return F.linear(x, unpack(weight, x.dtype), bias)


def add_matmul_(target: Tensor, x: Tensor, weight: Weight) -> None:
    """Add `x` [T, K] times `weight` [N, K] transposed to `target` [T, N], in place."""
    with float32_sums():
        target.addmm_(x, unpack(weight, x.dtype).t())


@contextmanager
def float32_sums() -> Iterator[None]:
    """Within it the matrix library keeps the sums of half precision in float32 to the end, as all kernels here do.

    torch lets it add up parts of a long sum in half precision, if nobody says otherwise.
    """
    settings = torch.backends.cuda.matmul
    before = [(name, getattr(settings, name)) for name in _REDUCED]
    for name in _REDUCED:
        setattr(settings, name, False)
    try:
        yield
    finally:
        for name, value in before:
            setattr(settings, name, value)
