"""Exact chances for the paired test: a p-value that holds its level, and the power of a certificate."""

# Two counts decide the test, so every outcome can be gone through. The normal distribution would pass up to 2.9 % where
# 2.5 % are meant (few problems, a wide tolerance). Where it is close, the p-value is the largest chance, over whatever
# else may be true, of a result that looks as safe.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import floor
from statistics import NormalDist
from typing import Any

import numpy as np

from d3engine.errors import require, require_integer, require_number
from d3engine.research.evaluation.accuracy import Interval, paired_difference_interval

PASS_LEVEL = 0.025
"""The chance, at most, that a calibration certifies a setting that loses the tolerance or more."""

CLOSE = (0.01, 0.04)
"""Outside of these the normal p-value decides as the exact one would, and is far cheaper."""

GAINS = 24
"""Chances of a gain that are gone through: what they are is no part of the hypothesis."""

SPREAD = 6
"""Standard deviations around the mean outside which an outcome has no chance to speak of."""


def exact_p(pairs: Pairs, tolerance: Tolerance) -> float:
    """One-sided p-value of the hypothesis that a setting loses the tolerance or more; it is at most `PASS_LEVEL` with
    at most that chance, if the hypothesis is true and the problems are independent.

    An exact unconditional test, ordered by the score statistic (Hsueh, Liu and Chen, Biometrics 57, 2001).
    """
    normal = noninferiority_p(pairs, tolerance)
    if not CLOSE[0] <= normal <= CLOSE[1]:
        return normal
    return _exact_p(pairs.only_full, pairs.only_setting, pairs.counted(tolerance), tolerance)


@lru_cache(maxsize=1024)
def _exact_p(only_full: int, only_setting: int, counted: int, tolerance: Tolerance) -> float:
    loss, weight = tolerance.loss, tolerance.weight
    observed = float(statistic(only_full, only_setting, counted, tolerance))
    most = (1 - loss) / (1 + weight)  # then every answer differs
    gains = [0.0, *np.geomspace(0.05 * most / counted, 0.98 * most, GAINS)]
    return max(_chance(counted, loss + weight * gain, gain, tolerance, observed) for gain in gains)


def power(problems: int, tolerance: Tolerance, differing: float, exact_match: float = 1.0) -> float:
    """The chance that a setting without any loss is certified on `problems` problems, about.

    `differing` is the share of the problems that only one of full depth and setting answers rightly, as often one as
    the other. What full depth gets right, `exact_match`, matters for a relative tolerance alone.
    """
    counted = problems
    if tolerance.relative:
        either = min(1.0, exact_match + differing / 2)
        counted, differing = round(problems * either), min(1.0, differing / either) if either else 0.0
    if counted == 0:
        return 0.0
    needed = NormalDist().inv_cdf(1 - PASS_LEVEL)
    return _chance(counted, differing / 2, differing / 2, tolerance, needed)


def _chance(counted: int, lost: float, won: float, tolerance: Tolerance, least: float) -> float:
    """The chance that the statistic is `least` or more, where a problem is lost and won with these chances."""
    losses, gains = np.meshgrid(_likely(counted, lost), _likely(counted, won), indexing="ij")
    rest = counted - losses - gains
    passes = (rest >= 0) & (statistic(losses, gains, counted, tolerance) >= least - 1e-9)
    losses, gains, rest = losses[passes], gains[passes], rest[passes]
    logarithms = _log_factorials(counted)
    ways = logarithms[counted] - logarithms[losses] - logarithms[gains] - logarithms[rest]
    chances = ways + _times_log(losses, lost) + _times_log(gains, won) + _times_log(rest, 1 - lost - won)
    return float(min(1.0, np.exp(chances).sum()))


def _likely(trials: int, chance: float) -> Any:
    if chance <= 0:
        return np.zeros(1, dtype=np.int64)
    margin = SPREAD * (trials * chance * (1 - chance)) ** 0.5 + SPREAD
    return np.arange(max(0, int(trials * chance - margin)), min(trials, int(trials * chance + margin) + 1) + 1)


def _times_log(count: Any, chance: float) -> Any:
    """`count * log(chance)`, and 0 for 0 of no chance."""
    return count * np.log(chance) if chance > 0 else np.where(count > 0, -np.inf, 0.0)


@lru_cache(maxsize=8)
def _log_factorials(most: int) -> Any:
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, most + 1)))])


FLOOR = 5
"""Full depth's lower bound must be above this number of tolerances: at least four fifths of what it knows then stay."""


def check_tolerance(tolerance: Tolerance) -> None:
    """Refuse one that not even a perfect full depth is this number of times above."""
    require_number("tolerance", tolerance.loss, 0, 1 / FLOOR, open_low=True, open_high=True)


