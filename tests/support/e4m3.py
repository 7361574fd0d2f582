"""8-bit floats from their definition: a sign, four bits of exponent, three of mantissa (arXiv 2209.05433, table 1)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

E4M3 = sorted(
    {mantissa / 8 * 2.0**-6 for mantissa in range(8)}
    | {(1 + mantissa / 8) * 2.0 ** (exponent - 7) for exponent in range(1, 16) for mantissa in range(8)}
)[:-1]
"""All magnitudes; the pattern above the last one is NaN."""


def nearest(values: Tensor) -> Tensor:
    """The value of E4M3 nearest to each of float32 `values`, of two equally near the one of even mantissa."""
    table = torch.tensor(E4M3, dtype=torch.float64)
    distances = (values.double().abs().unsqueeze(-1) - table).abs()
    least = distances.min(dim=-1, keepdim=True).values
    is_even = torch.arange(len(E4M3)) % 2 == 0
    chosen = ((distances == least).double() + 0.5 * is_even * (distances == least)).argmax(dim=-1)
    return table[chosen].float().copysign(values)


def kept(heads: Tensor) -> Tensor:
    """What is left of float32 `heads` [..., D] where each is held in E4M3 by a scale of its own."""
    scales = heads.abs().amax(dim=-1, keepdim=True) / E4M3[-1]
    return nearest(heads / scales) * scales


@contextmanager
def sums_of_doubles() -> Iterator[None]:
    """PyTorch's sums in float64, rounded once: no order of them chooses another of 8-bit values."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("linear", "scaled_dot_product_attention", "silu"):
            patch.setattr(F, name, _rounded_once(getattr(F, name)))
        patch.setattr(Tensor, "addmm_", lambda out, x, matrix: out.copy_(_rounded_once(torch.addmm)(out, x, matrix)))
        yield


def _rounded_once(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def of_doubles(x: Tensor, *others: Tensor | None, **options: Any) -> Tensor:
        doubles = [None if other is None else other.double() for other in others]
        return product(x.double(), *doubles, **options).to(x.dtype)

    return of_doubles
