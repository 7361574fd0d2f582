"""The reference's choice of tokens equals the sampler's, which `tests/sampling` holds against plain Python."""

import random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from sequences import new_sequence

from d3engine import SamplingParams
from d3engine.executor.sampler import Sampler
from d3engine.kernels import reference
from d3engine.kernels.sampling import Cuts, Penalties, SamplingRows
from d3engine.scheduling.plan import Plan
from d3engine.scheduling.sequence import Sequence

TWO = torch.tensor([2], dtype=torch.int32)


def random_sequence(numbers: random.Random, vocab: int, *, cuts: bool, penalties: bool) -> Sequence:
    """A row that asks for any mixture, or for what is said; one in four is greedy."""
    settings: dict[str, Any] = {"temperature": numbers.choice([0.0, 0.3, 1.0, 2.5]), "seed": numbers.randrange(2**63)}
    if cuts:
        settings |= {
            "min_p": numbers.choice([0.0, 0.0, 0.02, 0.3, 1.0]),
            "top_k": numbers.choice([0, 0, 1, 3, vocab // 2, vocab, 10**6]),
            "top_p": numbers.choice([1.0, 1.0, 1e-9, 0.4, 0.9, 0.999]),
        }
    if penalties:
        settings |= {
            "repetition_penalty": numbers.choice([1.0, 0.7, 1.3]),
            "presence_penalty": numbers.choice([0.0, -1.1, 0.6]),
            "frequency_penalty": numbers.choice([0.0, -0.3, 0.7]),
        }
    own: dict[str, Any] = {"index": numbers.randrange(64), "seed": settings["seed"]}
    prompt = numbers.choices(range(vocab), k=vocab // 3 + 1)
    own["token_ids"] = numbers.choices(range(vocab), k=numbers.choice([0, 1, vocab]))
    return new_sequence(prompt, SamplingParams(**settings), max_length=10**6, **own)


def rows_of(sequences: list[Sequence], vocab: int, *, cuts: bool, penalties: bool) -> tuple[SamplingRows, torch.Tensor]:
    """What an executor would keep on the device for these sequences, and their steps."""

    def floats(name: str) -> torch.Tensor:
        return torch.tensor([getattr(sequence.params, name) for sequence in sequences], dtype=torch.float32)

    counts = torch.zeros(len(sequences), vocab, dtype=torch.int32)
    seen = torch.zeros(len(sequences), vocab, dtype=torch.uint8)
    for row, sequence in enumerate(sequences):
        seen[row, sequence.prompt_token_ids] = 1
        for token in sequence.token_ids:
            counts[row, token] += 1
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    top_k = torch.tensor([sequence.params.top_k for sequence in sequences])
    rows = SamplingRows(
        floats("temperature"),
        torch.tensor([sequence.seed for sequence in sequences]),
        torch.tensor([sequence.index for sequence in sequences]),
        cuts=Cuts(floats("min_p"), top_k, floats("top_p")) if cuts else None,
        penalties=Penalties(*(floats(name) for name in names), seen, counts) if penalties else None,
    )
    return rows, torch.tensor([sequence.step for sequence in sequences])


@pytest.mark.parametrize(("cuts", "penalties"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("vocab", [3, 41])
def test_tokens_and_faults_are_those_of_the_sampler(vocab: int, cuts: bool, penalties: bool) -> None:
    numbers = random.Random(vocab)
    sequences = [random_sequence(numbers, vocab, cuts=cuts, penalties=penalties) for _ in range(300)]
    logits = torch.randn(300, vocab, generator=torch.Generator().manual_seed(vocab)) * 2.5
    logits[::2] = (logits[::2] * 2).round() / 2  # ties in every other row
    logits[7] = -torch.inf
    logits[8, 1], logits[9, 2], logits[10, 0] = torch.nan, torch.inf, -torch.inf
    before = logits.clone()
    plan = cast(Plan, SimpleNamespace(sequences=sequences, sampled=np.arange(300), prompt_rows=(), greedy=False))
    expected = Sampler()(logits, plan)
    rows, steps = rows_of(sequences, vocab, cuts=cuts, penalties=penalties)
    tokens, scores = reference.sample(logits, rows, steps)
    chosen = [[] if row in expected.faults else [token] for row, token in enumerate(tokens.tolist())]
    assert chosen == expected.token_ids
    assert set((~scores.isfinite()).nonzero().flatten().tolist()) == set(expected.faults)
    assert {7, 8, 9} <= set(expected.faults)
    assert torch.equal(logits.nan_to_num(0.0), before.nan_to_num(0.0))


def test_rows_beyond_the_count_are_not_chosen_nor_counted() -> None:
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    rows = SamplingRows(torch.tensor([0.0, 1.0, 1.0]), torch.arange(3), torch.arange(3))
    everything = reference.sample(logits, rows, torch.arange(3))
    tokens, scores = reference.sample(logits, rows, torch.arange(3), num_rows=TWO)
    assert tokens.tolist() == [*everything[0][:2].tolist(), -1]
    assert torch.equal(scores[:2], everything[1][:2])
    assert bool(scores[2].isnan())
    counts = torch.zeros(3, 8, dtype=torch.int32)
    for _ in range(2):
        reference.count_tokens(counts, tokens, num_rows=TWO)
    expected = torch.zeros(3, 8, dtype=torch.int32)
    expected[0, tokens[0]] = expected[1, tokens[1]] = 2
    assert torch.equal(counts, expected)


def test_the_fused_draw_is_that_of_the_logits() -> None:
    torch.manual_seed(0)
    hidden, norm, weight = torch.randn(3, 8), torch.randn(8), torch.randn(12, 8)
    temperature, seeds, steps = torch.tensor([0.0, 0.7, 1.5]), torch.tensor([5, 2**62, 5]), torch.tensor([1, 2, 3])
    logits = reference.lm_head(hidden, norm, 1e-5, weight)
    expected = reference.sample(logits, SamplingRows(temperature, seeds, steps), steps)
    tokens, scores = reference.lm_head_sample(hidden, norm, 1e-5, weight, temperature, seeds, steps, steps)
    assert torch.equal(tokens, expected[0])
    assert torch.equal(scores, expected[1])
    given = (hidden, norm, 1e-5, weight, temperature, seeds, steps, steps)
    tokens, scores = reference.lm_head_sample(*given, num_rows=TWO)
    assert tokens.tolist() == [*expected[0][:2].tolist(), -1]
    assert bool(scores[2].isnan())
