"""A calibration as data: JSON of everything that was tried, and the `d3.json` that the engine reads.

The one idea: a setting never stands alone. Beside it is what it was measured to lose, on how many problems, by which
rule, and of which weights that is true.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from d3engine.calibration.exact import PASS_LEVEL, power
from d3engine.calibration.floor import FLOOR, needed
from d3engine.calibration.noninferiority import Pairs, Tolerance
from d3engine.calibration.outcome import DIFFERING, outcome, reason
from d3engine.calibration.scoring import Answers
from d3engine.calibration.search import Calibration, Check, Trial
from d3engine.depth import D3
from d3engine.depth.schedule import AUTO_BRIDGES
from d3engine.errors import InvalidValueError
from d3engine.evaluation.accuracy import paired_difference_interval, wilson_interval
from d3engine.files import write_whole
from d3engine.version import __version__


def as_dict(result: Calibration, about: dict[str, Any]) -> dict[str, Any]:
    """Everything, ready for JSON; `about` says model, task and seed. Shares are from 0 to 1."""
    chosen = result.chosen
    return {
        **about,
        "num_layers": result.num_layers,
        **_tolerance(result.tolerance),
        "least_saving": result.least_saving,
        "budget": asdict(result.budget),
        "power": power_table(result.budget.certification, result.tolerance),
        "safe": chosen is not None,
        "outcome": outcome(result).value,
        "reason": reason(result),
        "depth": None if chosen is None else chosen.describe(),
        "full_depth_in_the_certificate": {
            **_answers(result.baseline),
            "best_constant_answer": result.guess,
            "lower_bound_needed": needed(result.baseline.exact_match, result.tolerance, result.guess),
        },
        "full_depth": None if result.full is None else _answers(result.full),
        "settings": [_trial(trial) for trial in result.trials],
        "certificates": [check_as_dict(check) for check in result.certificates],
    }


def _tolerance(tolerance: Tolerance) -> dict[str, Any]:
    return {"tolerance": tolerance.loss, "tolerance_is_relative": tolerance.relative}


def power_table(problems: int, tolerance: Tolerance) -> list[dict[str, float]]:
    """With what chance a certificate on so many problems shows that a setting without any loss is safe, if so many
    problems are answered differently; of a relative tolerance, where full depth is right on all."""
    return [{"differing": share, "certified": round(power(problems, tolerance, share), 4)} for share in DIFFERING]


def _trial(trial: Trial) -> dict[str, Any]:
    return {
        "depth": trial.policy.describe(),
        "alike": [policy.describe() for policy in trial.candidate.alike[1:]],
        "fate": trial.fate.value,
        "rounds": trial.rounds,
        **_answers(trial.screened),
    }


def _answers(answers: Answers) -> dict[str, Any]:
    return {
        "problems": len(answers.right),
        "correct": answers.correct,
        "exact_match": answers.exact_match,
        "interval_95": asdict(wilson_interval(answers.correct, len(answers.right))),
        "realised_mean_layers": answers.mean_layers,
        "seconds": answers.seconds,
    }


def check_as_dict(check: Check) -> dict[str, Any]:
    """A setting against full depth on the same problems."""
    pairs = Pairs.of(check.full.right, check.answers.right)
    interval = paired_difference_interval(pairs.both, pairs.only_setting, pairs.only_full, pairs.neither)
    return {
        "depth": check.policy.describe(),
        "problems": pairs.problems,
        "exact_match_full_depth": check.full.exact_match,
        "exact_match": check.answers.exact_match,
        "right_at_full_depth_only": pairs.only_full,
        "right_under_the_setting_only": pairs.only_setting,
        "difference": (pairs.only_setting - pairs.only_full) / pairs.problems,
        "difference_interval_95": asdict(interval),
        "p_value_of_losing_the_tolerance": check.p_value,
        "passed": check.passed,
        "realised_mean_layers": check.answers.mean_layers,
        "seconds_full_depth": check.full.seconds,
        "seconds": check.answers.seconds,
    }


def policy_file(
    result: Calibration, about: dict[str, Any], fingerprint: str, bridges: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What `d3.json` holds for a calibration that chose a setting; `bridges` says which file it crosses by."""
    assert result.chosen is not None
    assert result.certificate is not None
    return {
        "depth": as_written(result.chosen).describe(),
        "task": about["task"],
        "fingerprint": fingerprint,
        **({} if bridges is None else {"bridges": bridges}),
        "evidence": {
            **about,
            "written_by": f"d3engine {__version__}",
            "rule": "the fastest setting whose loss of exact match is below the tolerance by an exact paired test "
            f"(one-sided, level {PASS_LEVEL}) in a fixed sequence of settings on problems of the test split, found on "
            f"the validation split; full depth's lower bound is above {FLOOR} times the tolerance",
            **_tolerance(result.tolerance),
            "least_saving": result.least_saving,
            "num_layers": result.num_layers,
            "settings_tried": max(len(result.trials), len(result.certificates)),
            "best_constant_answer": result.guess,
            "test": _evidence(result.certificate),
        },
    }


def as_written(setting: D3) -> D3:
    """A setting as `d3.json` has it: its bridges are those beside the weights."""
    return setting if setting.bridges is None else replace(setting, bridges=AUTO_BRIDGES)


def _evidence(check: Check) -> dict[str, Any]:
    """Without what it is said elsewhere, and without times, so that the same calibration writes the same file."""
    told = {"depth", "passed", "seconds", "seconds_full_depth"}
    return {name: _rounded(value) for name, value in check_as_dict(check).items() if name not in told}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return round(value, 6) if isinstance(value, float) else value


def write_policy_file(content: dict[str, Any], path: Path) -> None:
    """Write `d3.json` whole or not at all; raises `InvalidValueError` where that cannot be done."""
    try:
        write_whole(path, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise InvalidValueError("--out", str(path), f"a file that can be written ({error})") from error