def fewest_to_know(tolerance: Tolerance) -> int:
    """The problems after which the lower bound can be high enough: if full depth is right on all of them."""
    check_tolerance(tolerance)
    square = NormalDist().inv_cdf(0.975) ** 2
    return floor(square * FLOOR * tolerance.loss / (1 - FLOOR * tolerance.loss)) + 1


def needed(exact_match: float, tolerance: Tolerance, guess: float) -> float:
    """What the lower bound of full depth's exact match must be above; `guess` is the best constant answer's."""
    return guess + FLOOR * tolerance.of(exact_match)


@dataclass(frozen=True)
class Tolerance:
    """The exact match that a setting may lose: a share of all problems or, if `relative`, of those that full depth
    answers rightly. `loss` is between 0 and 1."""

    loss: float
    relative: bool = False

    def __post_init__(self) -> None:
        require_number("tolerance", self.loss, 0, 1, open_low=True, open_high=True)
        require(isinstance(self.relative, bool), "relative", self.relative, "True or False")

    def __str__(self) -> str:
        return f"{100 * self.loss:g} " + ("% of full depth's exact match" if self.relative else "points")

    @property
    def weight(self) -> float:
        """What an answer that is right under the setting alone counts against one that is right at full depth alone."""
        return 1 - self.loss if self.relative else 1.0

    def of(self, exact_match: float) -> float:
        """The loss as a share of all problems, where full depth has this exact match."""
        return self.loss * exact_match if self.relative else self.loss


@dataclass(frozen=True)
class Pairs:
    """Problems by who answered them rightly: full depth and the setting, one of the two, or neither."""

    both: int
    only_full: int
    only_setting: int
    neither: int

    def __post_init__(self) -> None:
        for name in ("both", "only_full", "only_setting", "neither"):
            require_integer(name, getattr(self, name), 0)
        require(self.problems > 0, "pairs", self.problems, "at least one problem")

    @classmethod
    def of(cls, full: Sequence[bool], setting: Sequence[bool]) -> Pairs:
        """Those of two lists of answers to the same problems."""
        pairs = list(zip(full, setting, strict=True))
        return cls(*(pairs.count(kind) for kind in ((True, True), (True, False), (False, True), (False, False))))

    @property
    def problems(self) -> int:
        return self.both + self.only_full + self.only_setting + self.neither

    @property
    def differing(self) -> float:
        """The share of the problems that only one of the two answers rightly."""
        return (self.only_full + self.only_setting) / self.problems

    @property
    def difference(self) -> float:
        """The setting's exact match less full depth's."""
        return (self.only_setting - self.only_full) / self.problems

    @property
    def interval(self) -> Interval:
        """Of the difference, 95 %."""
        return paired_difference_interval(self.both, self.only_setting, self.only_full, self.neither)

    def counted(self, tolerance: Tolerance) -> int:
        """The problems that the test looks at. What neither can answer says nothing of a ratio."""
        return self.problems - self.neither if tolerance.relative else self.problems


def statistic(only_full: Any, only_setting: Any, counted: int, tolerance: Tolerance) -> Any:
    """How many standard deviations the loss is below the tolerance, if the tolerance is the true loss; `counted` > 0.

    Counts may be arrays.

    The score test for paired proportions: of the difference (Nam, Biometrics 53, 1997; Tango, Statistics in Medicine
    17, 1998) and of the ratio (Nam and Blackwelder, Statistics in Medicine 21, 2002). Unlike Wald's it needs no pair
    that differs, for the variance is that of the hypothesis itself. Both are one formula: of the problems that count,
    the chance of a loss is then `tolerance.loss` and `weight` times the chance of a gain.
    """
    loss, weight = tolerance.loss, tolerance.weight
    distance = counted * loss - only_full + weight * only_setting
    # The likeliest chance of a gain under the hypothesis: the root of a quadratic.
    square = counted * weight * (1 + weight)
    linear = weight * (1 - loss) * (only_full + only_setting) - loss * (1 + weight) * (counted - only_full)
    constant = only_setting * loss * (1 - loss)
    gain = (linear + np.sqrt(linear * linear + 4 * square * constant)) / (2 * square)
    variance = loss * (1 - loss) + weight * (1 + weight) * gain
    return distance / np.sqrt(counted * variance)


def noninferiority_p(pairs: Pairs, tolerance: Tolerance) -> float:
    """One-sided p-value of the hypothesis that a setting loses the tolerance or more, by the normal distribution.

    Small means that the loss is below the tolerance; 1 minus it is the p-value of the opposite, that the loss is at
    most the tolerance. Its true level differs from the nominal one a little (that of `exact_p` does not).
    """
    counted = pairs.counted(tolerance)
    if counted == 0:
        return 1.0
    return NormalDist().cdf(-float(statistic(pairs.only_full, pairs.only_setting, counted, tolerance)))
