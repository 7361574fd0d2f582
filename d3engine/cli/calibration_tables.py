"""What `d3engine calibrate` has found, as tables: the grid of screening, the best at each speed, the certificates."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from d3engine.calibration.outcome import reason
from d3engine.calibration.search import Calibration, Check, Fate, Trial, best_at_each_speed, grids
from d3engine.cli.verbosity import note
from d3engine.depth import D3
from d3engine.evaluation.accuracy import wilson_interval

if TYPE_CHECKING:
    from d3engine.calibration.scoring import Answers


def setting(policy: D3) -> str:
    """A setting in words: "alpha 0.9, start 0.7"."""
    tail = f", tail {policy.tail}" if policy.tail else ""
    return f"alpha {policy.alpha:g}, start {policy.start}{tail}" + (f", {policy.bridges}" if policy.bridges else "")


def grid(result: Calibration, tail: int, bridges: str | None = None) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the D3 paper's Table 9: a row for each alpha, a column for each start."""
    cells = {
        (p.alpha, float(p.start)): t
        for t in result.trials
        for p in t.candidate.alike
        if (p.tail, p.bridges) == (tail, bridges)
    }
    starts = sorted({start for _, start in cells})
    rows = []
    for alpha in sorted({alpha for alpha, _ in cells}):
        row = [_cell(cells.get((alpha, start)), (alpha, start)) for start in starts]
        rows.append([f"{alpha:g}", *row])
    return ["alpha \\ start", *(f"{start:g}" for start in starts)], rows


def _cell(trial: Trial | None, place: tuple[float, float]) -> str:
    if trial is None:
        return "-"
    tried = (trial.policy.alpha, float(trial.policy.start))
    mark = {Fate.CHOSEN: " *", Fate.CERTIFIED: " +", Fate.FAILED: " x"}.get(trial.fate, "") if tried == place else " ="
    return f"{100 * trial.screened.exact_match:.1f} / {trial.screened.mean_layers:.1f}{mark}"


def show_calibration(result: Calibration, task: str, target: Path) -> None:
    """Print all of it to stdout, and what was written to `target`, or that nothing was."""
    if result.full is not None:
        _show_tables(result, result.full)
    if result.certificates:
        _show_certificates(result)
    typer.echo(reason(result))
    if result.chosen is None:
        full_depth = " Full depth is the setting for this model and task." if result.knows_enough else ""
        typer.echo(f"Nothing was written.{full_depth}")
        if target.exists():
            note(f"There is an older {target}, which this calibration does not support.")
    else:
        typer.echo(f"{setting(result.chosen)}: written to {target}, found for {task} and shown for nothing else.")


def _show_tables(result: Calibration, full: Answers) -> None:
    from d3engine.cli.terminal import print_table

    rounds = [len(trial.screened.right) for trial in result.trials]
    for tail, bridges in grids(result):
        title = "Screening: exact match, % / layers run for a token"
        words = (f", tail {tail}" if tail else "") + (f", bridged by {bridges}" if bridges else "")
        print_table(title + words, *grid(result, tail, bridges))
        sys.stdout.flush()
    answered = f"{min(rounds)} to {max(rounds)} problems, more the further it came"
    typer.echo(
        f"Full depth: {100 * full.exact_match:.1f} / {result.num_layers}. "
        f"A setting answered {answered if min(rounds) < max(rounds) else f'{max(rounds)} problems'}.\n"
        "* chosen, + certified, x not certified, = the same layers as another; all others were out before.\n"
    )
    chain = [_speed_row(trial) for trial in best_at_each_speed(result.trials)]
    columns = ("setting", "layers", "exact match", "95 % interval", "problems")
    print_table("The best in screening at each speed", columns, chain)


def _show_certificates(result: Calibration) -> None:
    from d3engine.cli.terminal import print_table

    header = ("setting", "layers", "exact match", "full depth", "difference, 95 % interval", "p", "")
    rows = [_check_row(check) for check in result.certificates]
    problems = result.budget.certification
    print_table(f"Certificates on {problems} problems of the test split, the slowest setting first", header, rows)
    typer.echo(f"p: of the hypothesis that {result.tolerance} or more are lost.\n")


def _speed_row(trial: Trial) -> tuple[str, ...]:
    answers = trial.screened
    interval = wilson_interval(answers.correct, len(answers.right))
    return (
        setting(trial.policy),
        f"{answers.mean_layers:.2f}",
        f"{answers.exact_match:.1%}",
        f"{interval.low:.1%} to {interval.high:.1%}",
        str(len(answers.right)),
    )


def _check_row(check: Check) -> tuple[str, ...]:
    from d3engine.calibration.report import check_as_dict

    found = check_as_dict(check)
    interval = found["difference_interval_95"]
    low, high = 100 * interval["low"], 100 * interval["high"]
    return (
        setting(check.policy),
        f"{check.answers.mean_layers:.2f}",
        f"{check.answers.exact_match:.1%}",
        f"{check.full.exact_match:.1%}",
        f"{100 * found['difference']:+.1f} ({low:+.1f} to {high:+.1f})",
        f"{check.p_value:.2g}",
        "passed" if check.passed else "failed",
    )
