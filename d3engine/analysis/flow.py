"""What each layer does to the residual stream (the D3 paper's Figure 3).

The one idea: a block, its attention and its MLP each take the stream in and give it back changed. Cosine similarity
near 1 and a small distance say that little changed, so that little is lost if the layer is skipped; that is the
argument for a window of *flex layers*, and here it can be looked at for any model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from d3engine.analysis.answers import Answered
from d3engine.analysis.observer import Observer
from d3engine.analysis.report import Table

PARTS = ("block", "attention", "mlp")
NAMES = ("block", "attention", "MLP")
ROWS = ("answer", "prompt")

FloatArray = npt.NDArray[np.float64]


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
        header = (
            "layer",
            "influence",
            *(f"cosine, {part}" for part in NAMES),
            *(f"distance, {part}" for part in NAMES),
        )
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
        return Table(title, header, rows)

    def as_dict(self) -> dict[str, Any]:
        """By rows, measure and part: a list over the layers."""
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
