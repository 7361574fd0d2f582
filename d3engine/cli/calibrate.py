"""`d3engine calibrate`: find the fastest depth setting that is safe for a model and a task, or none."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from d3engine.cli.bridge_texts import Data, Fewshot
from d3engine.cli.commands import (
    ExitCode,
    check_output,
    check_plot,
    measures_depths,
    new_app,
    note,
    print_json,
    print_table,
)
from d3engine.cli.draft_search import ScoreName, find_draft
from d3engine.cli.engine_options import (
    Model,
    Options,
    beside_weights,
    model_directory,
    open_engine,
    sampling_params,
    takes_engine,
)
from d3engine.depth import D3, DepthPolicy, Distilled, FixedSkip, FullDepth, Nested, Width
from d3engine.depth.labels import policy_in_words
from d3engine.depth.policy import BRIDGES, POLICY_FILE
from d3engine.errors import NOTHING, InvalidValueError, require, require_integer, require_number
from d3engine.model.config import ModelConfig
from d3engine.research.calibration.outcome import Outcome, outcome, reason
from d3engine.research.calibration.search import (
    ALPHAS,
    PAPER_ALPHAS,
    STARTS,
    USUAL_CERTIFICATION,
    WIDTHS,
    Calibration,
    Candidate,
    Check,
    Fate,
    Trial,
    best_at_each_speed,
    calibrate,
    check_setting,
    grid_cells,
    grids,
    make_candidates,
    plan_budget,
    plan_check,
    window_candidates,
)
from d3engine.research.calibration.statistics import FLOOR, Tolerance
from d3engine.utils.progress import progress_bar

if TYPE_CHECKING:
    from d3engine.engine.engine import Engine
    from d3engine.research.calibration.bridge_choices import BridgeChoice
    from d3engine.research.calibration.scoring import Answers
    from d3engine.research.calibration.search import Budget


def setting(policy: DepthPolicy) -> str:
    """A setting in words: "alpha 0.9, start 0.7"; of other policies than D3 with its name."""
    if not isinstance(policy, D3):
        return policy_in_words(policy)
    tail = f", tail {policy.tail}" if policy.tail else ""
    return f"alpha {policy.alpha:g}, start {policy.start}{tail}" + (f", {policy.bridges}" if policy.bridges else "")


def grid(result: Calibration, tail: int, bridges: str | None = None) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the D3 paper's Table 9: a row for each alpha, a column for each start."""
    cells = {place: trial for place, (_, trial) in grid_cells(result, tail, bridges).items()}
    starts = sorted({start for _, start in cells})
    rows = []
    for alpha in sorted({alpha for alpha, _ in cells}):
        row = [_cell(cells.get((alpha, start)), (alpha, start)) for start in starts]
        rows.append([f"{alpha:g}", *row])
    return ["alpha \\ start", *(f"{start:g}" for start in starts)], rows


def _cell(trial: Trial | None, place: tuple[float, float]) -> str:
    if trial is None:
        return "-"
    own = trial.policy
    tried = (own.alpha, float(own.start)) if isinstance(own, D3) else None
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
    rounds = [len(trial.screened.right) for trial in result.trials]
    for tail, bridges in grids(result):
        title = "Screening: exact match, % / layers run for a token"
        words = (f", tail {tail}" if tail else "") + (f", bridged by {bridges}" if bridges else "")
        print_table(title + words, *grid(result, tail, bridges))
        sys.stdout.flush()
    fixed = [_fixed_row(trial) for trial in result.trials if not isinstance(trial.policy, D3)]
    if fixed:
        header = ("setting", "layers", "exact match", "problems", "")
        print_table("Screening: fixed windows, those that promise most first", header, fixed)
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
    header = ("setting", "layers", "exact match", "full depth", "difference, 95 % interval", "p", "")
    rows = [_check_row(check) for check in result.certificates]
    problems = result.budget.certification
    print_table(f"Certificates on {problems} problems of the test split, the slowest setting first", header, rows)
    typer.echo(f"p: of the hypothesis that {result.tolerance} or more are lost.\n")


