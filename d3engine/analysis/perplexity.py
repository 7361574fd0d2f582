"""Perplexity along an answer (the D3 paper's Figure 2b): are later tokens easier to predict?

The one idea: the perplexity of a generation step is that of all answers' tokens there, exp of the mean of -log p, at
full depth. The text is the model's own greedy answer, so it says how sure the model is, not how right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from d3engine.analysis import along
from d3engine.analysis.along import in_words, mean_at, with_arm
from d3engine.analysis.answers import Answered
from d3engine.analysis.layers import Mean
from d3engine.analysis.report import STEP, Table, counted, step_groups, steps_in_words

FloatArray = npt.NDArray[np.float64]


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
        """A row for each group of steps, and one for all tokens."""
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
        """For each answer -log p of its tokens."""
        return [-np.array(answer, dtype=np.float64) for answer in self.logprobs]

    def as_dict(self) -> dict[str, Any]:
        """By single steps, over all tokens, and late ones less early ones."""
        values, counts = self.by_step()
        return {
            "answers": len(self.logprobs),
            "perplexity": float(np.exp(self.at(range(self.longest))[1])),
            "late_less_early": along.as_dict(self._surprises()),
            "steps": [
                {"step": step, "answers": int(count), "perplexity": float(np.exp(value)), "mean_negative_log_p": value}
                for step, (value, count) in enumerate(zip(values.tolist(), counts.tolist(), strict=True))
            ],
        }


def measure_perplexity(answered: Sequence[Answered]) -> Perplexity:
    """From the log-probabilities that the engine gave the answers' own tokens."""
    return Perplexity([one.logprobs for one in answered])
