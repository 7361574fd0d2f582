"""Rows of which tokens are drawn, and when two draws of them are the same."""

import torch
from torch import Tensor

from d3engine.kernels.sampling import SamplingRows


def rows_like(temperature: list[float], device: torch.device, step: int = 0) -> tuple[SamplingRows, Tensor]:
    """A row for each temperature, with seeds of all sizes, and their steps."""
    count = len(temperature)
    seeds = torch.tensor([(0x9E3779B97F4A7C15 * (row + 1)) % 2**63 for row in range(count)], device=device)
    indices = torch.arange(count, device=device) % 64
    rows = SamplingRows(torch.tensor(temperature, dtype=torch.float32, device=device), seeds, indices)
    return rows, torch.arange(count, device=device) * 3 + step


def assert_same_choice(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(found[0], expected[0])
    assert [out.dtype for out in found] == [torch.int64, torch.float32]
    torch.testing.assert_close(found[1], expected[1], rtol=2e-6, atol=2e-6, equal_nan=True)
