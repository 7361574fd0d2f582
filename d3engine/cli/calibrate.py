"""`d3engine calibrate`: the fastest depth setting that is safe for a model and a task, or that there is none.

The one idea: the search's own rule decides (`d3engine/calibration/search.py` states it), and "no setting is safe" is
an answer like any other, with an exit code of its own (3) and no d3.json.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from d3engine.calibration.search import (
    ALPHAS,
    STARTS,
    Calibration,
    Candidate,
    Check,
    Fate,
    Trial,
    best_at_each_speed,
    calibrate,
    make_candidates,
    plan_budget,
)
from d3engine.cli import new_app
from d3engine.cli.engine_options import Options, model_directory, open_engine, sampling_params, takes_engine
from d3engine.depth import D3, FullDepth
from d3engine.depth.policy import POLICY_FILE
from d3engine.errors import NOTHING, InvalidValueError, require, require_integer, require_number
from d3engine.evaluation.accuracy import wilson_interval
from d3engine.model.config import ModelConfig

if TYPE_CHECKING:
    from d3engine.calibration.search import Budget

app = new_app()

NO_SAFE_SETTING = 3
"""Exit code where no setting is safe. 0: one was chosen and written; 2: wrong input."""


@app.command("calibrate")
@takes_engine
def calibrate_command(
    engine_options: Options,
    model: Annotated[str, typer.Argument(help='Model directory, or "demo" for the bundled model.')] = "demo",
    task: Annotated[
        str,
        typer.Option(
            "--task",
            help="What the answers are scored on: a generated task (word-problems, boolean-expressions, word-sorting, "
            "dyck-languages, object-counting, tracking-shuffled-objects, multistep-arithmetic); gsm8k, bbh or "
            "bbh/<task> with --data.",
        ),
    ] = "word-problems",
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder with gsm8k/ and bbh/ to read questions from.")
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option("--num-fewshot", help="Solved examples before a question (3; none if generated).")
    ] = None,
    tolerance: Annotated[
        float, typer.Option("--tolerance", help="Loss of exact match that is accepted, in points of 100.")
    ] = 2.0,
    least_saving: Annotated[
        float, typer.Option("--least-saving", help="Layers that a setting must leave out to be worth a loss, in %.")
    ] = 0.0,
    limit: Annotated[
        int, typer.Option("--limit", help="Problems of the certificate, and of the check on the test split.")
    ] = 500,
    budget: Annotated[
        int, typer.Option("--budget", help="Answers at most (problems x settings, full depth included).")
    ] = 7000,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="Tokens of an answer at most (the task's own limit).")
    ] = None,
    starts: Annotated[
        list[float] | None, typer.Option("--start", help="A start to try; may be repeated (0.2 to 0.8 by 0.1).")
    ] = None,
    alphas: Annotated[
        list[float] | None,
        typer.Option("--alpha", help="An alpha to try; may be repeated (0.8, 0.9, 0.99, 0.999 and 0.9999)."),
    ] = None,
    tails: Annotated[list[int] | None, typer.Option("--tail", help="A tail to try; may be repeated (0).")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help=f"Where to write the setting ({POLICY_FILE} beside the weights).")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Also draw the grid to this PNG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything that was tried as JSON.")] = False,
) -> None:
    """Find the fastest depth setting that is safe, by a paired test against full depth, and write it to d3.json.

    Settings are sorted out on a part of the validation split, certified on another, and the one that is chosen is
    checked once on the test split. Exit code 3 says that no setting is safe; nothing is written then. Greedy; --seed
    also picks the problems.
    """
    require_number("--tolerance", tolerance, 0, 100, open_low=True, open_high=True)
    require_number("--least-saving", least_saving, 0, 100, open_high=True)
    directory = model_directory(model)
    target = _target(model, directory, out)
    _check_plot(plot)
    seed = engine_options.get("seed", 0)

    from d3engine.calibration.scoring import EngineScorer
    from d3engine.calibration.tasks import calibration_task
    from d3engine.model.fingerprint import fingerprint

    asked = calibration_task(task, data, seed=seed, shots=num_fewshot)
    most = require_integer("--max-tokens", asked.max_tokens if max_tokens is None else max_tokens, 2)
    layers = ModelConfig.from_directory(directory).num_layers
    candidates = make_candidates(layers, most, starts or STARTS, alphas or ALPHAS, tails or (0,))
    require(
        len(candidates) > 0, "--start, --alpha, --tail", (starts, alphas, tails), "such that a setting skips something"
    )
    plan = plan_budget(len(candidates), budget, limit, tolerance / 100)
    parts = asked.parts(plan.screening, plan.certification)
    engine = open_engine(model, engine_options, FullDepth())
    params = sampling_params(engine, {"max_tokens": most, "temperature": 0.0, "stop": list(asked.stop) or None})
    name = fingerprint(directory)
    scorer = EngineScorer(engine, params, parts)
    result = _search(scorer, candidates, plan, tolerance / 100, least_saving / 100)
    about: Options = {"task": task, "seed": seed, "max_tokens": most, "dtype": str(engine.dtype).removeprefix("torch.")}
    about |= {"device": engine.device.type} | ({} if num_fewshot is None else {"shots": num_fewshot})
    report = _report(result, {"model": model, "fingerprint": name, **about})
    if result.chosen is not None:  # first of all, so that nothing after it can lose the work
        from d3engine.calibration.report import policy_file, write_policy_file

        try:
            write_policy_file(policy_file(result, about, name), target)
        except InvalidValueError:
            typer.echo(json.dumps({**report, "written": None}, indent=2))  # all that is left of the work
            raise
    if as_json:
        typer.echo(json.dumps({**report, "written": str(target) if result.chosen else None}, indent=2))
    else:
        _show(result, report, target)
    if plot:
        from d3engine.calibration.picture import plot_calibration

        plot_calibration(result, _title(model, task, result), plot)
    if result.chosen is None:
        raise typer.Exit(NO_SAFE_SETTING)


def _target(model: str, directory: Path, out: Path | None) -> Path:
    """Where the setting will be written; that it can be is found out before the hours of work."""
    from d3engine.loading import DEMO

    bundled = "given as a file to write, since the bundled model's directory belongs to the package"
    require(out is not None or model != DEMO, "--out", NOTHING, bundled)
    target = out if out is not None else directory / POLICY_FILE
    require(not target.is_dir(), "--out", str(target), "a file, not a directory")
    writable = target.parent.is_dir() and os.access(target.parent, os.W_OK)
    require(writable, "--out", str(target), "a file in a directory that can be written")
    return target


def _check_plot(plot: Path | None) -> None:
    if plot is not None:
        from d3engine.plots import check_picture

        check_picture("--plot", plot)


def _search(
    scorer: Any, candidates: Sequence[Candidate], plan: Budget, tolerance: float, least_saving: float
) -> Calibration:
    from tqdm import tqdm

    with tqdm(total=plan.answers, unit="answer", disable=None, leave=False, smoothing=0.1) as bar:

        def progress(step: str, answers: int) -> None:
            bar.set_description(step)
            bar.update(answers)

        return calibrate(scorer, candidates, plan, tolerance, progress, least_saving=least_saving)


def _report(result: Calibration, about: dict[str, Any]) -> dict[str, Any]:
    from d3engine.calibration.report import as_dict

    return as_dict(result, about)


def _title(model: str, task: str, result: Calibration) -> str:
    chosen = "no safe setting" if result.chosen is None else setting(result.chosen)
    return f"{Path(model).name}, {task}, tolerance {100 * result.tolerance:g} points: {chosen}"


def setting(policy: D3) -> str:
    """A setting in words: "alpha 0.9, start 0.7"."""
    return f"alpha {policy.alpha:g}, start {policy.start}" + (f", tail {policy.tail}" if policy.tail else "")


def grid(result: Calibration, tail: int) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the D3 paper's Table 9: a row for each alpha, a column for each start."""
    cells = {(p.alpha, float(p.start)): t for t in result.trials for p in t.candidate.alike if p.tail == tail}
    starts = sorted({start for _, start in cells})
    rows = []
    for alpha in sorted({alpha for alpha, _ in cells}):
        row = [_cell(cells.get((alpha, start)), (alpha, start, tail)) for start in starts]
        rows.append([f"{alpha:g}", *row])
    return ["alpha \\ start", *(f"{start:g}" for start in starts)], rows


