"""Noise is what is written down: known answers, its form in plain Python, and the statistics of draws."""

import random

import pytest
import torch
from slow_sampling import MASK, random_logits, sample, sequence_of, slow_gumbel, slow_philox, tokens_of

import d3engine.kernels.reference
from d3engine import SamplingParams
from d3engine.kernels.reference import gumbel, philox


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter: str, key: str, words: str) -> None:
    c0, c1, c2, c3 = (int(word, 16) for word in counter.split())
    k0, k1 = (int(word, 16) for word in key.split())
    wanted = tuple(int(word, 16) for word in words.split())
    assert slow_philox((k0, k1), (c0, c1, c2, c3)) == wanted
    tensors = [torch.tensor([word]) for word in (k0, k1, c0, c1, c2, c3)]
    found = philox((tensors[0], tensors[1]), (tensors[2], tensors[3], tensors[4], tensors[5]))
    assert tuple(int(word) for word in found) == wanted


def test_philox_equals_its_plain_python_form_for_any_words() -> None:
    numbers = random.Random(1)
    rows = [[numbers.randrange(2**32) for _ in range(6)] for _ in range(300)]
    k0, k1, c0, c1, c2, c3 = torch.tensor(rows).unbind(1)
    found = torch.stack(torch.broadcast_tensors(*philox((k0, k1), (c0, c1, c2, c3))), dim=1).tolist()
    assert found == [list(slow_philox((r[0], r[1]), (r[2], r[3], r[4], r[5]))) for r in rows]


def test_gumbel_noise_equals_its_plain_python_form() -> None:
    keys = [(0, 0, 0), (2**63 - 1, 3, 7), (12345678901234, 63, 10**6), (2**32, 0, 2**24)]
    seeds, indices, steps = torch.tensor(keys).unbind(1)
    noise = gumbel(seeds, indices, steps, 37)
    assert noise.shape == (4, 37)
    assert noise.dtype == torch.float32
    wanted = torch.tensor([[slow_gumbel(*key, token) for token in range(37)] for key in keys])
    torch.testing.assert_close(noise, wanted, rtol=1e-5, atol=1e-5)


def test_the_highest_and_lowest_words_still_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 24 bits and a half, float32 rounds the highest word to 1: one token in 16 million was always chosen."""

    def extremes(key: object, counter: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        rows, groups = counter[1].shape[0], counter[0].shape[1]
        return tuple(torch.full((rows, groups), word) for word in (0, MASK, 1, MASK - 1))

    monkeypatch.setattr(d3engine.kernels.reference, "philox", extremes)
    noise = gumbel(torch.tensor([0]), torch.tensor([0]), torch.tensor([0]), 4)
    assert noise.isfinite().all()
    assert noise[0, 1] > 14 > 0 > noise[0, 0]


def test_noise_depends_on_seed_index_step_and_token_alone() -> None:
    numbers = random.Random(2)
    keys = [(numbers.randrange(2**63), numbers.randrange(64), numbers.randrange(5000)) for _ in range(40)]
    together = gumbel(*torch.tensor(keys).unbind(1), num_tokens=301)
    for row, key in enumerate(keys):
        alone = gumbel(*torch.tensor([key]).unbind(1), num_tokens=301)
        assert torch.equal(alone[0], together[row])
    shorter = gumbel(*torch.tensor(keys).unbind(1), num_tokens=10)
    torch.testing.assert_close(shorter, together[:, :10], rtol=1e-6, atol=1e-6)
    base = (5, 1, 9)
    rows = gumbel(*torch.tensor([base, (6, 1, 9), (5, 2, 9), (5, 1, 10), (5 + 2**32, 1, 9)]).unbind(1), num_tokens=50)
    for other in range(1, 5):
        assert (rows[0] != rows[other]).sum() > 45


def test_draws_follow_the_softmax() -> None:
    """Chi-square over 7 tokens, 6 degrees of freedom: 22.5 is exceeded once in a thousand."""
    logits, draws = random_logits(1, 7, seed=4) / 2, 6000
    sequences = [sequence_of(SamplingParams(temperature=1.0, seed=seed)) for seed in range(draws)]
    found = torch.bincount(torch.tensor(tokens_of(sample(logits.expand(draws, -1), sequences))), minlength=7)
    wanted = logits[0].softmax(dim=-1) * draws
    assert float(((found - wanted) ** 2 / wanted).sum()) < 22.5


def test_steps_and_sequences_of_one_seed_draw_apart() -> None:
    """The steps of one seed and the sequences of one request are draws of their own."""
    logits, draws = torch.zeros(1, 5), 2000
    params = SamplingParams(temperature=1.0, seed=77)
    by_step = [sequence_of(params, generated=[0] * step) for step in range(draws)]
    by_index = [sequence_of(params, index=index) for index in range(draws)]
    for sequences in (by_step, by_index):
        tokens = torch.tensor(tokens_of(sample(logits.expand(draws, -1), sequences)))
        counts = torch.bincount(tokens, minlength=5).float()
        assert float(((counts - draws / 5) ** 2 / (draws / 5)).sum()) < 18.5  # 4 degrees of freedom
        pairs = torch.bincount(tokens[:-1] * 5 + tokens[1:], minlength=25).float()
        assert float(((pairs - (draws - 1) / 25) ** 2 / ((draws - 1) / 25)).sum()) < 51.2  # 24
