"""The paired test behind "safe": is the loss against full depth smaller than a stated tolerance?

The one idea: a difference that is "not significant" proves nothing, least of all with few problems. So the burden is
turned round: the hypothesis to refute is that the setting loses the tolerance or more.
"""

from __future__ import annotations

from math import sqrt
from statistics import NormalDist

from d3engine.errors import require_integer, require_number


def noninferiority_p(only_full: int, only_setting: int, problems: int, tolerance: float) -> float:
    """One-sided p-value of the hypothesis that a setting loses at least `tolerance` of exact match.

    `only_full` of the problems are right at full depth alone, `only_setting` under the setting alone. Small means that
    the loss is below the tolerance; 1 minus it is the p-value of the opposite, that the loss is at most the tolerance.
    The score test for paired proportions (Nam, Biometrics 53, 1997; Tango, Statistics in Medicine 17, 1998): unlike
    Wald's it needs no pair that differs, for the variance is that of the hypothesis itself.
    """
    require_integer("problems", problems, 1)
    require_integer("only_full", only_full, 0, problems)
    require_integer("only_setting", only_setting, 0, problems - only_full)
    require_number("tolerance", tolerance, 0, 1, open_low=True, open_high=True)
    distance = problems * tolerance - (only_full - only_setting)
    # The likeliest chance of `only_setting` if the loss is the tolerance exactly: the root of a quadratic.
    linear = only_full + only_setting + tolerance * (only_full - only_setting) - 2 * problems * tolerance
    constant = only_setting * tolerance * (1 - tolerance)
    gain = (linear + sqrt(linear * linear + 8 * problems * constant)) / (4 * problems)
    variance = problems * (2 * gain + tolerance - tolerance * tolerance)
    return NormalDist().cdf(-distance / sqrt(variance))
