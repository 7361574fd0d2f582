"""Bad words are found by one walk back from an answer's end, however many there are."""

import random

import numpy as np
import pytest
import torch

from d3engine.errors import InvalidValueError
from d3engine.request.params import SamplingParams
from d3engine.request.token_rules import BadWords, TokenRules


class CountingList(list[int]):
    """Counts how many of its items were looked at."""

    num_read = 0

    def __getitem__(self, place):  # type: ignore[no-untyped-def]
        self.num_read += 1
        return super().__getitem__(place)


def banned_by_hand(words: list[tuple[int, ...]], generated: list[int]) -> set[int]:
    return {word[-1] for word in words if len(word) == 1 or tuple(generated[-(len(word) - 1) :]) == word[:-1]}


@pytest.mark.parametrize("seed", range(20))
def test_the_tokens_that_complete_a_word_are_found(seed: int) -> None:
    numbers = random.Random(seed)
    words = [tuple(numbers.choices(range(4), k=numbers.randint(1, 6))) for _ in range(numbers.randint(0, 40))]
    tree = BadWords(words)
    assert tree.longest == max((len(word) - 1 for word in words), default=0)
    assert bool(tree) == bool(words)
    for _ in range(50):
        generated = numbers.choices(range(4), k=numbers.randint(0, 9))
        assert set(tree.banned(generated)) == banned_by_hand(words, generated)


def test_its_arrays_are_those_that_the_library_reads() -> None:
    tree = BadWords([(5,), (3, 6), (2, 3, 7), (1, 3, 8), (4, 9)])
    assert tree.edges.tolist() == [3, 4, 1, 2], "sorted by node and token"
    assert tree.first_edges.tolist() == [0, 2, 4, 4, 4, 4]
    assert tree.bans.tolist() == [5, 6, 9, 8, 7]
    assert tree.first_bans.tolist() == [0, 1, 2, 3, 4, 5]
    assert all(array.dtype == np.int64 for array in (tree.edges, tree.first_edges, tree.bans, tree.first_bans))


def test_a_step_looks_at_one_path_whatever_the_number_of_words() -> None:
    beginning = (1, 2) * 200
    few, many = (BadWords([(*beginning, 10 + n) for n in range(count)]) for count in (1, 500))
    reads = []
    for tree in (few, many):
        generated = CountingList(beginning)
        assert len(tree.banned(generated)) == len(tree.words)
        reads.append(generated.num_read)
    assert reads[0] == reads[1] <= 2 * len(beginning)
    unlike = CountingList([3] * 400)
    assert many.banned(unlike) == []
    assert unlike.num_read <= 2


def test_masks_and_biases_are_made_once() -> None:
    rules = TokenRules(SamplingParams(allowed_token_ids=[1, 9], logit_bias={3: 1.5}))
    mask = rules.mask(12)
    assert mask is not None
    assert np.unpackbits(mask, bitorder="little")[:12].nonzero()[0].tolist() == [1, 9]
    assert rules.mask(12) is mask
    cpu = torch.device("cpu")
    excluded = rules.excluded(cpu, 12)
    assert excluded is not None
    assert (~excluded).nonzero().flatten().tolist() == [1, 9]
    assert rules.excluded(cpu, 12) is excluded
    assert rules.biased is rules.biased
    assert rules.bias_on(cpu) is rules.bias_on(cpu)
    assert TokenRules(SamplingParams()).mask(12) is None


@pytest.mark.parametrize("tokens", [[1, -1], [1, 2.0], [True], [1, "2"], [None]])
def test_a_long_list_is_checked_as_a_short_one_is(tokens: list[object]) -> None:
    for field in ("allowed_token_ids", "stop_token_ids"):
        with pytest.raises(InvalidValueError, match=f"{field} must be an integer of at least 0"):
            SamplingParams(**{field: tokens})