def _cells(policy: DepthPolicy, answers: Answers) -> tuple[str, str, str]:
    return setting(policy), f"{answers.mean_layers:.2f}", f"{answers.exact_match:.1%}"


def _fixed_row(trial: Trial) -> tuple[str, ...]:
    return *_cells(trial.policy, trial.screened), f"{len(trial.screened.right)}", trial.fate.value


def _speed_row(trial: Trial) -> tuple[str, ...]:
    answers = trial.screened
    interval = f"{answers.interval.low:.1%} to {answers.interval.high:.1%}"
    return *_cells(trial.policy, answers), interval, f"{len(answers.right)}"


def _check_row(check: Check) -> tuple[str, ...]:
    pairs = check.pairs
    low, high = 100 * pairs.interval.low, 100 * pairs.interval.high
    return (
        *_cells(check.policy, check.answers),
        f"{check.full.exact_match:.1%}",
        f"{100 * pairs.difference:+.1f} ({low:+.1f} to {high:+.1f})",
        f"{check.p_value:.2g}",
        "passed" if check.passed else "failed",
    )


app = new_app()


GridName = StrEnum("GridName", ["ours", "paper", "windows"])
"""The values of `--grid`."""


EXIT_CODES = {
    Outcome.CHOSEN: ExitCode.DONE,
    Outcome.NOT_SHOWN: ExitCode.NO_SAFE_SETTING,
    Outcome.TOO_LITTLE_KNOWN: ExitCode.TOO_LITTLE_KNOWN,
}


