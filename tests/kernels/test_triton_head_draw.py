"""The draw that the LM head's kernels make of their own logits against the reference, token by token.
Memory from `torch.empty` is poisoned here, so that a value which was not written shows."""

import pytest
import torch
from sampling_rows import assert_same_choice, rows_like
from torch import Tensor

import d3engine.kernels.triton as kernels
from d3engine.kernels import reference
from d3engine.kernels.sampling import SamplingRows

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rows_apart", "few_programs")

EPS, MATMUL_ROWS = 1e-5, 24


def head(
    rows: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator, vocab: int = 77
) -> tuple[Tensor, Tensor, float, Tensor]:
    """Hidden rows, norm weight, epsilon and matrix."""
    hidden = torch.randn(rows, 123, generator=generator).to(device, dtype)
    norm = torch.randn(123, generator=generator).to(device, dtype)
    return hidden, norm, EPS, (torch.randn(vocab, 123, generator=generator) * 0.3).to(device, dtype)


@pytest.mark.parametrize(  # rows for a path each, the last by torch.matmul
    ("dtype", "rows"), [*((torch.float32, rows) for rows in (1, 5, 19, 26)), (torch.float16, 5), (torch.float16, 26)]
)
def test_the_heads_draw_is_the_draw_of_its_logits(
    dtype: torch.dtype, rows: int, device: torch.device, generator: torch.Generator
) -> None:
    given = head(rows, dtype, device, generator)
    draws, steps = rows_like([0.7, 0.0, 1.0, 4.0, 0.2] * 9, device, step=11)
    numbers = [one[:rows] for one in (draws.temperature, draws.seeds, draws.indices, steps)]
    logits, asked = kernels.lm_head(*given), SamplingRows(*numbers[:3])
    for first in (36, 0):  # a part of a head draws with its tokens' noise
        expected = reference.sample(logits, asked, numbers[3], first_token=first)
        assert_same_choice(kernels.lm_head_sample(*given, *numbers, first_token=first), expected)
    live = max(1, rows - 2)
    num_rows = torch.tensor([live], dtype=torch.int32, device=device)
    tokens, scores = kernels.lm_head_sample(*given, *numbers, num_rows=num_rows)
    assert_same_choice((tokens[:live], scores[:live]), (expected[0][:live], expected[1][:live]))
    assert bool(scores[live:].isnan().all())


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_faulty_row_shows_in_the_score_of_the_heads_draw(device: torch.device, generator: torch.Generator) -> None:
    hidden, norm, eps, weight = head(3, torch.float32, device, generator)
    hidden[1, 5] = torch.nan
    rows, steps = rows_like([1.0, 1.0, 0.0], device)
    given = (hidden, norm, eps, weight, rows.temperature, rows.seeds, rows.indices, steps)
    _, scores = kernels.lm_head_sample(*given)
    assert scores.isfinite().tolist() == [True, False, True]
    assert bool(scores[1].isnan())


def test_draws_follow_the_softmax(device: torch.device, generator: torch.Generator) -> None:
    """Chi-square over 6 tokens, 5 degrees of freedom: 20.5 is exceeded once in a thousand."""
    count, batches, temperature = 24, 30, 1.4
    hidden, norm, eps, weight = head(1, torch.float32, device, generator, vocab=6)
    weight *= 0.5
    wanted = (reference.lm_head(hidden, norm, eps, weight)[0] / temperature).softmax(dim=-1) * count * batches
    assert wanted.min() > 10
    rows, steps = rows_like([temperature] * count, device)
    given = (hidden.expand(count, -1), norm, eps, weight, rows.temperature, rows.seeds * 0 + 5, rows.indices * 0)
    found = [kernels.lm_head_sample(*given, steps // 3 + batch * count)[0] for batch in range(batches)]
    frequencies = torch.bincount(torch.cat(found), minlength=6)
    assert float(((frequencies - wanted) ** 2 / wanted).sum()) < 20.5
