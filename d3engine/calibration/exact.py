"""Exact chances for the paired test: a p-value that holds its level, and the power of a certificate.

The one idea: two counts decide the test, so every outcome can be gone through. The normal distribution of
`noninferiority.py` would pass up to 2.9 % where 2.5 % are meant (few problems, a wide tolerance), which is made good
here: where it is close, the p-value is the largest chance, over whatever else may be true, of a result that looks as
safe.
"""

from __future__ import annotations

from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np

from d3engine.calibration.noninferiority import Pairs, Tolerance, noninferiority_p, statistic

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
    """The chance that a setting without any loss is certified on so many problems, about.

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
    """The counts that can be expected of so many trials."""
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
