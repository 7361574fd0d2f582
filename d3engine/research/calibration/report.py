"""A calibration as JSON, and the `d3.json` that the engine reads: a setting with what it
lost, on how many problems, by which rule, of which weights."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

from d3engine.depth import DepthPolicy
from d3engine.depth.policy import BRIDGES, STUDENT, STUDENTS
from d3engine.depth.schedule import AUTO_BRIDGES
from d3engine.errors import InvalidValueError, require
from d3engine.research.calibration.outcome import DIFFERING, outcome, reason
from d3engine.research.calibration.scoring import Answers
from d3engine.research.calibration.search import Calibration, Check, Fate, Trial, best_at_each_speed, grid_cells, grids
from d3engine.research.calibration.statistics import FLOOR, PASS_LEVEL, Tolerance, needed, power
from d3engine.research.plots import BLUE, GREY, INK, ORANGE, VERMILION, letters_on, new_figure, save_figure
from d3engine.utils.files import as_json, read_text, write_whole
from d3engine.utils.version import __version__


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
    """With what chance a certificate on `problems` problems shows that a setting without any loss is safe, if this many
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
        "interval_95": asdict(answers.interval),
        "realised_mean_layers": answers.mean_layers,
        "seconds": answers.seconds,
    }


def check_as_dict(check: Check) -> dict[str, Any]:
    """A setting against full depth on the same problems."""
    pairs = check.pairs
    return {
        "depth": check.policy.describe(),
        "problems": pairs.problems,
        "exact_match_full_depth": check.full.exact_match,
        "exact_match": check.answers.exact_match,
        "right_at_full_depth_only": pairs.only_full,
        "right_under_the_setting_only": pairs.only_setting,
        "difference": pairs.difference,
        "difference_interval_95": asdict(pairs.interval),
        "p_value_of_losing_the_tolerance": check.p_value,
        "passed": check.passed,
        "realised_mean_layers": check.answers.mean_layers,
        "seconds_full_depth": check.full.seconds,
        "seconds": check.answers.seconds,
    }


