"""How far results of the Triton kernels may lie from float64, and what their tests compare them with."""

import torch
from fixture_types import Randn
from torch import Tensor

EPS = 1e-5
# About twice what was measured. Half precision: one rounding of the result, and one of the normed row where products
# run on tensor cores. Casts to bfloat16 truncate in the interpreter; a GPU rounds, and its errors are half of these.
LIMITS = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 1e-2}


def relative_error(out: Tensor, expected: Tensor) -> float:
    assert out.shape == expected.shape
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def assert_close(out: Tensor, expected: Tensor, limit: float | None = None) -> None:
    error = relative_error(out, expected)
    assert error < (limit or LIMITS[out.dtype]), f"relative error {error:.2e}"


def normed(hidden: Tensor, weight: Tensor) -> Tensor:
    wide = hidden.double()
    return wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


def row_count(value: int, device: torch.device) -> Tensor:
    return torch.tensor([value], dtype=torch.int32, device=device)


def qkv_targets(
    rows: int, kv_heads: int, channels: int, dtype: torch.dtype, randn: Randn
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotations of any angle, a pool of NaN, and an entry of it for each row's key and value."""
    angles = randn(rows, channels // 2, dtype=torch.float32, scale=50.0)
    device = angles.device
    pool = torch.full((rows + 1, 2, 4, kv_heads, channels), torch.nan, dtype=dtype, device=device)
    keys = (torch.arange(rows, device=device).flip(0) + 1) * 8 + torch.arange(rows, device=device) % 4
    # As the executor cuts them: one layer's entries out of those of all layers.
    entries = torch.stack((keys, keys + 4), dim=1).repeat(3, 1, 1)[1]
    return torch.polar(torch.ones_like(angles), angles), pool, entries


def heads_of(
    projected: Tensor, rotations: Tensor, heads: int, kv_heads: int, head_norms: Tensor | None = None
) -> Tensor:
    """The heads [T, N + 2 M, D] of projections [T, (N + 2 M) D] in float64: queries and keys normed and rotated."""
    made = projected.view(projected.shape[0], heads + 2 * kv_heads, -1)
    if head_norms is not None:
        for part, norm in zip(made.split((heads, kv_heads, kv_heads), dim=1), head_norms, strict=False):
            part.copy_(normed(part, norm))
    turned = torch.view_as_complex(made.unflatten(2, (-1, 2))) * rotations.to(torch.complex128)[:, None]
    found = torch.view_as_real(turned).flatten(2)
    found[:, heads + kv_heads :] = made[:, heads + kv_heads :]
    return found


def assert_heads(queries: Tensor, pool: Tensor, entries: Tensor, expected: Tensor, limit: float) -> None:
    """The heads that QKV returns, and those that it writes to its entries."""
    heads, flat = queries.shape[1], pool.view(-1, *pool.shape[3:])
    stored = expected[:, heads:].chunk(2, dim=1)
    assert_close(queries, expected[:, :heads], limit)
    assert_close(flat[entries[:, 0]], stored[0], limit)
    assert_close(flat[entries[:, 1]], stored[1], limit)