def _cell(trial: Trial | None, place: tuple[float, float, int]) -> str:
    if trial is None:
        return "-"
    tried = (trial.policy.alpha, float(trial.policy.start), trial.policy.tail)
    mark = {Fate.CHOSEN: " *", Fate.CERTIFIED: " +", Fate.FAILED: " x"}.get(trial.fate, "") if tried == place else " ="
    return f"{100 * trial.screened.exact_match:.1f} / {trial.screened.mean_layers:.1f}{mark}"


def _show(result: Calibration, report: dict[str, Any], target: Path) -> None:
    from d3engine.cli.terminal import print_table

    rounds = [len(trial.screened.right) for trial in result.trials]
    for tail in sorted({policy.tail for trial in result.trials for policy in trial.candidate.alike}):
        title = "Screening: exact match, % / layers run for a token"
        print_table(title + (f", tail {tail}" if tail else ""), *grid(result, tail))
        sys.stdout.flush()
    typer.echo(
        f"Full depth: {100 * result.full.exact_match:.1f} / {result.num_layers}. "
        f"A setting answered {min(rounds)} to {max(rounds)} problems, more the further it came.\n"
        "* chosen, + certified, x not certified, = the same layers as another; all others were out before.\n"
    )
    chain = [_speed_row(trial) for trial in best_at_each_speed(result.trials)]
    columns = ("setting", "layers", "exact match", "95 % interval", "problems")
    print_table("The best in screening at each speed", columns, chain)
    if result.certificates:
        header = ("setting", "layers", "exact match", "full depth", "difference, 95 % interval", "p", "")
        rows = [_check_row("validation", check) for check in result.certificates]
        if result.test is not None:
            rows.append(_check_row("test", result.test))
        title = f"Certificates on {result.budget.certification} other problems, the slowest setting first"
        print_table(title, header, rows)
    points = f"{100 * result.tolerance:g} points"
    typer.echo(f"p: of the hypothesis that {points} of exact match or more are lost.\n" if result.certificates else "")
    typer.echo(result.reason)
    if result.chosen is None:
        typer.echo("Nothing was written. Full depth is the setting for this model and task.")
        if target.exists():
            typer.echo(f"There is an older {target}, which this calibration does not support.", err=True)
    else:
        typer.echo(f"{setting(result.chosen)}: written to {target}.")


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


def _check_row(split: str, check: Check) -> tuple[str, ...]:
    from d3engine.calibration.report import check_as_dict

    found = check_as_dict(check)
    interval = found["difference_interval_95"]
    low, high = 100 * interval["low"], 100 * interval["high"]
    return (
        f"{setting(check.policy)}, {split}",
        f"{check.answers.mean_layers:.2f}",
        f"{check.answers.exact_match:.1%}",
        f"{check.full.exact_match:.1%}",
        f"{100 * found['difference']:+.1f} ({low:+.1f} to {high:+.1f})",
        f"{check.p_value:.2g}",
        "passed" if check.passed else "failed",
    )
