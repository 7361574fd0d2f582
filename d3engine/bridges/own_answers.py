"""What policies answer by themselves, beside full depth's answers to the same prompts.

The one idea: where a given text is read, an error stays where it was made; in an answer of the policy's own every later
token reads it. So what is counted is how long an answer stays full depth's, and whether it goes round in circles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from d3engine.analysis.beginning import same_beginning
from d3engine.analysis.layers import Mean, mean_of_clusters
from d3engine.analysis.report import Table, counted
from d3engine.bridges.judging import Reading
from d3engine.depth import DepthPolicy
from d3engine.engine import Engine
from d3engine.evaluation.bridged import open_bridges
from d3engine.request.params import SamplingParams

FIRST = (32, 64)
"""Of these many first tokens of full depth's answer, the share before the two part."""

GRAM = 4
"""Tokens in a row whose repetition is counted."""

CIRCLES = 0.7
"""An answer with no larger part of different runs goes round in circles."""


def own_answers(engine: Engine, policy: DepthPolicy, readings: Sequence[Reading]) -> list[list[int]]:
    """What a policy answers, greedily, to the prompts of these texts; as many tokens at most as the longest has.

    The engine may open the file of bridges that the policy names.
    """
    open_bridges(engine, [policy])
    longest = max(len(one.token_ids) - one.prompt_length for one in readings)
    params = SamplingParams(temperature=0.0, max_tokens=longest, depth=policy)
    prompts = [{"prompt_token_ids": list(one.token_ids[: one.prompt_length])} for one in readings]
    return [output.outputs[0].token_ids for output in engine.generate(prompts, params, use_tqdm=False)]


@dataclass(frozen=True)
class OwnAnswers:
    """The answers of one policy, token ids each, in the order of the prompts."""

    name: str
    answers: Sequence[Sequence[int]]

    def kept(self, full: Sequence[Sequence[int]], first: int) -> Mean:
        """The mean share of the first so many tokens of full depth's answers before these part from them."""
        shares = [
            same_beginning(own, one[:first]) / len(one[:first]) for own, one in zip(self.answers, full, strict=True)
        ]
        return mean_of_clusters(np.array(shares), np.ones(len(shares), dtype=np.int64))

    @property
    def distinct(self) -> float:
        """Of the runs of `GRAM` tokens in an answer the part that are different, on average over answers."""
        return float(np.mean([_distinct(one) for one in self.answers]))

    @property
    def circling(self) -> float:
        """The share of answers of which no more than `CIRCLES` are different runs."""
        return float(np.mean([_distinct(one) <= CIRCLES for one in self.answers]))


@dataclass(frozen=True)
class OwnComparison:
    """Policies beside full depth; none of its answers is empty."""

    full: OwnAnswers
    policies: Sequence[OwnAnswers]

    def table(self) -> Table:
        """A row for full depth, and one for each policy."""
        header = (
            "policy",
            *(f"first {first} tokens kept" for first in FIRST),
            "95 %",
            f"distinct {GRAM}-grams",
            "in circles",
        )
        rows = [self._row(one) for one in (self.full, *self.policies)]
        tokens = sum(map(len, self.full.answers))
        about = f"{counted(len(self.full.answers), 'prompt')}, {tokens:,} tokens of full depth's"
        return Table(f"Answers of their own: {about}", header, rows)

    def as_dict(self) -> dict[str, Any]:
        """The same for machines."""
        return {
            "prompts": len(self.full.answers),
            "policies": [
                {
                    "policy": one.name,
                    **{f"kept_of_{first}": one.kept(self.full.answers, first).value for first in FIRST},
                    "distinct": one.distinct,
                    "circling": one.circling,
                }
                for one in (self.full, *self.policies)
            ],
        }

    def _row(self, one: OwnAnswers) -> tuple[str, ...]:
        means = [one.kept(self.full.answers, first) for first in FIRST]
        low, high = means[-1].value - means[-1].arm, means[-1].value + means[-1].arm
        kept = (*(f"{mean.value:.1%}" for mean in means), f"{low:.1%} to {high:.1%}")
        return one.name, *kept, f"{one.distinct:.3f}", f"{one.circling:.0%}"


def _distinct(answer: Sequence[int]) -> float:
    """1 for an answer that is too short to repeat a run."""
    runs = [tuple(answer[at : at + GRAM]) for at in range(len(answer) - GRAM + 1)]
    return len(set(runs)) / len(runs) if runs else 1.0
