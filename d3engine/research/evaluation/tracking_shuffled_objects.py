"""Tracking shuffled objects, kin of the BBH task: who holds what after some swaps.

The working follows only the pair of each swap, so its length grows with the swaps alone.
"""

from __future__ import annotations

import random

from d3engine.research.evaluation.generated import GeneratedProblem, worked
from d3engine.research.evaluation.word_problems import NAMES

OBJECTS = ("ball", "book", "card", "coin", "cup", "hat", "key", "kite", "pen", "shell")
MIN_PEOPLE, MAX_PEOPLE = 3, 5
MIN_SWAPS, MAX_SWAPS = 2, 6


def generate(rng: random.Random, fewest: int = MIN_SWAPS, most: int = MAX_SWAPS) -> GeneratedProblem:
    """Three to five people with a thing each, and so many swaps."""
    people = rng.sample(NAMES, rng.randint(MIN_PEOPLE, MAX_PEOPLE))
    holds = dict(zip(people, rng.sample(OBJECTS, len(people)), strict=True))
    sentences = [f"{person} has the {thing}." for person, thing in holds.items()]
    steps = []
    for _ in range(rng.randint(fewest, most)):
        first, second = rng.sample(people, 2)
        holds[first], holds[second] = holds[second], holds[first]
        sentences.append(f"{first} and {second} swap.")
        steps.append(f"{first} has the {holds[first]}, {second} the {holds[second]}.")
    asked = rng.choice(people)
    return worked(f"{' '.join(sentences)} What does {asked} have?", steps, holds[asked])
