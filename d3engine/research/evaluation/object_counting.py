"""Object counting, kin of the BBH task: how many of one kind there are in a list of things.

The working passes over the list in its order and keeps a running total, of the kind asked for alone.
"""

from __future__ import annotations

import random

from d3engine.research.evaluation.generated import GeneratedProblem, worked

KINDS = {
    "fruits": ("apple", "banana", "grape", "lemon", "melon", "peach", "pear", "plum"),
    "animals": ("bear", "cat", "dog", "duck", "frog", "goat", "horse", "mouse"),
    "instruments": ("cello", "drum", "flute", "guitar", "harp", "piano", "trumpet", "violin"),
    "tools": ("axe", "chisel", "drill", "hammer", "ladder", "rake", "saw", "shovel"),
}
PLURALS = {"peach": "peaches", "mouse": "mice"}
NUMBERS = ("a", "two", "three", "four", "five", "six")
MIN_THINGS, MAX_THINGS = 3, 8


def generate(rng: random.Random, fewest: int = MIN_THINGS, most: int = MAX_THINGS) -> GeneratedProblem:
    """So many things, up to six of each, of two kinds, one of which is asked for."""
    asked, other = rng.sample(sorted(KINDS), 2)
    things = rng.sample([*KINDS[asked], *KINDS[other]], rng.randint(fewest, most))
    counts = [rng.randint(1, len(NUMBERS)) for _ in things]
    total, steps = 0, []
    for thing, count in zip(things, counts, strict=True):
        if thing in KINDS[asked]:
            steps.append(f"{total} + {count} = {total + count}.")
            total += count
    *first, last = [_named(thing, count) for thing, count in zip(things, counts, strict=True)]
    return worked(f"I have {', '.join(first)} and {last}. How many {asked} do I have?", steps, str(total))


def _named(thing: str, count: int) -> str:
    if count > 1:
        return f"{NUMBERS[count - 1]} {PLURALS.get(thing, thing + 's')}"
    return f"{'an' if thing[0] in 'aeiou' else 'a'} {thing}"
