"""Conversations that a chat model makes up itself, its turn of the user sampled at
temperature 1 and answered at full depth (Xu et al. 2024, "Magpie")."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from d3engine.depth import DepthPolicy, FullDepth
from d3engine.engine.engine import Engine
from d3engine.errors import require
from d3engine.request.params import SamplingParams
from d3engine.research.analysis.answers import same_beginning
from d3engine.research.analysis.layers import Mean, mean_over
from d3engine.research.analysis.report import Table, counted
from d3engine.research.bridges.judging import Reading
from d3engine.research.evaluation.baselines import open_bridges
from d3engine.utils.progress import progress_bar

QUESTION_TOKENS = 64
"""A question is at most so long."""

BATCH = 64
"""Questions that are sampled at once."""

ATTEMPTS = 4
"""Samples at most for each answer that is wanted; some never end."""


def made_up_prompts(engine: Engine, count: int, seed: int) -> list[str]:
    """`count` different questions of a user's, or fewer where the model repeats itself; the same for the same seed.

    Raises `InvalidValueError` for a model without a chat template, and for one that ends no question.
    """
    return [question for batch in made_up_batches(engine, count, seed) for question in batch]


def made_up_batches(engine: Engine, count: int, seed: int) -> Iterator[list[str]]:
    """As `made_up_prompts`, batch by batch."""
    head, tail = _around_a_question(engine)
    found: dict[str, None] = {}
    with progress_bar("questions made up", "question", count) as bar:
        for first in range(0, ATTEMPTS * count, BATCH):
            if len(found) >= count:
                break
            before = len(found)
            seeds = range(first, min(first + BATCH, ATTEMPTS * count))
            params = [
                SamplingParams(
                    temperature=1.0,
                    max_tokens=QUESTION_TOKENS,
                    stop_token_ids=tail,
                    depth=FullDepth(),
                    seed=seed * 2**20 + number,
                )
                for number in seeds
            ]
            for output in engine.generate([{"prompt_token_ids": head}] * len(params), params, use_tqdm=False):
                ended, text = output.outputs[0].finish_reason == "stop", output.outputs[0].text.strip()
                if ended and text and text not in found:
                    found[text] = None
                    bar.update()
            if len(found) > before:
                yield list(found)[before:count]
    require(len(found) > 0, "--task", "chat", "that of a model which ends the questions that it makes up")


def _around_a_question(engine: Engine) -> tuple[list[int], list[int]]:
    """The token ids before every first question of a conversation, and the one behind it."""
    one, other = (
        engine.chat_prompt([{"role": "user", "content": content}])["prompt_token_ids"] for content in ("How", "7")
    )
    return one[: same_beginning(one, other)], one[len(one) - same_beginning(one[::-1], other[::-1]) :][:1]


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
        """The mean share of the first `first` tokens of full depth's answers before these part from them."""
        shares = [
            same_beginning(own, one[:first]) / len(one[:first]) for own, one in zip(self.answers, full, strict=True)
        ]
        return mean_over(np.array([share]) for share in shares)

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
        kept = (*(f"{mean.value:.1%}" for mean in means), means[-1].interval)
        return one.name, *kept, f"{one.distinct:.3f}", f"{one.circling:.0%}"


def _distinct(answer: Sequence[int]) -> float:
    """1 for an answer that is too short to repeat a run."""
    runs = [tuple(answer[at : at + GRAM]) for at in range(len(answer) - GRAM + 1)]
    return len(set(runs)) / len(runs) if runs else 1.0
