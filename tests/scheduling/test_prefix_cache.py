"""Prompts share what they have in common, and nothing else."""

import numpy as np
import pytest

from d3engine.scheduling.kv_cache import IntArray, KVCache
from d3engine.scheduling.prefix_cache import PrefixCache

LAYERS, SIZE = 3, 4


class Cached:
    """A cache whose slots are filled at full depth, as prompts are."""

    def __init__(self, num_blocks: int = 60) -> None:
        self.kv = KVCache(num_layers=LAYERS, num_blocks=num_blocks, block_size=SIZE, max_sequences=4, max_length=64)
        self.prefix = PrefixCache(self.kv)

    def prefill(self, prompt: IntArray) -> int:
        slot = self.kv.open()
        slots, lengths = np.array([slot]), np.array([prompt.size])
        self.kv.grow(slots, self.kv.missing(slots, lengths, np.ones((1, LAYERS), dtype=bool)))
        return slot

    def keep(self, prompt: IntArray, salt: str | None = None) -> int:
        slot = self.prefill(prompt)
        self.prefix.insert(prompt, self.prefix.keys(prompt, salt), slot, 0, prompt.size // SIZE, salt)
        return slot

    def match(self, prompt: IntArray, salt: str | None = None) -> IntArray:
        return self.prefix.match(prompt, self.prefix.keys(prompt, salt), salt)

    def check(self) -> None:
        self.kv.check_integrity(self.prefix.mentions())


def tokens(*parts: tuple[int, int]) -> IntArray:
    """`count` times `token` for each (token, count)."""
    return np.concatenate([np.full(count, token) for token, count in parts]).astype(np.int32)


def test_a_prompt_shares_the_blocks_of_its_longest_known_prefix() -> None:
    cached = Cached()
    slot = cached.keep(tokens((5, 8), (6, 6)))
    assert np.array_equal(cached.match(tokens((5, 8), (7, 9))), cached.kv.tables[slot, :, :2].T)
    assert cached.match(tokens((7, 4), (5, 8))).shape == (0, LAYERS)
    cached.check()


def test_the_last_block_of_a_prompt_is_never_served_whole() -> None:
    cached = Cached()
    cached.keep(tokens((5, 8)))
    assert len(cached.match(tokens((5, 8)))) == 1
    assert len(cached.match(tokens((5, 9)))) == 2


def test_same_block_behind_another_beginning_is_another() -> None:
    """The same block behind another beginning is another block."""
    cached = Cached()
    cached.keep(tokens((5, 4), (6, 4)))
    assert len(cached.match(tokens((7, 4), (6, 4), (1, 1)))) == 0


def test_colliding_key_of_other_tokens_serves_no_prompt() -> None:
    """Tokens are compared, so that a colliding key serves no prompt."""
    cached = Cached()
    cached.keep(tokens((5, 8)))
    stolen = cached.prefix.keys(tokens((5, 8)))
    assert cached.prefix.match(tokens((6, 9)), stolen).shape == (0, LAYERS)


def test_two_salts_never_share_a_block_and_one_salt_does() -> None:
    cached = Cached()
    prompt, salts = tokens((5, 9)), (None, "a", "b", "\ud800")
    for number, salt in enumerate(salts):
        assert [len(cached.match(prompt, other)) for other in salts] == [2] * number + [0] * (len(salts) - number)
        cached.keep(prompt, salt)
    found = [cached.match(prompt, salt) for salt in salts]
    assert np.unique(np.concatenate(found)).size == len(salts) * 2 * LAYERS
    cached.check()


def test_a_stolen_key_serves_nobody_under_another_salt() -> None:
    cached = Cached()
    prompt = tokens((5, 9))
    cached.keep(prompt, "a")
    stolen = cached.prefix.keys(prompt, "a")
    assert len(cached.prefix.match(prompt, stolen, "a")) == 2
    assert len(cached.prefix.match(prompt, stolen, "b")) == len(cached.prefix.match(prompt, stolen)) == 0


def test_shared_blocks_outlive_the_sequence_that_computed_them() -> None:
    cached = Cached()
    slot = cached.keep(tokens((5, 8)))
    blocks = cached.kv.tables[slot, :, :2].T.copy()
    cached.kv.close(slot)
    cached.check()
    assert cached.prefix.num_idle_blocks() == 2 * LAYERS
    assert np.array_equal(cached.match(tokens((5, 9))), blocks)


def test_room_is_made_by_dropping_what_was_used_longest_ago() -> None:
    cached = Cached(num_blocks=4 * LAYERS)
    for token in (5, 6, 7):
        cached.kv.close(cached.keep(tokens((token, 4))))
    assert len(cached.match(tokens((5, 5)))) == 1  # 5 is now the youngest
    assert cached.prefix.reserve(2 * LAYERS)
    assert len(cached.match(tokens((6, 5)))) == 0
    assert len(cached.match(tokens((5, 5)))) == 1
    cached.check()


def test_prefix_in_use_everywhere_is_not_dropped() -> None:
    """A prefix in use everywhere is not dropped since that frees nothing."""
    cached = Cached(num_blocks=2 * LAYERS)
    cached.keep(tokens((5, 8)))
    assert not cached.prefix.reserve(1)
    assert len(cached.prefix) == 2


@pytest.mark.parametrize("asleep", [[2], [1, 2]])
def test_prefix_of_skipped_layers_gives_blocks_when_needed(asleep: list[int]) -> None:
    """A prefix whose upper layers are skipped gives their blocks when they are needed."""
    cached = Cached(num_blocks=LAYERS)
    slot = cached.keep(tokens((5, 4)))
    cached.kv.free_layers(slot, np.array(asleep))
    assert cached.kv.pool.num_free == 0  # the prefix cache still holds them
    assert cached.prefix.reserve(len(asleep))
    assert cached.kv.pool.num_free == len(asleep)
    cached.check()


def test_clear_forgets_every_prefix_and_frees_unused_blocks() -> None:
    """Clearing forgets every prefix and frees what no sequence uses."""
    cached = Cached()
    cached.kv.close(cached.keep(tokens((5, 8))))
    cached.prefix.clear()
    assert len(cached.prefix) == 0
    assert cached.kv.pool.num_free == cached.kv.pool.num_blocks
    cached.check()
