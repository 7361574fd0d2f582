"""The block pool and the cache: arrays against the usual way, one Python object a block."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from d3engine.scheduling.kv_cache import BlockPool, KVCache

NUM_BLOCKS = 65536
COUNTS = [1, 32, 8192]
"""Blocks at once: one layer of one sequence, all layers of one, all layers of 256."""


class QueuePool:
    """The rival: a queue of free ids and a list of reference counts, block by block."""

    def __init__(self, num_blocks: int) -> None:
        self.ref_counts = [0] * (num_blocks + 1)
        self.free = deque(range(1, num_blocks + 1))

    def allocate(self, count: int) -> list[int]:
        blocks = [self.free.popleft() for _ in range(count)]
        for block in blocks:
            self.ref_counts[block] = 1
        return blocks

    def release(self, blocks: list[int]) -> None:
        for block in blocks:
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free.append(block)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("pool", [BlockPool, QueuePool])
def test_allocate_and_release(benchmark: BenchmarkFixture, pool: type[Any], count: int) -> None:
    benchmark.group = f"allocate and release {count} blocks"
    own = pool(NUM_BLOCKS)
    benchmark(lambda: own.release(own.allocate(count)))


@pytest.mark.benchmark(group="one new block for each layer of 256 sequences x 32 layers")
def test_grow(benchmark: BenchmarkFixture) -> None:
    cache = KVCache(num_layers=32, num_blocks=NUM_BLOCKS, block_size=16, max_sequences=256, max_length=64)
    slots = np.array([cache.open() for _ in range(256)])
    everywhere = np.ones((256, 32), dtype=bool)

    def setup() -> None:
        for slot in slots:
            cache.free_layers(int(slot), np.arange(32))

    def grow() -> None:
        cache.grow(slots, cache.missing(slots, np.full(256, 16), everywhere))

    benchmark.pedantic(grow, setup=setup, rounds=50, warmup_rounds=5)


@pytest.mark.benchmark(group="layers that fall asleep give back 64 blocks each")
@pytest.mark.parametrize("num_layers", [1, 13])
def test_free_layers(benchmark: BenchmarkFixture, num_layers: int) -> None:
    cache = KVCache(num_layers=32, num_blocks=NUM_BLOCKS, block_size=16, max_sequences=1, max_length=1024)
    slots = np.array([cache.open()])
    everywhere = np.ones((1, 32), dtype=bool)
    layers = np.arange(32 - num_layers, 32)

    def setup() -> None:
        cache.grow(slots, cache.missing(slots, np.array([1024]), everywhere))

    benchmark.pedantic(lambda: cache.free_layers(0, layers), setup=setup, rounds=200, warmup_rounds=10)
