"""A pool of 8-bit entries against arithmetic on single numbers: what is kept, what is copied, what a NaN spoils."""

from math import inf, nan

import pytest
import torch
from e4m3 import E4M3, nearest
from torch import Tensor

from d3engine.kernels import kv_pool, reference
from d3engine.kernels.kv_pool import FP8, LARGEST, Fp8Pool

BLOCKS, SIZE, HEADS, CHANNELS = 5, 4, 3, 6


def empty_pool() -> Fp8Pool:
    """Whatever memory holds: bytes that mean NaN, and scales to match."""
    values = torch.full((BLOCKS, 2, SIZE, HEADS, CHANNELS), 0x7F, dtype=torch.uint8).view(FP8)
    return Fp8Pool(values, torch.full((BLOCKS, 2, HEADS, SIZE), nan))


def entry(pool: Fp8Pool, flat: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The entry [M, D] at a flat index."""
    half, offset = divmod(flat, SIZE)
    return kv_pool.read_blocks(pool, torch.tensor([half]), dtype)[0, offset]


def some_heads(count: int) -> Tensor:
    """Heads [count, M, D] of very different magnitudes, with outliers."""
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(count, HEADS, CHANNELS, generator=generator)
    heads *= torch.tensor([1e-6, 1.0, 3e4])[:, None]
    heads[:, :, 2] *= 40
    return heads


def test_the_largest_value_is_the_one_that_scales_are_made_for() -> None:
    assert E4M3[-1] == LARGEST == torch.finfo(FP8).max


def test_value_is_the_nearest_multiple_of_its_heads_scale() -> None:
    """Each value is the nearest multiple of its head's scale."""
    heads, pool = some_heads(4), empty_pool()
    places = [3, 17, 8, 30]
    kv_pool.write_entries(pool, torch.tensor(places), heads)
    for flat, written in zip(places, heads, strict=True):
        for head, row in enumerate(written):
            scale = row.abs().max() / 448.0
            torch.testing.assert_close(entry(pool, flat)[head], nearest(row / scale) * scale, rtol=1e-5, atol=0)


def test_the_largest_of_a_head_is_kept_whatever_stands_beside_it() -> None:
    heads, pool = some_heads(1), empty_pool()
    kv_pool.write_entries(pool, torch.tensor([9]), heads)
    largest = heads[0].abs().amax(dim=1)
    torch.testing.assert_close(entry(pool, 9).abs().amax(dim=1), largest, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_entry_comes_back_in_the_dtype_that_is_asked_for(dtype: torch.dtype) -> None:
    pool, heads = empty_pool(), torch.linspace(-3, 5, HEADS * CHANNELS).view(1, HEADS, CHANNELS)
    kv_pool.write_entries(pool, torch.tensor([4]), heads.to(dtype))
    found = entry(pool, 4, dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), heads[0], rtol=0.08, atol=0.002)


def test_zeros_come_back_as_zeros() -> None:
    pool = empty_pool()
    kv_pool.write_entries(pool, torch.tensor([4]), torch.zeros(1, HEADS, CHANNELS))
    assert torch.equal(entry(pool, 4), torch.zeros(HEADS, CHANNELS))


@pytest.mark.parametrize("broken", [nan, inf, -inf])
def test_value_that_is_not_finite_spoils_its_own_head_alone(broken: float) -> None:
    """A value that is not finite is seen and spoils its own head alone."""
    heads, pool = some_heads(2), empty_pool()
    sound = empty_pool()
    kv_pool.write_entries(sound, torch.tensor([6, 7]), heads)
    heads[0, 1, 3] = broken
    kv_pool.write_entries(pool, torch.tensor([6, 7]), heads)
    assert entry(pool, 6)[1].isnan().any()
    assert torch.equal(entry(pool, 6)[[0, 2]], entry(sound, 6)[[0, 2]])
    assert torch.equal(entry(pool, 7), entry(sound, 7))


def written_pool() -> tuple[Tensor, list[Tensor]]:
    """A pool, and all that was written into its entries."""
    pool = empty_pool()
    kv_pool.write_entries(pool, torch.arange(BLOCKS * 2 * SIZE), some_heads(BLOCKS * 2 * SIZE))
    return pool, [entry(pool, flat) for flat in range(BLOCKS * 2 * SIZE)]


def test_writing_touches_no_other_entry() -> None:
    pool, before = written_pool()
    kv_pool.write_entries(pool, torch.tensor([13]), -some_heads(1))
    for flat, was in enumerate(before):
        assert torch.equal(entry(pool, flat), was) == (flat != 13)


def test_a_copy_is_the_entry_to_the_bit() -> None:
    pool, before = written_pool()
    source, target = torch.tensor([3, 3, 21]), torch.tensor([12, 38, 5])
    reference.copy_entries(pool, source, target, num_rows=torch.tensor([2], dtype=torch.int32))
    moved = {12: 3, 38: 3}
    for flat, was in enumerate(before):
        assert torch.equal(entry(pool, flat), before[moved[flat]] if flat in moved else was)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_a_block_has_the_bytes_that_are_counted_for_it(dtype: torch.dtype) -> None:
    pool = empty_pool() if dtype == FP8 else torch.empty(BLOCKS, 2, SIZE, HEADS, CHANNELS, dtype=dtype)
    assert kv_pool.block_bytes(SIZE, HEADS, CHANNELS, dtype) * BLOCKS == pool.nbytes
