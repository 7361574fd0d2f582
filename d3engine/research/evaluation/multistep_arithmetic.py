"""Multi-step arithmetic, kin of the BBH task: nested sums, differences and products of small whole numbers.

As with the boolean expressions, one operation per step from the inside out; every operation stands in
brackets, so that no rule of precedence is needed.
"""

from __future__ import annotations

import operator
import random

from d3engine.research.evaluation.generated import GeneratedProblem, worked

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
MIN_OPERATIONS, MAX_OPERATIONS = 2, 5
LARGEST = 9


def generate(rng: random.Random, fewest: int = MIN_OPERATIONS, most: int = MAX_OPERATIONS) -> GeneratedProblem:
    """So many operations on numbers from -9 to 9."""
    steps: list[str] = []
    text, value = _expression(rng, rng.randint(fewest, most), steps)
    return worked(f"What is {text}?", steps, str(value))


def _expression(rng: random.Random, operations: int, steps: list[str]) -> tuple[str, int]:
    """The text of a random expression and its value; `steps` gets its working."""
    if operations == 0:
        value = rng.randint(-LARGEST, LARGEST)
        return str(value), value
    left_size = rng.randint(0, operations - 1)
    left, left_value = _expression(rng, left_size, steps)
    right, right_value = _expression(rng, operations - 1 - left_size, steps)
    sign = rng.choice(list(OPERATIONS))
    value = OPERATIONS[sign](left_value, right_value)
    steps.append(f"{left_value} {sign} {right_value} = {value}.")
    return f"({left} {sign} {right})", value
