"""Copy-on-skip: the entry of the nearest layer below that ran stands for the entry of a skipped layer.

A block that starts while its layer sleeps is not filled but *aliased*: the layer's table names the block of the layer
it would copy from (keys are stored after RoPE, at the same position, so an alias is exact). Inside a block that the
layer owns, the one entry is copied. Layers may share a block only while they would hold the same entries; when one of
them wakes, or would copy from elsewhere, it first takes a block of its own (copy-on-write).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from d3engine.cache.kv_cache import IntArray, KVCache


@dataclass(slots=True)
class EntryCopies:
    """Ranges of entries to copy, as flat key entries: [n] sources and targets; values follow at + block_size."""

    sources: list[IntArray] = field(default_factory=list)
    targets: list[IntArray] = field(default_factory=list)

    def add(self, cache: KVCache, source: int, target: int, start: int, stop: int) -> None:
        """Copy the entries at offsets [start, stop) of block `source` to block `target`, keys and values."""
        keys = np.arange(start, stop)
        offsets = np.concatenate((keys, keys + cache.block_size))
        self.sources.append(source * 2 * cache.block_size + offsets)
        self.targets.append(target * 2 * cache.block_size + offsets)

    def arrays(self) -> tuple[IntArray, IntArray] | None:
        """All sources and targets as int64, or None when there is nothing to copy."""
        if not self.sources:
            return None
        return np.concatenate(self.sources), np.concatenate(self.targets)


def nearest_below(active: npt.NDArray[np.bool_]) -> IntArray:
    """For each layer the layer whose entry it holds: itself when it runs, else the nearest below that does."""
    layers = np.where(active, np.arange(active.size), -1)
    return np.maximum.accumulate(layers)


def most_blocks_needed(cache: KVCache, slot: int, start: int, stop: int) -> int:
    """An upper bound of the new blocks `fill` takes for positions [start, stop): one per layer for every block that
    starts, and one for each layer that shares the block begun before."""
    begun = cache.blocks_for(start)
    needed = (cache.blocks_for(stop) - begun) * cache.num_layers
    if start % cache.block_size:
        needed += cache.num_layers - np.unique(cache.tables[slot, :, begun - 1]).size
    return int(needed)


def fill(
    cache: KVCache,
    slot: int,
    start: int,
    stop: int,
    active: npt.NDArray[np.bool_],
    before: EntryCopies,
    after: EntryCopies,
) -> None:
    """Give every layer of `slot` its entries at positions [start, stop), which the `active` layers compute.

    Appends to `before` what must be copied before the step writes (copy-on-write), and to `after` what is copied from
    what it has written.
    """
    roots = nearest_below(active)
    size = cache.block_size
    for block in range(start // size, cache.blocks_for(stop)):
        low, high = max(start, block * size), min(stop, (block + 1) * size)
        if low == block * size:
            _begin_block(cache, slot, block, active, roots)
        else:
            _split_shared(cache, slot, block, roots, low - block * size, before)
            _copy_entries(cache, slot, block, roots, low - block * size, high - block * size, after)


def _begin_block(cache: KVCache, slot: int, block: int, active: npt.NDArray[np.bool_], roots: IntArray) -> None:
    """New blocks for the layers that run, aliases for those that sleep."""
    running, sleeping = np.flatnonzero(active), np.flatnonzero(~active)
    cache.tables[slot, running, block] = cache.pool.allocate(running.size)
    aliases = cache.tables[slot, roots[sleeping], block]
    cache.tables[slot, sleeping, block] = aliases
    cache.pool.retain_mentions(aliases)
    cache.num_blocks[slot] = block + 1


def _split_shared(cache: KVCache, slot: int, block: int, roots: IntArray, filled: int, before: EntryCopies) -> None:
    """Part the layers that share a block but will hold different entries from here on.

    Those with the lowest root keep the block; each other root takes a copy of what it holds so far.
    """
    column = cache.tables[slot, :, block]
    for shared in np.unique(column):
        layers = np.flatnonzero(column == shared)
        for root in np.unique(roots[layers])[1:]:
            parting = layers[roots[layers] == root]
            (own,) = cache.pool.allocate(1)
            before.add(cache, int(shared), int(own), 0, filled)
            cache.tables[slot, parting, block] = own
            cache.pool.retain_mentions(np.repeat(own, parting.size - 1))
            cache.pool.release(np.repeat(shared, parting.size))


def _copy_entries(
    cache: KVCache, slot: int, block: int, roots: IntArray, low: int, high: int, after: EntryCopies
) -> None:
    """Fill [low, high) of every block that no running layer writes from the block of its root."""
    column = cache.tables[slot, :, block]
    for target in np.unique(column):
        root = roots[np.flatnonzero(column == target)[0]]
        if column[root] != target:
            after.add(cache, int(column[root]), int(target), low, high)
