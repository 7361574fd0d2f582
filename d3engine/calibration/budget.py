"""How many problems each step of a calibration takes, and the least that can prove anything.

The one idea: what cannot work is said before the hours of work, all of it at once and with its reason.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import count
from math import ceil
from statistics import NormalDist

from d3engine.calibration.exact import PASS_LEVEL, exact_p
from d3engine.calibration.floor import FLOOR, fewest_to_know
from d3engine.calibration.noninferiority import Pairs, Tolerance
from d3engine.errors import InvalidValueError, require, require_integer

ROUNDS = 3
PER_FIRST_ROUND = 1 << (ROUNDS - 1)  # problems of all rounds, for each of the first: every round doubles them
FINALISTS = 4
FEWEST_PROBLEMS = 8
"""Of the first round: with fewer it would sort by chance."""
LEAST_SCREENING = FEWEST_PROBLEMS * PER_FIRST_ROUND
USUAL_CERTIFICATION = 700


@dataclass(frozen=True)
class Has:
    """The different questions that a task has for each step."""

    screening: int
    certification: int


@dataclass(frozen=True)
class Budget:
    """How many problems each step takes; made by `plan_budget`."""

    first_round: int
    certification: int
    answers: int

    @property
    def screening(self) -> int:
        """Problems of all rounds together."""
        return self.first_round * PER_FIRST_ROUND


def plan_budget(
    num_candidates: int,
    answers: int,
    certification: int | None,
    tolerance: Tolerance,
    has: Has | None = None,
) -> Budget:
    """Share `answers` (problems x settings, full depth included) between the two steps.

    The certificate takes `certification` problems (None: `USUAL_CERTIFICATION`, or as many as the task has), of full
    depth and of up to `FINALISTS` settings; what is left goes to screening. Raises `InvalidValueError`, which names
    all least sizes with their reasons, where something is too small.
    """
    require_integer("candidates", num_candidates, 1)
    require_integer("--budget", answers, 1)
    most = has.certification if has else sys.maxsize
    asked = min(USUAL_CERTIFICATION, most) if certification is None else require_integer("--limit", certification, 1)
    fewest = fewest_problems(tolerance)
    finalists, per_problem = min(num_candidates, FINALISTS), _most_screened(num_candidates)
    proving = (finalists + 1) * max(fewest, min(asked, most))
    least = proving + FEWEST_PROBLEMS * per_problem
    if not fewest <= asked <= most or answers < least or (has is not None and has.screening < LEAST_SCREENING):
        allowed = (
            f"at least {fewest} and {least} for a tolerance of {tolerance} and {num_candidates} "
            f"setting{'s' * (num_candidates > 1)}: of fewer than {fewest} problems not even a setting without any loss "
            f"could be certified; {proving} answers are for the certificate, by full depth and {finalists} of the "
            f"settings, and {least - proving} for screening"
        )
        if has is not None:
            can_show = least_tolerance(has.certification)
            allowed += (
                f"; the task has {has.certification} questions for the certificate, enough for "
                f"{f'a tolerance of {can_show} or more' if can_show else 'no tolerance'}, and {has.screening} for "
                f"screening, which takes {LEAST_SCREENING}"
            )
        raise InvalidValueError("--limit and --budget", f"{asked} and {answers}", allowed)
    first_round = (answers - proving) // per_problem
    return Budget(first_round if has is None else min(first_round, has.screening // PER_FIRST_ROUND), asked, answers)


def plan_check(certification: int | None, tolerance: Tolerance, has: Has | None = None) -> Budget:
    """The certificate of one given setting, without screening; raises `InvalidValueError` where it is too small."""
    most = has.certification if has else sys.maxsize
    asked = min(USUAL_CERTIFICATION, most) if certification is None else require_integer("--limit", certification, 1)
    fewest = fewest_problems(tolerance)
    allowed = f"at least {fewest} for a tolerance of {tolerance}" + (f", at most {most}" if has else "")
    require(fewest <= asked <= most, "--limit", asked, allowed)
    return Budget(0, asked, 2 * asked)


def least_tolerance(problems: int) -> Tolerance | None:
    """The least one, in tenths of a point, that so many problems could certify; None: not even the widest."""
    square = NormalDist().inv_cdf(1 - PASS_LEVEL) ** 2
    tenths = range(ceil(1000 * square / (problems + square)), 1000 // FLOOR)
    tolerances = (Tolerance(number / 1000) for number in tenths)
    return next((one for one in tolerances if fewest_problems(one) <= problems), None)


def fewest_problems(tolerance: Tolerance) -> int:
    """The problems without which no certificate can be had, even if every answer is right."""
    return max(fewest_to_certify(tolerance), fewest_to_know(tolerance))


def fewest_to_certify(tolerance: Tolerance) -> int:
    """The problems that a setting needs to be certified at this tolerance if it answers as full depth does.

    Those that count for the test: of a relative tolerance, those that full depth answers rightly.
    """
    quantile = NormalDist().inv_cdf(1 - PASS_LEVEL)
    normal = ceil(quantile**2 * (1 - tolerance.loss) / tolerance.loss)  # where the normal test reaches its level
    return next(fewest for fewest in count(normal) if exact_p(Pairs(fewest, 0, 0, 0), tolerance) <= PASS_LEVEL)


def most_kept(num_candidates: int, halvings: int) -> int:
    """Candidates that stay after so many halvings of screening, at most."""
    return max(-(-num_candidates // (1 << halvings)), min(num_candidates, FINALISTS))


def _most_screened(num_candidates: int) -> int:
    """Answers of screening for each problem of its first round."""
    fresh = (1, *(1 << number for number in range(ROUNDS - 1)))
    return PER_FIRST_ROUND + sum(most_kept(num_candidates, number) * fresh[number] for number in range(ROUNDS))
