"""Triton's kernels over a pool of 8-bit entries: the reference's bytes are written, and what it reads is read."""

import importlib
import math
from typing import Any

import pytest
import torch
from kernel_errors import relative_error
from paged_entries import Paged
from torch import Tensor

import d3engine.kernels.triton as kernels
from d3engine.kernels import kv_pool, reference
from d3engine.kernels.kv_pool import FP8, Fp8Pool

attention: Any = importlib.import_module("d3engine.kernels.triton.paged_attention")

EPS = 1e-5
ERRORS = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}


def poisoned(blocks: int, size: int, kv_heads: int, channels: int, device: torch.device) -> Fp8Pool:
    """Values and scales are NaN, wherever nothing is written."""
    values = torch.full((blocks, 2, size, kv_heads, channels), 0x7F, dtype=torch.uint8, device=device)
    return Fp8Pool(values.view(FP8), torch.full((blocks, 2, kv_heads, size), math.nan, device=device))


def same_bytes(one: Fp8Pool, other: Fp8Pool) -> bool:
    values = torch.equal(one.values.view(torch.uint8), other.values.view(torch.uint8))
    return values and torch.equal(one.scales.view(torch.int32), other.scales.view(torch.int32))


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- writing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "channels", "has_head_norms"),
    [(1, 4, 2, 16, False), (5, 2, 2, 6, True), (3, 3, 1, 48, False), (18, 4, 4, 16, False), (300, 2, 1, 16, True)],
)
def test_keys_and_values_are_written_as_by_the_reference(
    rows: int, heads: int, kv_heads: int, channels: int, has_head_norms: bool, device: torch.device
) -> None:
    """Keys and values are written as the reference writes them and nothing else."""
    width, live = 48, max(1, rows - 2)
    hidden, norm = numbers(rows, width) * 3, numbers(width, seed=1)
    weight = numbers((heads + 2 * kv_heads) * channels, width, seed=2) * 0.2
    weight[heads * channels :: channels] *= 30  # a channel of each key and value that stands out
    head_norms = numbers(2, channels, seed=3) if has_head_norms else None
    rotations = torch.polar(torch.ones(rows, channels // 2), numbers(rows, channels // 2, seed=4) * 50)
    keys = (torch.arange(rows).flip(0) + 1) * 8 + torch.arange(rows) % 4
    entries = torch.stack((keys, keys + 4), dim=1)
    bias = numbers(weight.shape[0], seed=5) if kv_heads == 1 else None
    count = torch.tensor([live], dtype=torch.int32)
    pools, queries = [], []
    for module in (kernels, reference):
        pool = poisoned(rows + 1, 4, kv_heads, channels, device)
        given = [None if one is None else one.to(device) for one in (bias, rotations)]
        options: Any = {
            "head_norms": None if head_norms is None else head_norms.to(device),
            "num_rows": count.to(device),
        }
        arguments = hidden.to(device), norm.to(device), EPS, weight.to(device), *given, pool, entries.to(device), heads
        queries.append(module.qkv(*arguments, **options)[:live])
        pools.append(pool)
    torch.testing.assert_close(*queries, rtol=1e-4, atol=1e-4)
    found, wanted = pools
    assert torch.equal(found.scales.isnan(), wanted.scales.isnan())
    torch.testing.assert_close(found.scales, wanted.scales, rtol=1e-5, atol=0, equal_nan=True)
    written = torch.equal(found.values.isnan(), wanted.values.isnan())
    differing = (found.values.view(torch.uint8) != wanted.values.view(torch.uint8)).float().mean()
    assert written
    assert differing < 1e-3, "sums that differ in their last bits are rounded apart now and then"


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_head_of_zeros_and_one_not_finite_stay_as_they_are(device: torch.device) -> None:
    """A head of zeros and one that is not finite stay what they are."""
    rows, channels = 2, 16
    hidden, weight = numbers(rows, 32).to(device), numbers(4 * channels, 32, seed=1).to(device)
    weight[2 * channels : 3 * channels] = 0.0  # the key
    bias = torch.zeros(4 * channels, device=device)
    bias[3 * channels] = math.inf  # a channel of the value
    pool = poisoned(2, 4, 1, channels, device)
    entries = torch.tensor([[8, 12], [9, 13]], device=device)
    rotations = torch.ones(rows, channels // 2, dtype=torch.complex64, device=device)
    kernels.qkv(hidden, torch.ones(32, device=device), EPS, weight, bias, rotations, pool, entries, 2)
    keys, values = kv_pool.read_blocks(pool, torch.tensor([2, 3], device=device), torch.float32)
    assert not keys[:2].any()
    assert bool(values[:2].isnan().any(dim=-1).all())


def test_copies_are_those_of_the_reference_to_the_bit(device: torch.device) -> None:
    pools = []
    for module in (kernels, reference):
        pool = poisoned(4, 8, 3, 10, device)
        kv_pool.write_entries(pool, torch.arange(0, 64, 3, device=device), numbers(22, 3, 10).to(device))
        source, target = (torch.tensor(places, device=device) for places in ([3, 3, 21, 9], [1, 62, 40, 50]))
        module.copy_entries(pool, source, target, num_rows=torch.tensor([3], dtype=torch.int32, device=device))
        pools.append(pool)
    assert same_bytes(*pools)
    assert not pools[0].scales.isnan()[0, 0, :, 1].any()


# -- reading ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "kv_heads", "channels", "size", "dtype"),
    [
        (2, 2, 32, 16, torch.float32),
        (4, 2, 16, 4, torch.float32),
        (6, 1, 24, 64, torch.float32),
        (2, 2, 16, 16, torch.bfloat16),
        (4, 2, 32, 16, torch.bfloat16),
        (4, 2, 16, 16, torch.float16),
    ],
)
def test_single_rows_and_chunks_attend_to_stored_values(
    heads: int, kv_heads: int, channels: int, size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Single rows and chunks attend to the values that stand there."""
    sizes: Any = {"heads": heads, "kv_heads": kv_heads, "channels": channels, "block_size": size}
    # A row of two splits, a chunk, and a short row.
    paged = Paged([attention.SPLIT + 6, 5, 21], [1, 5, 1], **sizes, dtype=dtype, device=device)
    pool = poisoned(len(paged.pool), size, kv_heads, channels, device)
    for table, entries in zip(paged.tables.cpu(), paged.entries, strict=True):
        # Magnitudes that differ between heads, positions, keys and values, as scales are there to tell.
        positions = torch.arange(entries.shape[1])
        entries *= torch.tensor([2 / 3, 0.01])[:, None, None, None] * (1 + positions % 7)[:, None, None]
        entries[1, :, 0] *= 0.01
        for half, written in enumerate(entries):
            places = (table[positions // size] * 2 + half) * size + positions % size
            kv_pool.write_entries(pool, places.to(device), written.float().to(device))
            blocks = (2 * table[: -(-len(positions) // size)] + half).to(device)
            written.copy_(kv_pool.read_blocks(pool, blocks, torch.float32).flatten(0, 1)[: len(positions)])
    paged.pool = pool
    found, expected = (out.view(7, heads, channels) for out in (paged.attend(kernels).cpu(), paged.expected()))
    for head in range(heads):  # of very different size
        assert relative_error(found[:, head], expected[:, head]) < ERRORS[dtype]


def test_products_in_float32_are_tiled_as_without_eight_bits() -> None:
    """Their operands are what fills the registers, however few bytes are read."""
    queries = torch.empty(1, 4, 16)
    assert attention._element_size(queries, poisoned(1, 4, 2, 16, torch.device("cpu"))) == 4
    assert attention._element_size(queries.bfloat16(), poisoned(1, 4, 2, 16, torch.device("cpu"))) == 1