@app.command("calibrate")
@takes_engine
def calibrate_command(
    engine_options: Options,
    model: Model = "demo",
    task: Annotated[
        str,
        typer.Option(
            "--task",
            help="What the answers are scored on: a generated task (word-problems, boolean-expressions, word-sorting, "
            "dyck-languages, object-counting, tracking-shuffled-objects, multistep-arithmetic), as word-sorting:3 of "
            "that size; functions; gsm8k, humaneval, mbpp, bbh or bbh/<task> with --data.",
        ),
    ] = "word-problems",
    data: Data = None,
    num_fewshot: Fewshot = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask a chat model in its own form, as d3engine eval has it.")
    ] = False,
    answers: Annotated[
        Path | None,
        typer.Option(
            "--answers",
            help="Keep every answer in this file, and ask only what is not in it: so a calibration can be ended and "
            "begun again.",
        ),
    ] = None,
    tolerance: Annotated[
        str,
        typer.Option(
            "--tolerance",
            help="Loss of exact match that is accepted: points of 100, or with a % sign a part of full depth's; "
            "at most a fifth of what full depth surely knows.",
        ),
    ] = "2",
    least_saving: Annotated[
        float, typer.Option("--least-saving", help="Layers that a setting must leave out to be worth a loss, in %.")
    ] = 0.0,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            help=f"Problems of the certificate ({USUAL_CERTIFICATION}, or all of a file); 2 points take 190 at least.",
        ),
    ] = None,
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
    bridges: Annotated[
        list[str] | None,
        typer.Option(
            "--bridges", metavar="FILE", help="Also try each setting with these bridges; may be repeated (none)."
        ),
    ] = None,
    ranks: Annotated[
        list[int] | None,
        typer.Option("--bridge-rank", metavar="R", help="Also try their maps cut to this rank; may be repeated."),
    ] = None,
    grid: Annotated[
        GridName,
        typer.Option(
            "--grid",
            help="Which settings without --start and --alpha: ours, which has fixed windows of low layers too; these "
            "windows alone; or the paper's 28.",
        ),
    ] = GridName.ours,
    widths: Annotated[
        list[int] | None,
        typer.Option("--window-width", metavar="N", help="Layers of a fixed window; may be repeated (1, 2, 3, 4, 6)."),
    ] = None,
    windows_from: Annotated[
        Path | None,
        typer.Option("--windows-from", metavar="REPORT", help="Of d3engine depth measure: its best windows are tried."),
    ] = None,
    check: Annotated[
        str | None,
        typer.Option(
            "--check",
            help='Certify this setting alone, "d3 alpha=A start=S" or "distilled skip-layers=5-9 student=FILE" say, '
            "and search none.",
        ),
    ] = None,
    draft: Annotated[
        int | None,
        typer.Option("--draft", metavar="TRIALS", help="Trials of a search for the parts of layers to draft without."),
    ] = None,
    draft_by: Annotated[
        ScoreName, typer.Option("--draft-by", help="What the best draft has least of: weights read, or time.")
    ] = ScoreName.weights,
    out: Annotated[
        Path | None, typer.Option("--out", help=f"Where to write the setting ({POLICY_FILE} beside the weights).")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Also draw the grid to this PNG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything that was tried as JSON.")] = False,
) -> None:
    """Find the fastest depth setting that is safe, by a paired test against full depth, and write it to d3.json.

    Settings are sorted out on the validation split and certified on the test split; --check takes one that was found
    elsewhere, as on a smaller model. Exit code 3 says that none could be shown to be safe on these problems, 4 that
    full depth knows too little of the task for a loss to mean anything; nothing is written then. --draft finds, for
    draft-and-verify, what full depth's own answers are drafted best without; then 3 says that no draft is worth its
    while. Greedy; --seed also picks the problems.
    """
    accepted = read_tolerance(tolerance)
    require_number("--least-saving", least_saving, 0, 100, open_high=True)
    directory = model_directory(model)
    target = _target(model, directory, out)
    check_plot("--plot", plot)
    check_output("--answers", answers)
    seed = engine_options.get("seed", 0)
    measures_depths()

    from d3engine.cli.eval import computed_by, kept_answers
    from d3engine.model.bridges import BRIDGES_FILE
    from d3engine.model.expected_tensors import fingerprint
    from d3engine.model.students import student_path
    from d3engine.research.calibration.bridge_choices import as_run, check_student_target, check_target
    from d3engine.research.calibration.report import as_dict, measured_windows, written_students
    from d3engine.research.calibration.scoring import EngineScorer
    from d3engine.research.calibration.tasks import calibration_task
    from d3engine.research.evaluation.baselines import open_bridges

    asked = calibration_task(task, data, seed=seed, shots=num_fewshot, chat=chat)
    grids: Options = {"--start": starts, "--alpha": alphas, "--tail": tails, "--plot": plot}
    grids |= {"--bridges": bridges, "--bridge-rank": ranks, "--window-width": widths, "--windows-from": windows_from}
    if draft is not None:
        grids = {"--check": check, "--answers": answers and str(answers), **grids}
        wanted: Options = {"trials": draft, "score": draft_by, "limit": limit, "max_tokens": max_tokens}
        code = find_draft(model, directory, engine_options, asked, target, as_json=as_json, refused=grids, **wanted)
        raise typer.Exit(code)
    most = require_integer("--max-tokens", asked.max_tokens if max_tokens is None else max_tokens, 2)
    layers = ModelConfig.from_directory(directory).num_layers
    given = _given_setting(check, layers, most, grids)
    name = fingerprint(directory)
    with TemporaryDirectory(prefix="d3engine-") as cuts:
        choices = _bridge_choices(given, bridges, ranks, directory, name, Path(cuts))
        check_target(choices, target.with_name(BRIDGES_FILE))
        for student, written in (written_students(given.policy) if given else {}).items():
            check_student_target(student_path(directory, student), student_path(target.parent, written))
        usual = PAPER_ALPHAS if grid is GridName.paper else ALPHAS
        held = {choice.name: choice.windows for choice in choices.values()}
        has_windows = grid is GridName.windows or (grid is GridName.ours and not (starts or alphas or tails))
        for flag, value in (("--window-width", widths), ("--windows-from", windows_from and str(windows_from))):
            allowed = "absent beside --start, --alpha, --tail and --grid paper"
            require(has_windows or not value, flag, value, allowed)
        candidates = [given] if given else []
        if not given and grid is not GridName.windows:
            candidates = make_candidates(layers, most, starts or STARTS, alphas or usual, tails or (0,), held)
        if not given and has_windows:
            known = {} if windows_from is None else measured_windows(windows_from)
            candidates += window_candidates(layers, widths or [one for one in WIDTHS if one < layers], known, held)
        skips = "such that a setting skips something"
        require(len(candidates) > 0, "--start, --alpha, --tail", (starts, alphas, tails), skips)
        _check_windows(choices, candidates)
        if given:
            plan = plan_check(limit, accepted, asked.has)
        else:
            plan = plan_budget(len(candidates), budget, limit, accepted, asked.has)
        parts = asked.parts(plan.screening, plan.certification)
        _tell_plan(plan, accepted, len(candidates))
        engine = open_engine(model, engine_options, FullDepth())
        params = sampling_params(engine, {"max_tokens": most, "temperature": 0.0, "stop": list(asked.stop) or None})
        run = [as_run(one.policy, choices) for one in candidates]
        open_bridges(engine, run)
        made_of = {str(one.path): one.made_of for one in choices.values() if one.made_of}
        kept = None if answers is None else kept_answers(answers, engine, [FullDepth(), *run], made_of)
        scorer = EngineScorer(engine, params, parts, choices, kept)
        result = _search(scorer, candidates, plan, accepted, least_saving / 100, only=given)
        ran = computed_by(engine) | {"device": engine.device.type}
        about: Options = {"task": task, "seed": seed, "max_tokens": most, **ran}
        about |= {} if num_fewshot is None else {"shots": num_fewshot}
        about |= {"chat": True} if chat else {}
        report = as_dict(result, {"model": model, "fingerprint": name, **about})
        # First of all, so that nothing after it can lose the work, and while the maps that were cut are there.
        if result.chosen is not None:
            try:
                _write(result, choices, about, name, target, engine)
            except InvalidValueError:
                print_json({**report, "written": None})  # all that is left of the work
                raise
    if as_json:
        print_json({**report, "written": str(target) if result.chosen else None})
    else:
        show_calibration(result, task, target)
    if plot and result.full is not None:
        from d3engine.research.calibration.report import plot_calibration

        plot_calibration(result, _title(model, task, result), plot)
    raise typer.Exit(EXIT_CODES[outcome(result)])


