"""Tokens are chosen as written down: by slow references in plain Python, and a faulty row fails alone."""

import math
import random
from typing import Any

import pytest
import torch
from slow_sampling import EOS, random_logits, sample, sequence_of, slow_token, tokens_of
from transformers import TypicalLogitsWarper

from d3engine import SamplingParams
from d3engine.executor.sampler import FAULT

WORDS = ((4,), (2, 5), (1, 1, 6), (8, 3))
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "temperature": [{"temperature": t} for t in (0.0, 1e-6, 0.01, 0.5, 1.0, 2.0, 100.0)],
    "top_k": [{"top_k": k} for k in (1, 2, 5, 11, 12, 10**6)],
    "top_p": [{"top_p": p} for p in (1e-9, 0.1, 0.5, 0.9, 0.999, 1.0)],
    "min_p": [{"min_p": p} for p in (0.0, 0.01, 0.1, 0.5, 1.0)],
    "typical_p": [{"typical_p": p} for p in (1e-6, 0.2, 0.7, 0.95, 1.0)],
    "top_n_sigma": [{"top_n_sigma": n} for n in (0.0, 0.5, 1.0, 3.0)],
    "xtc": [{"xtc_probability": p, "xtc_threshold": t} for p, t in ((1.0, 0.1), (0.5, 0.05), (1.0, 0.6), (0.0, 0.1))],
    "dry": [
        {"dry_multiplier": 0.8, "dry_sequence_breakers": []},
        {"dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_base": 1.5, "dry_penalty_last_n": 6},
        {"dry_multiplier": 3.0, "dry_penalty_last_n": 0},
    ],
    "presence_penalty": [{"presence_penalty": p} for p in (-2.0, -0.3, 0.7, 2.0)],
    "frequency_penalty": [{"frequency_penalty": p} for p in (-2.0, -0.3, 0.7, 2.0)],
    "repetition_penalty": [{"repetition_penalty": p} for p in (0.5, 0.9, 1.2, 5.0)],
    "logit_bias": [{"logit_bias": b} for b in ({0: 100.0}, {3: -100.0, 4: 1.5}, {11: 0.5, 1: -0.5})],
    "allowed_token_ids": [{"allowed_token_ids": a} for a in ([7], [1, 2, 3], [11, 0, 0], list(range(12)))],
    "min_tokens": [{"min_tokens": m, "stop_token_ids": [3, 8], "max_tokens": 50} for m in (0, 1, 4, 5, 6, 50)],
    "bad_words": [{}],
    "all": [
        {
            "temperature": 0.8,
            "top_k": 6,
            "top_p": 0.8,
            "min_p": 0.02,
            "typical_p": 0.9,
            "top_n_sigma": 2.0,
            "xtc_probability": 0.5,
            "xtc_threshold": 0.2,
            "dry_multiplier": 0.5,
            "presence_penalty": 0.4,
            "frequency_penalty": -0.2,
            "repetition_penalty": 1.4,
            "logit_bias": {2: 3.0, 9: -1.0},
            "allowed_token_ids": [0, 1, 2, 3, 5, 8, 9, 10],
            "min_tokens": 6,
            "max_tokens": 50,
        }
    ],
}


