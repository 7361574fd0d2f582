"""The tasks that a program writes, by name: no data set is needed, and the test split of each is fixed by its seed.

A task is a function from a random generator and a size to a problem. The bundled model was trained on the
word problems alone; the others are for models that can read a few examples (`shots`), or for one trained on them. What
is too hard for a model says nothing of a policy, so a size may stand behind a name: `word-sorting:3`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import TypeAlias

from d3engine.errors import require, require_integer
from d3engine.research.evaluation import generated, word_problems
from d3engine.research.evaluation.benchmark import Asked, Benchmark, Question
from d3engine.research.evaluation.generated import GeneratedProblem
from d3engine.research.evaluation.word_problems import Problem, Split, problems, split_of

WORD_PROBLEMS = "word-problems"

GENERATORS: Mapping[str, Callable[[random.Random, int, int], GeneratedProblem]] = {
    "boolean-expressions": generated.boolean_expressions,
    "word-sorting": generated.word_sorting,
    "dyck-languages": generated.dyck_languages,
    "object-counting": generated.object_counting,
    "tracking-shuffled-objects": generated.tracking_shuffled_objects,
    "multistep-arithmetic": generated.multistep_arithmetic,
}
"""Each makes a random problem of any split, of a fewest to a most of what its task counts: words, swaps, operations."""

NAMES = (WORD_PROBLEMS, *GENERATORS)


@dataclass(frozen=True)
class Sizes:
    """How large the questions of a task are: the number `counted`, from `fewest` to `most` unless a user says so.

    A user may say from `least`, below which a split has hardly a question, to `largest`.
    """

    counted: str
    fewest: int
    most: int
    least: int
    largest: int


SIZES: Mapping[str, Sizes] = {
    WORD_PROBLEMS: Sizes("steps", word_problems.MIN_STEPS, word_problems.MAX_STEPS, 1, 20),
    "boolean-expressions": Sizes("operators", 2, 6, 2, 20),
    "word-sorting": Sizes("words", 3, 10, 2, len(generated.WORDS)),
    "dyck-languages": Sizes("brackets", 4, 24, 4, 100),
    "object-counting": Sizes("things", 3, 8, 2, 16),
    "tracking-shuffled-objects": Sizes("swaps", 2, 6, 1, 20),
    "multistep-arithmetic": Sizes("operations", 2, 5, 1, 20),
}

KNOWN = f"one of {', '.join(NAMES)}, with a size behind it if one is wanted (word-sorting:3, word-sorting:3-5)"
"""What a generated task may be called, for errors."""

MAX_TOKENS = 128
MAX_PROBLEMS = 100_000
MAX_SHOTS = 64


SolvedQuestion: TypeAlias = Problem | GeneratedProblem
"""A question that knows its solution, and so can be an example."""


def is_generated(name: str) -> bool:
    """Whether a program writes the task of this name, whatever size it asks for."""
    return name.partition(":")[0] in NAMES


def named(name: str) -> tuple[str, int, int]:
    """The task, and the fewest and the most of what it counts: "word-sorting", 3 and 5 of `word-sorting:3-5`.

    Raises `InvalidValueError` for another task, and for a size that this one does not have.
    """
    task, colon, size = name.partition(":")
    require(is_generated(name), "task", name, KNOWN)
    sizes = SIZES[task]
    if not colon:
        return task, sizes.fewest, sizes.most
    found = re.fullmatch(r"([0-9]{1,3})(?:-([0-9]{1,3}))?", size)
    fewest, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    allowed = f"{task}:N or {task}:N-M, of {sizes.least} to {sizes.largest} {sizes.counted}"
    require(sizes.least <= fewest <= most <= sizes.largest, "task", name, allowed)
    return task, fewest, most


def all_problems(name: str, split: Split, seed: int) -> Iterator[SolvedQuestion]:
    """Problems of a task for ever, the same for the same seed; no two splits share a question."""
    task, fewest, most = named(name)
    if task == WORD_PROBLEMS:
        return problems(split, seed, fewest, most)
    rng, generate = random.Random(f"{task}-{split}-{seed}"), GENERATORS[task]
    every = (generate(rng, fewest, most) for _ in count())
    return (problem for problem in every if split_of(problem.question) == split)


def different_problems(name: str, split: Split, seed: int, limit: int) -> list[SolvedQuestion]:
    """The first `limit` different problems of a split; fewer where a small size has no more."""
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
