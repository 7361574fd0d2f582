"""Oracle saturation depth (the D3 paper's Table 2): the layer from which on the LM head's
first choice stays the last layer's. No real policy knows it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from d3engine.research.analysis import layers as along
from d3engine.research.analysis.answers import Answered
from d3engine.research.analysis.layers import FloatArray, Mean, in_words, mean_at, with_arm
from d3engine.research.analysis.observer import Observer
from d3engine.research.analysis.report import STEP, Table, counted, step_groups, steps_in_words

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
        return [answer.layers.astype(np.float64) for answer in self.answers]

    def as_dict(self) -> dict[str, Any]:
        """Every token, groups of steps, and late ones less early ones."""
        return {
            "num_layers": self.num_layers,
            "mean_layers": float(np.concatenate([answer.layers for answer in self.answers]).mean()),
            "by_step": along.groups_as_dict(self._layers()),
            "settled_share_after_layers": self.settled_share().tolist(),
            "late_less_early": along.as_dict(self._layers()),
            "answers": [{name: of.tolist() for name, of in vars(answer).items()} for answer in self.answers],
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
    names = ("layers", "confidence", "final_confidence")
    return AnswerSaturation(*(np.concatenate([getattr(one, name)[part] for one in answers]) for name in names))


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


@dataclass(frozen=True)
class Perplexity:
    """`logprobs[a][i]`: the log-probability of token i of answer a."""

    logprobs: list[list[float]]

    def at(self, group: range) -> tuple[int, float]:
        """How many tokens these steps yielded, and the mean of their -log p in nats; perplexity is its exp."""
        values = [logprob for answer in self.logprobs for logprob in answer[group.start : group.stop]]
        return len(values), float(0.0 - np.mean(values))  # a difference, because -0.0 would be printed as "-0"

    def by_step(self) -> tuple[FloatArray, FloatArray]:
        """Float64 [longest]: the mean of -log p at each step, and how many answers reach it."""
        found = [self.at(range(step, step + 1)) for step in range(self.longest)]
        return np.array([value for _, value in found]), np.array([float(count) for count, _ in found])

    @property
    def longest(self) -> int:
        return max(len(answer) for answer in self.logprobs)

    def table(self) -> Table:
        texts = self._surprises()
        groups = [(steps_in_words(group), group) for group in step_groups(self.longest)]
        rows = []
        for name, group in [*groups, ("all", range(self.longest))]:
            count, value = self.at(group)
            mean = Mean(value, mean_at(texts, group).arm)
            rows.append((name, f"{count}", f"{np.exp(value):.4f}", with_arm(mean, ".2g")))
        title = f"Perplexity by generation step, {counted(len(self.logprobs), 'answer')}"
        return Table(title, (STEP, "tokens", "perplexity", "mean -log p"), rows, in_words(texts, "nats"))

    def _surprises(self) -> list[FloatArray]:
        return [-np.array(answer, dtype=np.float64) for answer in self.logprobs]

    def as_dict(self) -> dict[str, Any]:
        """By single steps, over all tokens, and late ones less early ones."""
        values, counts = self.by_step()
        return {
            "answers": len(self.logprobs),
            "perplexity": float(np.exp(self.at(range(self.longest))[1])),
            "by_step": along.groups_as_dict(self._surprises()),
            "late_less_early": along.as_dict(self._surprises()),
            "steps": [
                {"step": step, "answers": int(count), "perplexity": float(np.exp(value)), "mean_negative_log_p": value}
                for step, (value, count) in enumerate(zip(values.tolist(), counts.tolist(), strict=True))
            ],
        }


def measure_perplexity(answered: Sequence[Answered]) -> Perplexity:
    """From the log-probabilities that the engine gave the answers' own tokens."""
    return Perplexity([one.logprobs for one in answered])


PARTS = ("block", "attention", "mlp")
NAMES = ("block", "attention", "MLP")
ROWS = ("answer", "prompt")


@dataclass(frozen=True)
class Flow:
    """Means over tokens, float64 [2, 3, L] each: rows of the answers, then of the prompts; by `PARTS`; by layer.

    `cosine` is the similarity of the stream before and after the part, `distance` their Euclidean distance. Rows of
    an answer are those that yield its tokens. `tokens` counts the rows of both kinds.
    """

    cosine: FloatArray
    distance: FloatArray
    tokens: tuple[int, int]

    def least_influence_first(self) -> list[int]:
        """The layers in the order in which ShortGPT removes them: by 1 - cosine of the block, the least first (Men et
        al. 2024, "ShortGPT"); over the tokens of answers."""
        order: list[int] = np.argsort(-self.cosine[0, 0], kind="stable").tolist()
        return order

    def table(self) -> Table:
        """A row for each layer, of the answers' tokens; `influence` is 1 for the layer that changes least."""
        places = {layer: place for place, layer in enumerate(self.least_influence_first(), 1)}
        measures = [f"{measure}, {part}" for measure in ("cosine", "distance") for part in NAMES]
        rows = [
            (
                f"{layer}",
                f"{places[layer]}",
                *(f"{self.cosine[0, part, layer]:.3f}" for part in range(3)),
                *(f"{self.distance[0, part, layer]:.2f}" for part in range(3)),
            )
            for layer in range(self.cosine.shape[2])
        ]
        title = f"Residual stream before and after each part of a layer: means over {self.tokens[0]} tokens of answers"
        return Table(title, ("layer", "influence", *measures), rows)

    def as_dict(self) -> dict[str, Any]:
        by_rows = {
            rows: {
                "tokens": self.tokens[kind],
                "cosine": {part: self.cosine[kind, place].tolist() for place, part in enumerate(PARTS)},
                "distance": {part: self.distance[kind, place].tolist() for place, part in enumerate(PARTS)},
            }
            for kind, rows in enumerate(ROWS)
        }
        return {**by_rows, "least_influence_first": self.least_influence_first()}


def measure_flow(observer: Observer, answered: Iterable[Answered]) -> Flow:
    """One full-depth pass for each answer."""
    shape = (2, 3, observer.config.num_layers)
    cosine, distance = np.zeros(shape), np.zeros(shape)
    tokens = np.zeros(2)
    for one in answered:
        first = one.answer_rows.start
        for states in observer.layers(one.sequence, len(one.prompt_ids)):
            steps = (
                (states.before, states.after),
                (states.before, states.after_attention),
                (states.after_attention, states.after),
            )
            for part, (before, after) in enumerate(steps):
                _add(cosine[:, part, states.layer], torch.cosine_similarity(before.double(), after.double(), -1), first)
                _add(distance[:, part, states.layer], (after - before).double().norm(dim=-1), first)
        tokens += (len(one.sequence) - first, first)
    counts = tokens[:, None, None]
    return Flow(cosine / counts, distance / counts, (int(tokens[0]), int(tokens[1])))


def _add(sums: FloatArray, values: Tensor, first: int) -> None:
    """Add `values` [T] to the sums [2] of answer rows, which begin at `first`, and of prompt rows."""
    sums += (float(values[first:].sum()), float(values[:first].sum()))
