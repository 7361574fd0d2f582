"""The paged KV cache as numbers: which block holds which entries, who else holds it, and when it is free again.

A block is `block_size` KV entries of ONE layer of one sequence; the pool does not know which layer owns it. A sequence
has a slot, and the slot a table `[L, max_blocks]` of block ids, so that a layer that has fallen asleep gives its
blocks back alone. Everything here is numpy; the tensor behind the ids belongs to the executor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.integer]

NO_BLOCK = 0
"""The id that stands where a table has no block. It is never handed out, so it is always safe to read."""


class BlockPool:
    """Block ids 1 .. num_blocks, each free or held, with a reference count.

    Blocks are handed out and taken back as arrays: the free ids are the first `num_free` of one stack.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.ref_counts = np.zeros(num_blocks + 1, dtype=np.int32)
        self._free = np.arange(num_blocks, 0, -1, dtype=np.int32)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free

    def allocate(self, count: int) -> IntArray:
        """Take `count` blocks, each with one reference; the caller has made sure that they are there."""
        assert count <= self.num_free, "allocate() without room: reserve() comes first"
        self.num_free -= count
        blocks = self._free[self.num_free : self.num_free + count].copy()
        self.ref_counts[blocks] = 1
        return blocks

    def retain(self, blocks: IntArray) -> None:
        """Add one reference to each of `blocks`, none of which is named twice."""
        self.ref_counts[blocks] += 1

    def retain_mentions(self, blocks: IntArray) -> None:
        """Add one reference for every mention in `blocks`; a block may be mentioned more than once.

        `np.add.at` lets other threads of Python run, and then waits for them: not for what every request does.
        """
        np.add.at(self.ref_counts, blocks, 1)

    def release(self, blocks: IntArray) -> None:
        """Take one reference back for every mention in `blocks`, and free blocks without references."""
        if (self.ref_counts[blocks] == 1).all():  # then none is mentioned twice
            freed = blocks
            self.ref_counts[blocks] = 0
        else:
            blocks, mentions = np.unique(blocks, return_counts=True)
            self.ref_counts[blocks] -= mentions.astype(np.int32)
            freed = blocks[self.ref_counts[blocks] == 0]
        self._free[self.num_free : self.num_free + freed.size] = freed
        self.num_free += freed.size

    def check_integrity(self, mentions: IntArray) -> None:
        """Assert that the counts equal `mentions` (references by block id) and that free and held blocks add up."""
        free = self._free[: self.num_free]
        assert np.array_equal(self.ref_counts, mentions), "a reference count differs from what names the block"
        assert np.unique(free).size == free.size, "a block stands twice in the free list"
        assert not self.ref_counts[free].any(), "a free block is still named"
        assert self.num_free + np.count_nonzero(self.ref_counts) == self.num_blocks, "a block was lost"


