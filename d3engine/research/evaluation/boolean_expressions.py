"""Boolean expressions, kin of the BBH task: "not ( True and False ) or True is".

An expression is rewritten from the inside out, one operator per step, and every step is written down.
"""

from __future__ import annotations

import random

from d3engine.research.evaluation.generated import GeneratedProblem, worked

MIN_OPERATORS, MAX_OPERATORS = 2, 6


def generate(rng: random.Random, fewest: int = MIN_OPERATORS, most: int = MAX_OPERATORS) -> GeneratedProblem:
    """A random expression of so many operators; "not" binds tighter than "and", "and" tighter than "or"."""
    steps: list[str] = []
    text, value = _expression(rng, rng.randint(fewest, most), steps)
    return worked(f"What is {text}?", steps, str(value))


def _expression(rng: random.Random, operators: int, steps: list[str]) -> tuple[str, bool]:
    """The text of a random expression, fit to stand beside any operator, and its value; `steps` gets its working."""
    if operators == 0:
        value = rng.random() < 0.5
        return str(value), value
    operator = rng.choice(("not", "and", "or"))
    if operator == "not":
        inner, inner_value = _expression(rng, operators - 1, steps)
        value = not inner_value
        steps.append(f"not {inner_value} is {value}.")
        return f"not {inner}", value
    left_size = rng.randint(0, operators - 1)
    left, left_value = _expression(rng, left_size, steps)
    right, right_value = _expression(rng, operators - 1 - left_size, steps)
    value = (left_value and right_value) if operator == "and" else (left_value or right_value)
    steps.append(f"{left_value} {operator} {right_value} is {value}.")
    return f"( {left} {operator} {right} )", value
