"""What a calibration has found, in sentences. "No" means that full depth knows too little,
or that these problems show no setting to be safe."""

from __future__ import annotations

from enum import StrEnum

from d3engine.research.calibration.search import Calibration, Check, fewest_to_certify
from d3engine.research.calibration.statistics import FLOOR, Tolerance, needed, power

DIFFERING = (0.0, 0.01, 0.02, 0.05, 0.1)
"""Shares of problems that only one of full depth and setting answers rightly, for which the power is given."""

HIGH_POWER = 0.9
MOST_PROBLEMS = 100_000


class Outcome(StrEnum):
    """How a calibration ends."""

    CHOSEN = "chosen"
    NOT_SHOWN = "none shown to be safe"
    TOO_LITTLE_KNOWN = "full depth knows too little"


def outcome(result: Calibration) -> Outcome:
    if not result.knows_enough:
        return Outcome.TOO_LITTLE_KNOWN
    return Outcome.NOT_SHOWN if result.chosen is None else Outcome.CHOSEN


def reason(result: Calibration) -> str:
    if not result.knows_enough:
        return _too_little(result)
    if result.certificate is not None:
        problems = len(result.certificate.full.right)
        return f"The fastest setting that was certified, on {problems} problems that nothing was chosen on."
    if result.certificates:
        return _not_certified(result.certificates[-1], result.tolerance)
    saving = f" and {100 * result.least_saving:g} % of the layers saved" if result.least_saving else ""
    most = max(len(trial.screened.right) for trial in result.trials)
    return (
        f"None could be shown to be safe: on {most} problems, no setting got through screening with a loss within the "
        f"tolerance{saving}."
    )


def _too_little(result: Calibration) -> str:
    correct, problems, tolerance = result.baseline.correct, len(result.baseline.right), result.tolerance
    least, interval = needed(result.baseline.exact_match, tolerance, result.guess), result.baseline.interval
    words = (
        f"Full depth itself knows too little of this task for a loss of {tolerance} to mean anything: it is right on "
        f"{correct} of {problems} problems, {100 * result.baseline.exact_match:.1f} % "
        f"({100 * interval.low:.1f} to {100 * interval.high:.1f})."
    )
    if interval.low > least:
        words += f" To certify this tolerance takes {fewest_to_certify(tolerance)} right answers at least."
    else:
        guess = (
            f", beyond the {100 * result.guess:.1f} % that one constant answer to each task gets right"
            if result.guess
            else ""
        )
        words += f" The lower bound must be above {100 * least:.1f} %: {FLOOR} times the tolerance{guess}."
    advice = "a smaller tolerance" if tolerance.relative else "a smaller tolerance or a relative one"
    return f"{words} No setting was tried. Take a task that the model can do, or more problems and {advice}."


def _not_certified(check: Check, tolerance: Tolerance) -> str:
    pairs = check.pairs
    low, high = 100 * pairs.interval.low, 100 * pairs.interval.high
    words = (
        f"None could be shown to be safe with {pairs.problems} problems: the most careful setting that was left "
        f"differs from full depth by {100 * pairs.difference:+.1f} points ({low:+.1f} to {high:+.1f}), "
        f"so a loss of {tolerance} cannot be excluded (p {check.p_value:.2g})."
    )
    chance = power(pairs.problems, tolerance, pairs.differing, check.full.exact_match)
    more = problems_for(HIGH_POWER, tolerance, pairs.differing, check.full.exact_match)
    words += (
        f" The two differ in {100 * pairs.differing:.1f} % of the problems; if that were without any loss, this number "
        f"of problems would show it with a chance of {chance:.0%}"
    )
    if more is not None and more > pairs.problems:
        words += f", and about {more} with one of {HIGH_POWER:.0%}"
    return words + "."


def problems_for(chance: float, tolerance: Tolerance, differing: float, exact_match: float) -> int | None:
    """The problems, to two digits, that show a setting without loss to be safe with this chance; None: too many."""
    problems = fewest_to_certify(tolerance)
    while power(problems, tolerance, differing, exact_match) < chance:
        problems = problems * 11 // 10 + 1
        if problems > MOST_PROBLEMS:
            return None
    return int(float(f"{problems:.2g}"))
