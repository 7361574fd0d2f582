"""The paired test behind "safe": is the loss against full depth smaller than a stated tolerance?

The one idea: a difference that is "not significant" proves nothing, least of all with few problems. So the burden is
turned round: the hypothesis to refute is that the setting loses the tolerance or more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from d3engine.errors import require, require_integer, require_number


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
    most the tolerance. Its true level differs from the nominal one a little (`exact.py` has one that does not).
    """
    counted = pairs.counted(tolerance)
    if counted == 0:
        return 1.0
    return NormalDist().cdf(-float(statistic(pairs.only_full, pairs.only_setting, counted, tolerance)))
