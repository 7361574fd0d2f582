"""Word sorting, kin of the BBH task: a list of words into alphabetical order.

The answer is copying, and each next word is one of fewer. Depth decay assumes that later tokens are
easier; here is a task to try that on.
"""

from __future__ import annotations

import random

from d3engine.research.evaluation.generated import GeneratedProblem, worked

MIN_WORDS, MAX_WORDS = 3, 10

WORDS = (
    "acorn", "anchor", "apple", "arrow", "badge", "basket", "beacon", "blanket", "bottle", "bridge",
    "button", "cabin", "candle", "canyon", "carpet", "castle", "cellar", "chalk", "cherry", "circle",
    "clover", "copper", "corner", "cotton", "cradle", "dagger", "dancer", "desert", "dinner", "dragon",
    "eagle", "echo", "ember", "engine", "fabric", "falcon", "feather", "fence", "flute", "forest",
    "garden", "ginger", "glacier", "granite", "hammer", "harbor", "hazel", "helmet", "island", "ivory",
    "jacket", "jungle", "kettle", "kitchen", "ladder", "lantern", "lemon", "linen", "magnet", "maple",
    "marble", "meadow", "mirror", "needle", "nickel", "oasis", "orchard", "otter", "paddle", "parrot",
    "pepper", "pillow", "planet", "quartz", "quilt", "rabbit", "ribbon", "river", "saddle", "sailor",
    "silver", "spider", "summer", "tablet", "temple", "thunder", "timber", "tunnel", "umbrella", "valley",
    "velvet", "violin", "walnut", "window", "winter", "wonder", "yarn", "yellow", "zebra", "zipper",
)  # fmt: skip


def generate(rng: random.Random, fewest: int = MIN_WORDS, most: int = MAX_WORDS) -> GeneratedProblem:
    """So many different words."""
    words = rng.sample(WORDS, rng.randint(fewest, most))
    return worked(f"Sort these words: {' '.join(words)}.", [], " ".join(sorted(words)))
