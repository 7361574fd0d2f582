"""Whether full depth knows enough of a task for a small loss to mean anything.

The one idea: whoever knows nothing has nothing to lose, so any setting would pass the test. A setting is worth
certifying where a loss of the whole tolerance is a small part of what full depth knows, beyond what one and the same
answer to every question of a task would get right.
"""

from __future__ import annotations

from math import floor
from statistics import NormalDist

from d3engine.calibration.noninferiority import Tolerance
from d3engine.errors import require_number
from d3engine.evaluation.accuracy import wilson_interval

FLOOR = 5
"""Full depth's lower bound must be above so many tolerances: at least four fifths of what it knows then stay."""


def check_tolerance(tolerance: Tolerance) -> None:
    """Refuse one that not even a perfect full depth is so many times above."""
    require_number("tolerance", tolerance.loss, 0, 1 / FLOOR, open_low=True, open_high=True)


def fewest_to_know(tolerance: Tolerance) -> int:
    """The problems after which the lower bound can be high enough: if full depth is right on all of them."""
    check_tolerance(tolerance)
    square = NormalDist().inv_cdf(0.975) ** 2
    return floor(square * FLOOR * tolerance.loss / (1 - FLOOR * tolerance.loss)) + 1


def needed(exact_match: float, tolerance: Tolerance, guess: float) -> float:
    """What the lower bound of full depth's exact match must be above; `guess` is the best constant answer's."""
    return guess + FLOOR * tolerance.of(exact_match)


def is_above(correct: int, problems: int, tolerance: Tolerance, guess: float) -> bool:
    """Whether full depth, right on `correct` of the problems, knows enough."""
    return wilson_interval(correct, problems).low > needed(correct / problems, tolerance, guess)


def is_out_of_reach(correct: int, problems: int, tolerance: Tolerance, guess: float) -> bool:
    """Whether that is hardly possible any more after the first of the problems: the upper bound is not above it."""
    return wilson_interval(correct, problems).high <= needed(correct / problems, tolerance, guess)
