"""Dyck languages, kin of the BBH task: close the brackets that a sequence has opened.

The working names what is still open, outermost first, and the answer is its mirror image.
"""

from __future__ import annotations

import random

from d3engine.research.evaluation.generated import GeneratedProblem, worked

CLOSING = {"(": ")", "[": "]", "{": "}", "<": ">"}
MIN_LENGTH, MAX_LENGTH = 4, 24


def generate(rng: random.Random, fewest: int = MIN_LENGTH, most: int = MAX_LENGTH) -> GeneratedProblem:
    """A beginning of a well-formed sequence, of so many brackets or one more, that leaves at least one open."""
    sequence, still_open = _beginning(rng, rng.randint(fewest, most))
    closed = [CLOSING[bracket] for bracket in reversed(still_open)]
    steps = [f"Open: {' '.join(still_open)} ."]
    return worked(f"Close the brackets: {' '.join(sequence)}", steps, " ".join(closed))


def _beginning(rng: random.Random, length: int) -> tuple[list[str], list[str]]:
    sequence: list[str] = []
    still_open: list[str] = []
    while len(sequence) < length or not still_open:
        if still_open and rng.random() < 0.45:
            sequence.append(CLOSING[still_open.pop()])
        else:
            still_open.append(rng.choice(list(CLOSING)))
            sequence.append(still_open[-1])
    return sequence, still_open
