"""Prompt blocks that later prompts may share: the longest known prefix of a prompt need not be computed again.

A logical block is `block_size` tokens of a prompt and the blocks of all L layers that hold their entries. Its key is a
SHA-256 chain over the tokens up to its end, and the tokens are compared on a hit, so that no collision can hand one
user another's cache. A salt begins another chain, whose blocks no other salt finds. Only blocks computed at full depth
come here, which is to say prompt blocks.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from d3engine.scheduling.kv_cache import IntArray, KVCache

Salt: TypeAlias = "str | tuple[int | bytes, Salt] | None"
"""A request's `cache_salt`; or the number of its adapter, or what it is steered by, and that."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A logical block: its key, the key or root before it, its tokens, and its blocks [L]."""

    key: bytes
    parent: bytes
    tokens: bytes
    blocks: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    lasts: bool = True  # whether its salt means the same in another process: it is a text, or there is none


class PrefixCache:
    """Logical blocks by key, the least recently used first; each holds one reference to each of its L blocks."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._entries: OrderedDict[bytes, Prefix] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def keys(self, prompt: IntArray, salt: Salt = None) -> list[bytes]:
        """The keys of the prompt's full blocks, in order, in the chain of `salt`."""
        keys, parent = [], _root(salt)
        for tokens in _full_blocks(prompt, self._cache.block_size):
            parent = hashlib.sha256(parent + tokens).digest()
            keys.append(parent)
        return keys

    def match(self, prompt: IntArray, keys: list[bytes], salt: Salt = None) -> IntArray:
        """Blocks [n, L] of the longest prefix of `prompt` that is known, leaving at least one token to run."""
        size = self._cache.block_size
        found: list[IntArray] = []
        parent = _root(salt)
        for key, tokens in zip(keys, _full_blocks(prompt[: len(prompt) - 1], size), strict=False):
            entry = self._entries.get(key)
            if entry is None or entry.parent != parent or entry.tokens != tokens:
                break
            found.append(entry.blocks)
            parent = key
        self._touch(keys[: len(found)])
        return np.array(found, dtype=np.int32).reshape(len(found), self._cache.num_layers)

    def insert(self, prompt: IntArray, keys: list[bytes], slot: int, start: int, stop: int, salt: Salt = None) -> None:
        """Keep the logical blocks [start, stop) of `prompt`, as `slot` has just computed them at full depth."""
        size = self._cache.block_size
        for index in range(start, stop):
            key = keys[index]
            if key in self._entries:
                continue
            blocks = self._cache.tables[slot, :, index].copy()
            tokens = _as_bytes(prompt[index * size : (index + 1) * size])
            self._cache.pool.retain(blocks)
            parent = keys[index - 1] if index else _root(salt)
            self._entries[key] = Prefix(key, parent, tokens, blocks, not isinstance(salt, tuple))
        self._touch(keys[:stop])

    def _touch(self, keys: list[bytes]) -> None:
        """Mark these as just used, the beginning last: a prefix stays at least as long as what builds on it."""
        for key in reversed(keys):
            if key in self._entries:
                self._entries.move_to_end(key)

    def reserve(self, count: int) -> bool:
        """Make sure that `count` blocks are free, dropping the least recently used prefixes; False if they cannot be.

        A prefix whose every block is in use elsewhere would free nothing, and stays.
        """
        pool = self._cache.pool
        if pool.num_free >= count:
            return True
        for key, entry in list(self._entries.items()):
            if (pool.ref_counts[entry.blocks] == 1).any():
                pool.release(self._entries.pop(key).blocks)
                if pool.num_free >= count:
                    return True
        return False

    def lasting(self) -> list[Prefix]:
        """Those that mean the same in another process, the most recently used first."""
        return [entry for entry in reversed(self._entries.values()) if entry.lasts]

    @property
    def num_layers(self) -> int:
        return self._cache.num_layers

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    @property
    def room(self) -> int:
        """Logical blocks that free blocks would hold."""
        return self._cache.pool.num_free // self._cache.num_layers

    def restore(self, prefix: Prefix) -> IntArray:
        """Take in what another process has computed, while there is `room`; its blocks [L], which are to be filled."""
        blocks = self._cache.pool.allocate(self._cache.num_layers)
        self._entries[prefix.key] = replace(prefix, blocks=blocks)
        return blocks

    def clear(self) -> None:
        """Forget every prefix; sequences that share its blocks keep them."""
        while self._entries:
            self._cache.pool.release(self._entries.popitem()[1].blocks)

    def num_idle_blocks(self) -> int:
        """Blocks that only this cache holds: used by no sequence, and free as soon as they are needed."""
        if not self._entries:
            return 0
        blocks = np.concatenate([entry.blocks for entry in self._entries.values()])
        return int(np.count_nonzero(self._cache.pool.ref_counts[blocks] == 1))

    def mentions(self) -> IntArray:
        """How often this cache names each block id, [num_blocks + 1]."""
        counts = np.zeros(self._cache.pool.num_blocks + 1, dtype=np.int64)
        for entry in self._entries.values():
            np.add.at(counts, entry.blocks, 1)
        return counts


def _root(salt: Salt) -> bytes:
    """What the chain of a salt begins with; it is longer than nothing, so no chain begins like another."""
    if isinstance(salt, tuple):
        key, own = salt
        named = f"adapter {key}".encode() if isinstance(key, int) else b"steer " + key
        return hashlib.sha256(hashlib.sha256(named).digest() + _root(own)).digest()
    return b"" if salt is None else hashlib.sha256(salt.encode("utf-8", "surrogatepass")).digest()


def _full_blocks(prompt: IntArray, size: int) -> list[bytes]:
    return [_as_bytes(prompt[i : i + size]) for i in range(0, len(prompt) - size + 1, size)]


def _as_bytes(tokens: IntArray) -> bytes:
    return np.ascontiguousarray(tokens, dtype="<i4").tobytes()
