"""The tasks that a program writes, by name: no data set is needed, and the test split of each is fixed by its seed.

The one idea: a task is a function from a random generator to a problem. The bundled model was trained on the word
problems alone; the others are for models that can read a few examples (`shots`), or for one trained on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Protocol

from d3engine.errors import require, require_integer
from d3engine.evaluation import (
    boolean_expressions,
    dyck_languages,
    multistep_arithmetic,
    object_counting,
    tracking_shuffled_objects,
    word_sorting,
)
from d3engine.evaluation.benchmark import Asked, Benchmark, Question
from d3engine.evaluation.generated import Generator, problems_of
from d3engine.evaluation.word_problems import Split, problems

WORD_PROBLEMS = "word-problems"

GENERATORS: Mapping[str, Generator] = MappingProxyType(
    {
        "boolean-expressions": boolean_expressions.generate,
        "word-sorting": word_sorting.generate,
        "dyck-languages": dyck_languages.generate,
        "object-counting": object_counting.generate,
        "tracking-shuffled-objects": tracking_shuffled_objects.generate,
        "multistep-arithmetic": multistep_arithmetic.generate,
    }
)

NAMES = (WORD_PROBLEMS, *GENERATORS)

MAX_TOKENS = 128
MAX_PROBLEMS = 100_000
MAX_SHOTS = 64


class SolvedQuestion(Question, Protocol):
    """A question that knows its solution, and so can be an example."""

    @property
    def question(self) -> str:
        """The question itself, without the form of the prompt."""

    @property
    def solution(self) -> str:
        """What the model should say: the working, and the answer."""

    @property
    def solved(self) -> str:
        """The question with its answer."""


def all_problems(name: str, split: Split, seed: int) -> Iterator[SolvedQuestion]:
    """Problems of a task for ever, the same for the same seed; no two splits share a question."""
    require(name in NAMES, "task", name, f"one of {', '.join(NAMES)}")
    if name == WORD_PROBLEMS:
        return iter(problems(split, seed))
    return problems_of(GENERATORS[name], name, split, seed)


def different_problems(name: str, split: Split, seed: int, limit: int) -> list[SolvedQuestion]:
    """The first `limit` different problems of a split."""
    require_integer("limit", limit, 1, MAX_PROBLEMS)
    by_question: dict[str, SolvedQuestion] = {}
    for problem in islice(all_problems(name, split, seed), 10 * limit):
        by_question.setdefault(problem.question, problem)
        if len(by_question) == limit:
            break
    return list(by_question.values())


def procedural(name: str, *, split: Split, seed: int, limit: int, shots: int = 0) -> Benchmark:
    """A task as a benchmark; `shots` examples of the training split, the same for all, stand before each question."""
    require_integer("--num-fewshot", shots, 0, MAX_SHOTS)
    found: Sequence[Question] = different_problems(name, split, seed, limit)
    if shots:
        solved = [example.solved for example in different_problems(name, "train", seed, shots)]
        found = [Asked("\n\n".join([*solved, question.prompt]), question) for question in found]
    about = f"{split} split, seed {seed}" + (f", {shots} shots" if shots else "")
    return Benchmark(name, about, {name: found}, MAX_TOKENS, ("\nQuestion:",) if shots else ())