def policy_file(
    result: Calibration, about: dict[str, Any], fingerprint: str, files: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What `d3.json` holds for a calibration that chose a setting; `files` says which bridges it crosses by, or which
    student generated tokens run, as `write_copy` does."""
    assert result.chosen is not None
    assert result.certificate is not None
    return {
        "depth": as_written(result.chosen).describe(),
        "task": about["task"],
        "fingerprint": fingerprint,
        **(files or {}),
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


def measured_windows(report: Path) -> dict[tuple[int, int], float]:
    """The windows of a report of `d3engine depth measure --windows`, with the KL divergence that each costs."""
    allowed = "a JSON report of d3engine depth measure --windows N"
    found: dict[tuple[int, int], float] = {}
    try:
        for one in as_json(read_text(report), report)["policies"]:
            match = re.fullmatch(r"\[(\d+), (\d+)\)", one["policy"])
            if match:
                found[int(match[1]), int(match[2])] = float(one["all"]["kl"])
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidValueError("--windows-from", str(report), f"{allowed} ({error})") from None
    require(len(found) > 0, "--windows-from", str(report), allowed)
    return found


def as_written(setting: DepthPolicy) -> DepthPolicy:
    """A setting as `d3.json` has it: its bridges, or its students, are those beside the weights."""
    told: Any = setting
    for name in (BRIDGES, STUDENT):
        if getattr(told, name, None) is not None:
            told = replace(told, **{name: AUTO_BRIDGES})
    if several := getattr(told, STUDENTS, ()):
        told = replace(told, students=[written_students(setting)[name] for name in several])
    return cast(DepthPolicy, told)


def written_students(setting: DepthPolicy) -> dict[str, str]:
    """What a setting calls each of its students, and what `d3.json` calls it."""
    if (one := getattr(setting, STUDENT, None)) is not None:
        return {one: AUTO_BRIDGES}
    return {name: f"{AUTO_BRIDGES}-{nth}" for nth, name in enumerate(getattr(setting, STUDENTS, ()), 1)}


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


CELL = {Fate.FAILED: "x", Fate.CERTIFIED: "✓", Fate.CHOSEN: "★"}
MARKS = {
    Fate.CHOSEN: ("*", VERMILION, 19, "chosen"),
    Fate.CERTIFIED: ("o", BLUE, 9, "certified"),
    Fate.FAILED: ("X", ORANGE, 9, "not certified"),
}
OTHERS = ("o", GREY, 4, "other settings")
GRIDS_IN_A_ROW = 2
NEAR = 3
"""The panel near full depth shows losses of up to this number of tolerances."""


def plot_calibration(result: Calibration, title: str, path: str | Path) -> None:
    """Draw one grid for each tail and choice of bridges, and below them the speed-quality curve, to a file (PNG by its
    suffix).

    Raises `InvalidValueError` for a calibration that tried nothing.
    """
    require(result.full is not None, "calibration", outcome(result).value, "one that has tried settings")
    assert result.full is not None
    places = grids(result)
    columns = max(1, min(len(places), GRIDS_IN_A_ROW))
    rows = -(-len(places) // columns)
    figure = new_figure(width=11, height=0.6 + 3.2 * rows + 4)
    lower = figure
    if places:  # fixed windows have no grid
        upper, lower = figure.subfigures(2, 1, height_ratios=[3.2 * rows + 0.3, 4])
        _draw_grids(upper, result, places, rows, columns)
    _draw_curves(lower, result, result.full)
    save_figure(figure, path, title)


def _draw_grids(
    figure: Any, result: Calibration, places: list[tuple[int, str | None]], rows: int, columns: int
) -> None:
    axes = figure.subplots(rows, columns, squeeze=False)
    image = None
    for nth, (tail, bridges) in enumerate(places):
        image = _draw_grid(axes.flat[nth], result, tail, bridges)
        if len(places) > 1:
            crossed = f", {Path(bridges).name}" if bridges else ""
            axes.flat[nth].set_title(f"tail {tail}{crossed}", fontsize="small")
    for unused in axes.flat[len(places) :]:
        unused.axis("off")
    figure.colorbar(image, ax=axes, label="exact match in screening, %", fraction=0.04, pad=0.01)
    meaning = "exact match, %, and layers run for a token; ★ chosen, ✓ certified, x not certified"
    tried = {trial.policy for trial in result.trials}
    if any(policy not in tried for trial in result.trials for policy in trial.candidate.alike):
        meaning += ", = runs the same layers as a setting that was tried"
    figure.suptitle(meaning, fontsize="small")


def _draw_grid(axes: Any, result: Calibration, tail: int, bridges: str | None) -> Any:
    import numpy as np

    cells = grid_cells(result, tail, bridges)
    alphas = sorted({alpha for alpha, _ in cells})  # from the top, as in the printed grid
    starts = sorted({start for _, start in cells})
    values = np.full((len(alphas), len(starts)), np.nan)
    for (alpha, start), (_, trial) in cells.items():
        values[alphas.index(alpha), starts.index(start)] = 100 * trial.screened.exact_match
    image = axes.imshow(values, cmap="cividis", vmin=0, vmax=100, aspect="auto")
    for (alpha, start), (policy, trial) in cells.items():
        _write_cell(axes, image, policy, trial, starts.index(start), alphas.index(alpha))
    axes.set_xticks(range(len(starts)), [f"{start:g}" for start in starts])
    axes.set_yticks(range(len(alphas)), [f"{alpha:g}" for alpha in alphas])
    axes.set_xlabel("start")
    axes.set_ylabel("alpha")
    return image


def _write_cell(axes: Any, image: Any, policy: DepthPolicy, trial: Trial, x: int, y: int) -> None:
    mark = CELL.get(trial.fate, "") if policy == trial.policy else "="
    text = f"{100 * trial.screened.exact_match:.1f} {mark}".rstrip() + f"\n{trial.screened.mean_layers:.1f}"
    colour = letters_on(*image.cmap(image.norm(100 * trial.screened.exact_match), bytes=True)[:3])
    axes.text(x, y, text, ha="center", va="center", fontsize="small", color=colour)


def _draw_curves(figure: Any, result: Calibration, full: Answers) -> None:
    whole, near = figure.subplots(1, 2)
    for axes in (whole, near):
        _draw_curve(axes, result, full)
        axes.set_xlabel(f"layers run for a token, of {result.num_layers}")
        axes.set_ylabel("exact match in screening, %")
        axes.grid(alpha=0.3)
    whole.set_ylim(-3, 103)
    whole.set_title("quality against speed, faster to the right; bars: 95 % intervals", fontsize="small")
    _look_near_full_depth(near, result, full)
    for axes in (whole, near):
        axes.invert_xaxis()
    handles, labels = whole.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small", frameon=False)


def _look_near_full_depth(axes: Any, result: Calibration, answered: Answers) -> None:
    full, points = 100 * answered.exact_match, 100 * result.tolerance.of(answered.exact_match)
    bottom = max(full - NEAR * points, -3)
    inside = [trial.screened for trial in result.trials if 100 * trial.screened.exact_match >= bottom]
    best = max([full, *(100 * answers.exact_match for answers in inside)])
    axes.set_ylim(bottom, min(best + points, 100 + 0.3 * points))
    speeds = [answered.mean_layers, *(answers.mean_layers for answers in inside)]
    margin = 0.05 * (max(speeds) - min(speeds)) + 0.1
    axes.set_xlim(min(speeds) - margin, max(speeds) + margin)
    below = len(result.trials) - len(inside)
    axes.set_title(f"the same near full depth; {below} of {len(result.trials)} settings are below", fontsize="small")


def _draw_curve(axes: Any, result: Calibration, answered: Answers) -> None:
    seen = set()
    for trial in sorted(result.trials, key=lambda trial: trial.fate in MARKS):  # the marked ones last, on top
        marker, colour, size, label = MARKS.get(trial.fate, OTHERS)
        _draw_answers(axes, trial.screened, marker, colour, size, "_" if label in seen else label)
        seen.add(label)
    # Only those of the last round answered the same problems, and can be compared.
    last = max(trial.rounds for trial in result.trials)
    best = [trial.screened for trial in best_at_each_speed([trial for trial in result.trials if trial.rounds == last])]
    line = {"color": GREY, "linewidth": 1, "label": "best at each speed, last round", "zorder": 1}
    axes.plot([answers.mean_layers for answers in best], [100 * answers.exact_match for answers in best], **line)
    _draw_answers(axes, answered, "s", INK, 6, "full depth")
    full, points = 100 * answered.exact_match, 100 * result.tolerance.of(answered.exact_match)
    axes.axhline(full - points, color=INK, linestyle="--", linewidth=1, label=f"full depth - {points:g} points")


def _draw_answers(axes: Any, answers: Answers, marker: str, colour: str, size: float, label: str) -> None:
    """A marker and its 95 % interval; hollow, so that it hides neither the bar nor a neighbour.

    A label that begins with "_" stays out of the legend.
    """
    share = 100 * answers.exact_match
    interval = answers.interval
    errors = [[share - 100 * interval.low], [100 * interval.high - share]]
    style = {"color": colour, "markersize": size, "markerfacecolor": "none", "markeredgewidth": 1.5}
    axes.errorbar(answers.mean_layers, share, errors, fmt=marker, capsize=2.5, elinewidth=1, label=label, **style)
