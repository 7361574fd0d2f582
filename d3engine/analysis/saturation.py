"""Oracle saturation depth (the D3 paper's Table 2): after how many layers is a token's prediction settled?

The one idea: the LM head reads the residual stream after every layer. From some layer on its first choice is the one
of the last layer and stays so; an oracle that knew this layer could stop there. No real policy knows it: what is
measured is how much there is to save, not how.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from d3engine.analysis import along
from d3engine.analysis.along import in_words, mean_at, with_arm
from d3engine.analysis.answers import Answered
from d3engine.analysis.layers import Mean
from d3engine.analysis.observer import Observer
from d3engine.analysis.report import STEP, Table, counted, step_groups, steps_in_words

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class AnswerSaturation:
    """One answer of n tokens: layers until each was settled, from 1 to L (int64 [n]); the probability that the LM head
    gave it after that layer, and after the last one (float64 [n])."""

    layers: IntArray
    confidence: FloatArray
    final_confidence: FloatArray


@dataclass(frozen=True)
class Saturation:
    """All answers of a model of `num_layers`."""

    num_layers: int
    answers: list[AnswerSaturation]

    def settled_share(self) -> FloatArray:
        """Float64 [L + 1]: the share of tokens that are settled after 0 .. L layers."""
        layers = np.concatenate([answer.layers for answer in self.answers])
        return np.array([(layers <= count).mean() for count in range(self.num_layers + 1)])

    def by_step(self) -> list[tuple[range, AnswerSaturation]]:
        """The tokens of all answers, gathered by groups of generation steps."""
        longest = max(len(answer.layers) for answer in self.answers)
        return [(group, _gathered(self.answers, group)) for group in step_groups(longest)]

    def table(self) -> Table:
        """A row for each group of steps, and one for all tokens."""
        header = (STEP, "tokens", "layers, mean", "of all", "median", "90 % by", "confidence", "at last layer")
        texts = self._layers()
        groups = [(steps_in_words(group), group) for group, _ in self.by_step()]
        rows = [
            _row(name, _gathered(self.answers, group), mean_at(texts, group), self.num_layers)
            for name, group in [*groups, ("all", range(max(map(len, texts))))]
        ]
        title = f"Layers (of {self.num_layers}) until the prediction is settled, {counted(len(self.answers), 'answer')}"
        return Table(title, header, rows, in_words(texts, "layers"))

    def _layers(self) -> list[FloatArray]:
        """For each answer the layers of its tokens."""
        return [answer.layers.astype(np.float64) for answer in self.answers]

    def as_dict(self) -> dict[str, Any]:
        """Every token, and late ones less early ones."""
        return {
            "num_layers": self.num_layers,
            "mean_layers": float(np.concatenate([answer.layers for answer in self.answers]).mean()),
            "settled_share_after_layers": self.settled_share().tolist(),
            "late_less_early": along.as_dict(self._layers()),
            "answers": [
                {
                    "layers": answer.layers.tolist(),
                    "confidence": answer.confidence.tolist(),
                    "final_confidence": answer.final_confidence.tolist(),
                }
                for answer in self.answers
            ],
        }


def measure_saturation(observer: Observer, answered: Iterable[Answered]) -> Saturation:
    """Take every answer apart; a pass through the model and L times the LM head each."""
    return Saturation(observer.config.num_layers, [_of_answer(observer, one) for one in answered])


def _of_answer(observer: Observer, answered: Answered) -> AnswerSaturation:
    choices, chances = [], []
    for states in observer.layers(answered.sequence, len(answered.prompt_ids)):
        best = observer.logits(states.after[answered.answer_rows]).softmax(dim=-1).max(dim=-1)
        choices.append(best.indices)
        chances.append(best.values)
    return saturation(torch.stack(choices).cpu().numpy(), torch.stack(chances).double().cpu().numpy())


def saturation(choices: IntArray, chances: FloatArray) -> AnswerSaturation:
    """From the first choice after each layer, int [L, n], and its probability, [L, n]."""
    layers = settled_after(choices)
    return AnswerSaturation(layers, chances[layers - 1, np.arange(choices.shape[1])], chances[-1])


def settled_after(choices: IntArray) -> IntArray:
    """Int64 [n]: after how many layers, from 1, the first choices [L, n] are the last layer's and stay so."""
    settled = np.logical_and.accumulate((choices == choices[-1])[::-1])[::-1]
    layers: IntArray = settled.argmax(axis=0) + 1
    return layers


def _gathered(answers: Sequence[AnswerSaturation], group: range) -> AnswerSaturation:
    part = slice(group.start, group.stop)
    return AnswerSaturation(
        np.concatenate([answer.layers[part] for answer in answers]),
        np.concatenate([answer.confidence[part] for answer in answers]),
        np.concatenate([answer.final_confidence[part] for answer in answers]),
    )


def _row(name: str, found: AnswerSaturation, mean: Mean, num_layers: int) -> tuple[str, ...]:
    return (
        name,
        f"{len(found.layers)}",
        with_arm(mean, ".2f"),
        f"{mean.value / num_layers:.0%}",
        f"{np.median(found.layers):g}",
        f"{np.quantile(found.layers, 0.9, method='inverted_cdf'):g}",
        f"{found.confidence.mean():.2f}",
        f"{found.final_confidence.mean():.2f}",
    )