@pytest.mark.parametrize("name", SETTINGS)
def test_parameter_in_a_batch_chooses_as_its_slow_reference(name: str) -> None:
    """A parameter chooses as its slow reference in a batch with all others."""
    numbers = random.Random(len(name))
    sequences = []
    for settings in SETTINGS[name]:
        for temperature in (0.0, 1.0, 1.3):
            for _ in range(12):
                params = SamplingParams(**({"temperature": temperature, "seed": numbers.randrange(2**63)} | settings))
                generated = numbers.choices(range(12), k=numbers.choice([0, 1, 2, 5, 9]))
                generated += numbers.choice([[], [2], [1, 1], [8]])
                words = WORDS if name in ("bad_words", "all") else ()
                prompt = numbers.choices(range(12), k=3)
                if name == "dry":
                    generated += generated[-4:] + generated[-4:]
                breakers = numbers.choice([frozenset(), frozenset({3, 7})])
                sequences.append(
                    sequence_of(params, prompt=prompt, generated=generated, bad_words=words, breakers=breakers)
                )
    others = [
        sequence_of(SamplingParams(**settings), generated=[1, 2, 2])
        for group in SETTINGS.values()
        for settings in group
    ]
    numbers.shuffle(both := sequences + others)
    logits = random_logits(len(both), 12, seed=len(name))
    found = sample(logits, both)
    assert not found.faults
    assert tokens_of(found) == [slow_token(row, one) for row, one in zip(logits.tolist(), both, strict=True)]
    # And each alone, without its neighbours.
    for row in range(0, len(both), 17):
        assert sample(logits[row : row + 1], [both[row]]).token_ids == [found.token_ids[row]]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 3}, 3),
        ({"top_k": 1}, 1),
        ({"top_p": 0.5}, 1),  # 0.5 is reached by the first: the smallest set is that one
        ({"top_p": 0.51}, 2),
        ({"top_p": 0.8}, 3),
        ({"top_p": 0.01}, 1),
        ({"min_p": 0.3}, 2),
        ({"min_p": 0.5, "top_p": 0.99}, 2),
        ({"top_k": 4, "top_p": 0.9}, 3),  # 0.5, 0.25, 0.125, 0.0625 of 0.9375: 0.93 is reached by the third
        ({}, 8),
    ],
)
def test_truncation_keeps_exactly_the_likeliest_tokens(settings: dict[str, Any], kept: int) -> None:
    """Probabilities 1/2, 1/4, ... 1/128, 1/128, shuffled; 800 draws see all that are kept."""
    order = torch.tensor([5, 0, 7, 2, 6, 1, 4, 3])
    logits = torch.full((8,), math.log(2.0)) * torch.tensor([7.0, 6, 5, 4, 3, 2, 1, 1])
    row = torch.empty(8).index_copy_(0, order, logits)
    sequences = [sequence_of(SamplingParams(seed=seed, **settings)) for seed in range(800)]
    found = set(tokens_of(sample(row.expand(800, -1), sequences)))
    likeliest = order.tolist()
    assert found in [set(likeliest[:kept]), set(likeliest[: kept - 1]) | {likeliest[7]}]


@pytest.mark.parametrize("typical_p", [0.1, 0.5, 0.9, 0.99])
def test_typical_tokens_are_those_of_transformers(typical_p: float) -> None:
    from d3engine.kernels.sampling import cut_typical_

    logits = random_logits(50, 200, seed=4)
    wanted = TypicalLogitsWarper(mass=typical_p)(torch.empty(0, dtype=torch.long), logits)  # type: ignore[arg-type]
    assert torch.equal(cut_typical_(logits.clone(), torch.full((50,), typical_p)), wanted)


def test_temperature_makes_the_odds_a_power_of_what_they_were() -> None:
    row = torch.tensor([0.0, math.log(3.0)])
    for temperature, odds in ((0.5, 9.0), (1.0, 3.0), (2.0, math.sqrt(3.0))):
        sequences = [sequence_of(SamplingParams(seed=seed, temperature=temperature)) for seed in range(2000)]
        ones = sum(tokens_of(sample(row.expand(2000, -1), sequences)))
        expected = 2000 * odds / (1 + odds)
        deviation = math.sqrt(expected / (1 + odds))
        assert abs(ones - expected) < 3.5 * deviation


# -- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [math.nan, math.inf, "all excluded"])
@pytest.mark.parametrize("greedy", [True, False])
def test_row_that_is_not_finite_fails_alone(poison: Any, greedy: bool) -> None:
    """A row that is not finite fails alone, and its neighbours draw the same bits."""
    logits = random_logits(5, 40, seed=11)
    kinds = [{"temperature": 0}] * 5 if greedy else [{}, {"top_p": 0.8}, {"top_k": 4}, {"min_p": 0.1}, {}]
    sequences = [sequence_of(SamplingParams(seed=n, **kind)) for n, kind in enumerate(kinds)]
    healthy = sample(logits, sequences, greedy=greedy)
    assert not healthy.faults
    broken = logits.clone()
    if poison == "all excluded":
        broken[2] = -math.inf
    else:
        broken[2, 17] = poison
    found = sample(broken, sequences, greedy=greedy)
    assert found.faults == {2: FAULT}
    assert [t for row, t in enumerate(found.token_ids) if row != 2] == [
        t for row, t in enumerate(healthy.token_ids) if row != 2
    ]


def test_minus_infinity_excludes_a_token_and_harms_nobody() -> None:
    logits = random_logits(2, 10, seed=12)
    logits[0, :9] = -math.inf
    found = sample(logits, [sequence_of(SamplingParams(seed=n, top_p=0.9)) for n in range(2)])
    assert not found.faults
    assert found.token_ids[0] == [9]


def test_row_with_every_token_excluded_fails_alone() -> None:
    """A row of which every token is excluded by its own parameters fails alone."""
    logits = random_logits(2, 12, seed=13)
    impossible = SamplingParams(allowed_token_ids=[EOS], min_tokens=3, seed=1)
    found = sample(logits, [sequence_of(impossible), sequence_of(SamplingParams(seed=2))])
    assert found.faults == {0: FAULT}
