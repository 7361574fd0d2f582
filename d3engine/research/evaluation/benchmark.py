"""A question, with a prompt and a judgement, and a benchmark of many: generated or
published problems alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import Protocol

from d3engine.errors import InvalidValueError


class Question(Protocol):
    """One prompt and the rule that judges its answer."""

    @property
    def prompt(self) -> str:
        """What the model is given."""

    def is_right(self, answer: str) -> bool:
        """Whether the generated text answers the question exactly."""


class Verdict(StrEnum):
    """What became of an answer; of code also why it is not right."""

    RIGHT = "right"
    WRONG = "wrong"
    NO_CODE = "no code"
    ERROR = "error"
    TIME = "time"


def verdict_of(question: Question, answer: str) -> Verdict:
    """The question's own verdict, where it has one, or else right or wrong."""
    own: Callable[[str], Verdict] | None = getattr(question, "verdict", None)
    if own is not None:
        return own(answer)
    return Verdict.RIGHT if question.is_right(answer) else Verdict.WRONG


@dataclass(frozen=True)
class Asked:
    """A question behind other text, such as solved `examples`; `task` names its own of a benchmark that has several."""

    prompt: str
    question: Question
    task: str = ""
    examples: tuple[Question, ...] = ()

    def is_right(self, answer: str) -> bool:
        return self.question.is_right(answer)


@dataclass(frozen=True)
class Benchmark:
    """Questions by task, answered with the same limits.

    `about` says which questions these are (split, shots, seed) for people; `max_tokens` and `stop` are the
    benchmark's own, where a user names no others.
    """

    name: str
    about: str
    tasks: Mapping[str, Sequence[Question]]
    max_tokens: int
    stop: tuple[str, ...] = ()

    @property
    def questions(self) -> list[Question]:
        return list(chain.from_iterable(self.tasks.values()))

    def by_task(self, right: Sequence[bool]) -> dict[str, tuple[bool, ...]]:
        """`right`, in the order of `questions`, cut into tasks."""
        found, place = {}, 0
        for task, questions in self.tasks.items():
            found[task] = tuple(right[place : place + len(questions)])
            place += len(questions)
        return found


def check_prompts(benchmarks: Sequence[Benchmark], length: Callable[[Question], int], max_model_len: int) -> None:
    """Refuse, by benchmark, task and number from 1, the first prompt that leaves no room for a token to follow.

    `length` counts the tokens of a question's prompt.
    """
    for benchmark in benchmarks:
        for task, questions in benchmark.tasks.items():
            of = benchmark.name if task == benchmark.name else f"{benchmark.name}, {task}"
            for number, question in enumerate(questions, start=1):
                tokens = length(question)
                if tokens >= max_model_len:
                    allowed = f"shorter than max_model_len={max_model_len} (as with fewer examples, --num-fewshot)"
                    raise InvalidValueError(f"prompt of question {number} of {of}", f"{tokens} tokens", allowed)