def read_tolerance(words: str) -> Tolerance:
    """ "2": two points of 100; "5%": five percent of full depth's exact match."""
    number, relative = words.strip().removesuffix("%").rstrip(), words.strip().endswith("%")
    allowed = f"above 0 and below {100 / FLOOR:g}, in points of 100 or, with a % sign, as a part of full depth's"
    try:
        value = float(number)
    except ValueError:
        raise InvalidValueError("--tolerance", words, allowed) from None
    require(0 < value < 100 / FLOOR, "--tolerance", words, allowed)
    return Tolerance(value / 100, relative)


def _tell_plan(plan: Budget, tolerance: Tolerance, settings: int) -> None:
    """What will be done, and what it can show, before it is done."""
    from d3engine.research.calibration.report import power_table

    chances = [
        f"{row['certified']:.0%} if {100 * row['differing']:g} %{' are' * (number == 0)}"
        for number, row in enumerate(row for row in power_table(plan.certification, tolerance) if row["differing"])
    ]
    where = ", with full depth right on all of the problems," if tolerance.relative else ""
    note(
        f"{settings} setting{'s' * (settings > 1)}, at most {plan.answers} answers: {plan.screening} problems to "
        f"search, {plan.certification} others to certify.\n"
        f"How likely a setting without any loss is certified at a tolerance of {tolerance}{where} depends on how many "
        f"of its answers are right where full depth's are wrong, or the reverse: {', '.join(chances)}.",
    )


def _target(model: str, directory: Path, out: Path | None) -> Path:
    """Where the setting will be written; that it can be is found out before the hours of work."""
    target = beside_weights(model, directory, out, POLICY_FILE)
    fetched = f"given as a file to write, since {target} is a link to a file that was downloaded"
    require(out is not None or not target.is_symlink(), "--out", NOTHING, fetched)
    require(not target.is_dir(), "--out", str(target), "a file, not a directory")
    writable = target.parent.is_dir() and os.access(target.parent, os.W_OK)
    require(writable, "--out", str(target), "a file in a directory that can be written")
    return target


