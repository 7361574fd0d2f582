"""The loss of the next token by skipped layers, against whole passes of the observer and against counts by hand."""

from typing import Any

import numpy as np
import pytest
import torch
from fixture_types import MakeLlama
from observers import observer_of
from tiny_models import random_prompts

from d3engine.depth import NEVER, Schedule
from d3engine.errors import InvalidValueError
from d3engine.research.analysis.answers import Answered
from d3engine.research.analysis.layers import MEASURES, LayerLoss, measure_layers, passes, quantile_of_t
from d3engine.research.analysis.observer import Observer

LAYERS = 5


@pytest.fixture(scope="module")
def observer(tiny_llama: MakeLlama) -> Observer:
    return observer_of(tiny_llama(num_hidden_layers=LAYERS).directory)


@pytest.fixture(scope="module")
def texts() -> list[Answered]:
    return [text(ids[:length], ids[length:]) for ids, length in zip(random_prompts([14, 9]), (5, 1), strict=True)]


def text(prompt: list[int], answer: list[int]) -> Answered:
    return Answered("", prompt, answer, [], [], "", False)


def log_probabilities(observer: Observer, one: Answered, cutoffs: list[int]) -> torch.Tensor:
    """Of every token of a vocabulary behind each place of a text, by a whole pass without a cache."""
    for states in observer.layers(one.sequence, len(one.prompt_ids), Schedule.nested(cutoffs)):
        last = states.after
    return observer.logits(last[one.answer_rows]).log_softmax(dim=-1)


def test_every_window_loses_what_a_pass_without_its_layers_loses(observer: Observer, texts: list[Answered]) -> None:
    heard: list[None] = []
    widths, from_steps = (2, 5), (1, 4)
    loss = measure_layers(observer, texts, widths, from_steps, lambda: heard.append(None))
    assert len(heard) == len(texts) * passes(LAYERS, widths, from_steps) == 2 * 2 * (4 + 1)
    for one, found in zip(texts, loss.texts, strict=True):
        full = log_probabilities(observer, one, [NEVER] * LAYERS)
        for s, step in enumerate(from_steps):
            for w, width in enumerate(widths):
                assert np.isnan(found[s, w, LAYERS - width + 1 :]).all()
                assert np.isnan(found[s, :, :, :, :step]).all()
                for first in loss.firsts(width):
                    cutoffs = [step if first <= layer < first + width else NEVER for layer in range(LAYERS)]
                    skipped = log_probabilities(observer, one, cutoffs)
                    kl = torch.nn.functional.kl_div(skipped, full, reduction="none", log_target=True).sum(dim=-1)
                    extra = [float(full[i, token] - skipped[i, token]) for i, token in enumerate(one.token_ids)]
                    agrees = (full.argmax(dim=-1) == skipped.argmax(dim=-1)).double()
                    for measured, expected in zip(
                        found[s, w, first], (kl.tolist(), extra, agrees.tolist()), strict=True
                    ):
                        assert measured[step:] == pytest.approx(expected[step:], abs=1e-4)
    assert np.nanmax(loss.means("kl", 1)) > 1e-3, "no window costs anything, so nothing is shown"


def test_means_are_over_tokens_and_their_intervals_over_texts() -> None:
    def values(*kl: float) -> Any:
        found = np.full((1, 1, 2, len(MEASURES), len(kl)), np.nan)
        found[0, 0, 1, 0] = kl
        return found

    loss = LayerLoss(2, (1,), (1,), [values(np.nan, 1.0, 3.0), values(np.nan, 2.0)])
    found = loss.mean("kl", 1, 1, 1)
    assert found.value == 2
    assert found.arm == 0, "both texts have the mean of all"
    spread = LayerLoss(2, (1,), (1,), [values(np.nan, 1.0), values(np.nan, 3.0)])
    assert spread.mean("kl", 1, 1, 1).arm == pytest.approx(12.7062)  # the standard error of (1, 3) is 1
    assert spread.mean("kl", 1, 1, 1, range(1, 2)).value == 2
    alone = LayerLoss(2, (1,), (1,), [values(np.nan, 1.0)]).mean("kl", 1, 1, 1)
    assert (np.isnan(alone.arm), alone.interval) == (True, ""), "of one text no interval is known"


@pytest.mark.parametrize(("freedom", "value"), [(1, 12.7062), (2, 4.3027), (7, 2.3646), (12, 2.1788), (39, 2.0227)])
def test_quantile_of_t_is_the_tables(freedom: int, value: float) -> None:
    """Intervals of few texts have the width of Student's distribution, as tables print it."""
    assert quantile_of_t(freedom) == pytest.approx(value, abs=5e-5)
    assert quantile_of_t(10_000) == pytest.approx(1.96, abs=5e-4)


def test_the_tables_name_the_window_that_costs_least(observer: Observer, texts: list[Answered]) -> None:
    loss = measure_layers(observer, texts, (1, 2), (1, 4))
    rows = loss.table().rows
    assert [row[:2] for row in rows] == [("1", "1"), ("1", "2"), ("4", "1"), ("4", "2")]
    means = loss.means("kl", 4)
    assert rows[2][2] == f"{int(np.argmin(means[0]))}"
    first = int(np.nanargmin(means[1]))
    assert rows[3][2] == f"{first}-{first + 1}"
    assert rows[3][3].startswith(f"{means[1][first]:.3f}")
    windows = loss.as_dict()["windows"]
    assert len(windows) == passes(LAYERS, (1, 2), (1, 4))
    assert {row[2] for row in loss.position_table().rows} == {"1", "4"}
    tokens = next(one for one in windows if one["from_step"] == 1)["by_step"]
    assert [one["steps"] for one in tokens] == ["1", "2-3", "4-7", "8"]


def test_a_step_that_no_text_reaches_is_refused(observer: Observer, texts: list[Answered]) -> None:
    with pytest.raises(InvalidValueError, match="--from-step must be below 9, the tokens of the longest text; got 9"):
        measure_layers(observer, texts, (1,), (9,))
