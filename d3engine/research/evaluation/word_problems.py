"""Procedural word problems: the task the bundled demo model is trained and measured on.

A problem follows one person's pile of things through two to six events and asks how many are left. The worked
answer restates the running total at every step and ends in ``#### <number>``, the convention of GSM8K. Every
number is within 0-99, so that a tokenizer can give each its own piece. Everything follows from the seed.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "validation", "test"]

PROMPT_PREFIX = "Question: "
PROMPT_SUFFIX = "\nAnswer:"
MAX_NUMBER = 99
MIN_STEPS, MAX_STEPS = 2, 6

NAMES = (
    "Nina", "Tom", "Ana", "Ben", "Eva", "Leo", "Mia", "Max", "Zoe", "Sam",
    "Ida", "Jon", "Amy", "Dan", "Kim", "Lee", "Ruth", "Omar", "Raj", "Lily",
)  # fmt: skip
ITEMS = (
    "marbles", "stamps", "shells", "coins", "cards", "pens", "apples", "books", "beads", "buttons",
    "stickers", "cookies", "nuts", "toys", "keys", "rocks", "plums", "pears", "cups", "hats",
)  # fmt: skip

OPENINGS = ("{name} has {n} {items}.", "{name} starts with {n} {items}.")
QUESTIONS = ("How many {items} does {name} have now?", "How many {items} does {name} have in the end?")
GAINS = (
    "{name} finds {n}.",
    "{name} buys {n}.",
    "{name} wins {n}.",
    "{name} makes {n} more.",
    "{name} gets {n} from {other}.",
    "{other} gives {name} {n}.",
    "{other} brings {n} more.",
    "Then {n} more arrive.",
)
LOSSES = (
    "{name} loses {n}.",
    "{name} sells {n}.",
    "{name} breaks {n}.",
    "{name} uses {n}.",
    "{name} gives {other} {n}.",
    "{name} gives {n} to {other}.",
    "{other} takes {n}.",
    "Then {n} are gone.",
)
DOUBLINGS = ("{name} doubles the {items}.", "{other} gives {name} as many again.")
GIVEN, GIVES = ("{other} gives {name} {n}.",), ("{name} gives {other} {n}.",)  # of these, who gives alone tells a gain
HALVINGS = ("{name} gives half to {other}.", "{other} takes half.")

# Which split a question belongs to is a property of its text: no seed can move it.
_SPLIT_BUCKETS: dict[Split, range] = {
    "test": range(0, 5),
    "validation": range(5, 10),
    "train": range(10, 100),
}
_ANSWER = re.compile(r"####\s*(-?\d+)")


@dataclass(frozen=True)
class Problem:
    """A question, its worked answer (ending in ``#### <answer>``) and the answer as a number."""

    question: str
    solution: str
    answer: int

    @property
    def prompt(self) -> str:
        return format_prompt(self.question)

    @property
    def solved(self) -> str:
        return self.prompt + format_completion(self)

    def is_right(self, answer: str) -> bool:
        """Whether a completion ends in the right number."""
        return extract_answer(answer) == self.answer


def problems(
    split: Split, seed: int, fewest: int = MIN_STEPS, most: int = MAX_STEPS, giver_share: float = 0.0
) -> Iterator[Problem]:
    """Yields problems of one split for ever, the same for the same seed. The splits share no question.

    A problem has `fewest` to `most` steps, and of its gains and losses `giver_share` more are given by who gives alone;
    what models are measured on has the defaults.
    """
    rng = random.Random(f"{split}-{seed}")
    while True:
        problem = generate_problem(rng, fewest, most, giver_share)
        if split_of(problem.question) == split:
            yield problem


def generate_problem(
    rng: random.Random, fewest: int = MIN_STEPS, most: int = MAX_STEPS, giver_share: float = 0.0
) -> Problem:
    """Returns a random problem of any split, of `fewest` to `most` steps; `giver_share` as in `problems`."""
    name, items = rng.choice(NAMES), rng.choice(ITEMS)
    total = rng.randint(2, 60)
    sentences = [rng.choice(OPENINGS).format(name=name, n=total, items=items)]
    working: list[str] = []
    for _ in range(rng.randint(fewest, most)):
        other = rng.choice([candidate for candidate in NAMES if candidate != name])
        template, line, operand, total = _event(rng, total, giver_share)
        sentences.append(template.format(name=name, other=other, n=operand, items=items))
        working.append(line)
    sentences.append(rng.choice(QUESTIONS).format(name=name, items=items))
    return Problem(" ".join(sentences), " ".join([*working, f"#### {total}"]), total)


def _event(rng: random.Random, total: int, giver_share: float) -> tuple[str, str, int, int]:
    """Returns (sentence template, line of working, operand, new total) of one event within 0-99."""
    kind = rng.random()
    if kind < 0.1 and 1 <= total <= MAX_NUMBER // 2:
        line = f"Twice {total} is {total} * 2 = {total * 2}."
        return rng.choice(DOUBLINGS), line, 2, total * 2
    if kind < 0.2 and total >= 2 and total % 2 == 0:
        return rng.choice(HALVINGS), f"Half of {total} is {total} / 2 = {total // 2}.", 2, total // 2
    gain = rng.random() < 0.5
    if total == 0 or total == MAX_NUMBER:  # only one direction is left
        gain = total == 0
    operand = _operand(rng, MAX_NUMBER - total if gain else total)
    giver_tells = bool(giver_share) and rng.random() < giver_share
    if gain:
        after = total + operand
        return (
            rng.choice(GIVEN if giver_tells else GAINS),
            f"Adding {operand} makes {total} + {operand} = {after}.",
            operand,
            after,
        )
    after = total - operand
    return (
        rng.choice(GIVES if giver_tells else LOSSES),
        f"Taking {operand} leaves {total} - {operand} = {after}.",
        operand,
        after,
    )


def _operand(rng: random.Random, limit: int) -> int:
    """Returns an operand in 1..limit, small ones more often than large ones."""
    largest = 9 if rng.random() < 0.65 else 40
    return rng.randint(1, min(largest, limit))


def split_of(question: str) -> Split:
    bucket = int.from_bytes(hashlib.sha256(question.encode()).digest()[:8], "big") % 100
    return next(split for split, buckets in _SPLIT_BUCKETS.items() if bucket in buckets)


def format_prompt(question: str) -> str:
    """Returns the prompt of a question; the model's completion is a space and the solution."""
    return f"{PROMPT_PREFIX}{question}{PROMPT_SUFFIX}"


def format_completion(problem: Problem) -> str:
    return f" {problem.solution}"


def extract_answer(text: str) -> int | None:
    """Returns the number after the first ``####`` of a completion, or None where there is none."""
    match = _ANSWER.search(text)
    return int(match.group(1)) if match else None
