"""Problems that a program writes: the form they share, and the splits.

Which split a question belongs to is a property of its text, as with the word problems, so that no seed
can move one from training into the test.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from d3engine.research.evaluation.word_problems import Split, format_prompt, split_of

MARK = "####"


@dataclass(frozen=True)
class GeneratedProblem:
    """A question, its worked answer (ending in "#### <answer>") and the answer."""

    question: str
    solution: str
    answer: str

    @property
    def prompt(self) -> str:
        return format_prompt(self.question)

    @property
    def solved(self) -> str:
        """The question with its answer, as an example."""
        return f"{self.prompt} {self.solution}"

    def is_right(self, answer: str) -> bool:
        return final_answer(answer) == self.answer


class Generator(Protocol):
    """Makes a random problem of any split, of `fewest` to `most` of what its task counts: words, swaps, operations."""

    def __call__(self, rng: random.Random, fewest: int = ..., most: int = ...) -> GeneratedProblem: ...


def worked(question: str, steps: list[str], answer: str) -> GeneratedProblem:
    """The problem whose solution is the steps and then the answer behind the mark."""
    return GeneratedProblem(question, " ".join([*steps, f"{MARK} {answer}"]), answer)


def final_answer(text: str) -> str | None:
    """What stands behind the first mark, to the end of its line; None without a mark."""
    _, mark, rest = text.partition(MARK)
    return rest.partition("\n")[0].strip() if mark else None


def problems_of(
    generate: Callable[[random.Random], GeneratedProblem], name: str, split: Split, seed: int
) -> Iterator[GeneratedProblem]:
    """Problems of one split for ever, the same for the same name and seed."""
    rng = random.Random(f"{name}-{split}-{seed}")
    while True:
        problem = generate(rng)
        if split_of(problem.question) == split:
            yield problem