class KVCache:
    """The block tables of all running sequences over one pool.

    `tables` [max_sequences, L, max_blocks] int32 holds block ids, NO_BLOCK beyond what a layer has; `num_blocks`
    [max_sequences, L] counts them. A layer's entries are contiguous from position 0; but the first `num_behind`
    [max_sequences, L] of its blocks lie behind its window, and are given back already.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        max_sequences: int,
        max_length: int,
        windows: Sequence[int | None] = (),
    ) -> None:
        """`windows`: the tokens that one attends to at most, itself included, in each layer; empty: all in all."""
        self.num_layers = num_layers
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        max_blocks = -(-max_length // block_size)
        self.tables = np.zeros((max_sequences, num_layers, max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros((max_sequences, num_layers), dtype=np.int32)
        self.num_behind = np.zeros((max_sequences, num_layers), dtype=np.int32)
        self.has_windows = any(windows)
        self.windows = np.array([window or max_length for window in windows or [None] * num_layers])
        self._free_slots = list(range(max_sequences - 1, -1, -1))

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def num_held(self, slot: int) -> int:
        """Blocks that the layers of a slot hold; one that several share counts for each."""
        return int((self.num_blocks[slot] - self.num_behind[slot]).sum())

    def blocks_for(self, length: int) -> int:
        """Blocks that ONE layer needs for `length` entries."""
        return -(-length // self.block_size)

    def open(self) -> int:
        """Return an empty slot for a sequence."""
        return self._free_slots.pop()

    def close(self, slot: int) -> None:
        """Give back all blocks of a slot, and the slot."""
        self.free_layers(slot, slice(None))
        self._free_slots.append(slot)

    def share(self, slot: int, blocks: IntArray) -> None:
        """Begin an empty slot with `blocks` [n, L], if any, that another sequence has computed."""
        if count := blocks.shape[0]:
            self.tables[slot, :, :count] = blocks.T
            self.num_blocks[slot] = count
            self.pool.retain(blocks.ravel())

    def missing(self, slots: IntArray, lengths: IntArray, active: npt.NDArray[np.bool_]) -> IntArray:
        """Blocks [C, L] that each active layer lacks for its slot to hold `lengths` [C] entries; `active` [C, L]."""
        wanted = (lengths + (self.block_size - 1)) // self.block_size
        lacking: IntArray = (wanted[:, None] - self.num_blocks[slots]) * active
        return np.maximum(lacking, 0, out=lacking)  # a rejected draft leaves more than is wanted

    def grow(self, slots: IntArray, missing: IntArray) -> None:
        """Append `missing` [C, L] new blocks to the layers of `slots` [C]."""
        lacking = missing.ravel().nonzero()[0]
        if not lacking.size:
            return
        # One index into the flat arrays is found much sooner than two or three into their dimensions.
        num_blocks, tables = self.num_blocks.reshape(-1), self.tables.reshape(-1)
        layers = slots[lacking // self.num_layers] * self.num_layers + lacking % self.num_layers
        counts = missing.ravel()[lacking]
        held = num_blocks[layers]
        num_blocks[layers] = held + counts
        ends = counts.cumsum()
        firsts = layers * self.tables.shape[2] + held
        places = (firsts - ends + counts).repeat(counts) + np.arange(ends[-1])
        tables[places] = self.pool.allocate(places.size)

    def free_layers(self, slot: int, layers: IntArray | slice) -> None:
        """Give back every block that `layers` of `slot` hold, the prompt's as well."""
        held = int(self.num_blocks[slot, layers].max(initial=0))
        named = self.tables[slot, layers, :held]
        self.pool.release(named[named != NO_BLOCK])
        self.tables[slot, layers, :held] = NO_BLOCK
        self.num_blocks[slot, layers] = 0
        self.num_behind[slot, layers] = 0

    def free_behind(self, slots: IntArray, positions: IntArray) -> None:
        """Give back the blocks of windows that no row of `slots` [C] from `positions` [C] on attends to."""
        behind = np.minimum((positions[:, None] + 1 - self.windows) // self.block_size, self.num_blocks[slots])
        for chunk, layer in np.argwhere(behind > self.num_behind[slots]).tolist():
            slot, stop = int(slots[chunk]), int(behind[chunk, layer])
            blocks = self.tables[slot, layer, self.num_behind[slot, layer] : stop]
            self.pool.release(blocks)
            blocks[:] = NO_BLOCK
            self.num_behind[slot, layer] = stop

    def mentions(self) -> IntArray:
        """How often the tables name each block id, [num_blocks + 1]."""
        counts = np.bincount(self.tables.ravel(), minlength=self.pool.num_blocks + 1)
        counts[NO_BLOCK] = 0
        return counts

    def check_integrity(self, elsewhere: IntArray | None = None) -> None:
        """Assert the cache's invariants; `elsewhere` counts the references that others (the prefix cache) hold."""
        mentions = self.mentions() if elsewhere is None else self.mentions() + elsewhere
        self.pool.check_integrity(mentions)
        blocks = np.arange(self.tables.shape[2])
        held = (blocks < self.num_blocks[:, :, None]) & (blocks >= self.num_behind[:, :, None])
        assert np.array_equal(self.tables != NO_BLOCK, held), "a table has a hole, or a block beyond its count"
        assert (self.num_behind <= self.num_blocks).all(), "more blocks were given back than there were"
        assert not self.num_blocks[self._free_slots].any(), "a closed slot still holds blocks"


FlatCopies: TypeAlias = tuple[IntArray, IntArray] | None
"""Flat sources and targets of entries to copy, int64; None when there is nothing to copy."""


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

    def arrays(self) -> FlatCopies:
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