def _given_setting(words: str | None, num_layers: int, max_tokens: int, others: dict[str, Any]) -> Candidate | None:
    """The setting of `--check`, beside which no grid is given."""
    if words is None:
        return None
    from d3engine.cli.depth_options import parse_depth

    for flag, value in others.items():
        require(value is None or value == [], flag, value, "absent beside --check, which tries one setting")
    policy = parse_depth(words, "--check")
    if not isinstance(policy, D3 | FixedSkip | Nested | Distilled | Width):
        allowed = 'a setting of d3, fixed, nested, distilled or width, such as "d3 alpha=A start=S"'
        raise InvalidValueError("--check", words, allowed)
    require(
        policy.schedule(num_layers).same_layers_until(0) < max_tokens,
        "--check",
        words,
        f"a setting that skips something within {max_tokens} tokens",
    )
    return Candidate(policy, (policy,))


def _bridge_choices(
    given: Candidate | None,
    files: list[str] | None,
    ranks: list[int] | None,
    directory: Path,
    weights: str,
    cut_to: Path,
) -> Mapping[str, BridgeChoice]:
    """What --bridges names, or the setting of --check; cut maps are written into `cut_to`."""
    require(bool(files) or not ranks, "--bridge-rank", ranks, "given beside --bridges, whose maps it cuts")
    own = None if given is None else getattr(given.policy, BRIDGES, None)
    if own is not None:
        files = [own]
    if not files:
        return {}
    from d3engine.research.calibration.bridge_choices import bridge_choices

    require(len(set(files)) == len(files), "--bridges", files, "files of which each is named once")
    return bridge_choices(files, ranks or (), directory, weights, cut_to)


def _check_windows(choices: Mapping[str, BridgeChoice], candidates: Sequence[Candidate]) -> None:
    """That each choice serves some setting; those that it does not serve are tried without it."""
    for choice in choices.values():
        served = any(getattr(one.policy, BRIDGES, None) == choice.name for one in candidates)
        require(served, "--bridges", choice.name, "a file with all windows of at least one setting that is tried")


def _write(
    result: Calibration, choices: Mapping[str, BridgeChoice], about: Options, weights: str, target: Path, engine: Engine
) -> None:
    """Write the setting that was chosen to `target`, and its bridges or its students beside it."""
    from d3engine.model.bridges import BRIDGES_FILE
    from d3engine.model.students import student_path
    from d3engine.research.calibration.bridge_choices import write_copy
    from d3engine.research.calibration.report import policy_file, write_policy_file, written_students

    assert result.chosen is not None
    files: Options = {}
    if (bridges := getattr(result.chosen, BRIDGES, None)) is not None:
        files[BRIDGES] = write_copy(choices[bridges].path, target.with_name(BRIDGES_FILE), bridges)
    for student, written in written_students(result.chosen).items():
        path = student_path(target.parent, written)
        files[path.stem] = write_copy(engine.bridges.student_path(student), path, student)
    write_policy_file(policy_file(result, about, weights, files), target)


def _search(
    scorer: Any,
    candidates: Sequence[Candidate],
    plan: Budget,
    tolerance: Tolerance,
    least_saving: float,
    only: Candidate | None = None,
) -> Calibration:
    with progress_bar(None, "answer", plan.answers, smoothing=0.1) as bar:

        def progress(step: str, answers: int) -> None:
            bar.set_description(step)
            bar.update(answers)

        if only is not None:
            return check_setting(scorer, only.policy, plan, tolerance, progress)
        return calibrate(scorer, candidates, plan, tolerance, progress, least_saving=least_saving)


def _title(model: str, task: str, result: Calibration) -> str:
    chosen = outcome(result).value if result.chosen is None else setting(result.chosen)
    return f"{Path(model).name}, {task}, tolerance {result.tolerance}: {chosen}"
