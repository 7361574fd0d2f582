"""`d3engine eval`: how often a model is right under a depth policy, with intervals, and what the depth saved.

The one idea: `--compare-full` answers the same problems at full depth too, and compares problem by problem.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any

import typer

from d3engine.cli import new_app
from d3engine.cli.depth_options import AUTO, Depth, takes_depth
from d3engine.cli.engine_options import (
    Options,
    check_sampling,
    open_engine,
    sampling_params,
    takes_engine,
    takes_sampling,
)
from d3engine.depth import FullDepth
from d3engine.errors import require
from d3engine.evaluation.accuracy import Comparison, Interval, Score, compare, measure, take_problems

app = new_app()

DEFAULT_MAX_TOKENS = 128


class Task(StrEnum):
    """What can be measured."""

    word_problems = "word-problems"


class SplitName(StrEnum):
    """The parts of the problems; they share no question."""

    train = "train"
    validation = "validation"
    test = "test"


@app.command("eval")
@takes_depth
@takes_sampling
@takes_engine
def evaluate(
    engine_options: Options,
    sampling: Options,
    depth: Depth,
    model: Annotated[str, typer.Argument(help='Model directory, or "demo" for the bundled model.')] = "demo",
    task: Annotated[Task, typer.Option("--task", help="What to measure.")] = Task.word_problems,
    split: Annotated[SplitName, typer.Option("--split", help="Which problems.")] = SplitName.test,
    limit: Annotated[int, typer.Option("--limit", help="How many problems.")] = 500,
    compare_full: Annotated[
        bool, typer.Option("--compare-full", help="Answer at full depth too, and compare problem by problem.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure exact match on held-out word problems, with 95 % intervals, layers, tokens and time.

    Greedy unless sampling options say otherwise; --seed also picks the problems.
    """
    sampling = {"max_tokens": DEFAULT_MAX_TOKENS, "temperature": 0.0, **sampling}
    check_sampling(sampling)
    seed = engine_options.get("seed", 0)
    given = take_problems(split.value, seed, limit)
    engine = open_engine(model, engine_options, depth)
    policy = engine.depth if depth == AUTO else depth
    is_full = isinstance(policy, FullDepth)
    require(not (compare_full and is_full), "--compare-full", True, "with another depth: name one with --depth")
    params = sampling_params(engine, sampling)
    progress = sys.stderr.isatty()
    policies = [FullDepth(), policy] if compare_full else [policy]
    measure(engine, given[:1], policies[0], params)  # whatever is slow the first time is not measured
    scores = [measure(engine, given, one, params, progress=progress) for one in policies]
    comparison = compare(*scores) if len(scores) == 2 else None
    about = {"model": model, "task": task.value, "split": split.value, "seed": seed, "problems": len(given)}
    if as_json:
        typer.echo(json.dumps(_as_dict(about, scores, comparison), indent=2))
    else:
        _show(about, scores, comparison)


def _as_dict(about: dict[str, Any], scores: list[Score], comparison: Comparison | None) -> dict[str, Any]:
    return {
        **about,
        "scores": [
            {
                "depth": score.policy.describe(),
                "correct": score.correct,
                "exact_match": score.accuracy,
                "interval_95": asdict(score.interval),
                "num_layers": score.num_layers,
                "nominal_mean_layers": score.nominal_mean_layers,
                "realised_mean_layers": score.realised_mean_layers,
                "tokens": score.tokens,
                "unfinished": score.unfinished,
                "seconds": score.seconds,
            }
            for score in scores
        ],
        "comparison": asdict(comparison) if comparison else None,
    }


def _show(about: dict[str, Any], scores: list[Score], comparison: Comparison | None) -> None:
    from d3engine.cli.terminal import policy_title, print_table

    header = ["", *(policy_title(score.policy) for score in scores)]
    columns = [_column(score) for score in scores]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    title = "{problems} problems of {task}, {split} split, seed {seed}, model {model}".format(**about)
    print_table(title, header, rows)
    if comparison:
        typer.echo(_in_words(comparison, policy_title(scores[1].policy)))


def _column(score: Score) -> dict[str, str]:
    return {
        "exact match": f"{score.accuracy:.1%} ({score.correct})",
        "95 % interval": _percent(score.interval),
        "layers a token, realised": f"{score.realised_mean_layers:.2f} of {score.num_layers}",
        "layers a token, nominal": f"{score.nominal_mean_layers:.2f} of {score.num_layers}",
        "tokens generated": f"{score.tokens}",
        "answers cut off": f"{score.unfinished}",
        "wall clock": f"{score.seconds:.1f} s",
    }


def _percent(interval: Interval) -> str:
    return f"{interval.low:.1%} to {interval.high:.1%}"


def _in_words(comparison: Comparison, name: str) -> str:
    points = [100 * value for value in (comparison.difference, comparison.interval.low, comparison.interval.high)]
    return (
        f"\n{name} minus full depth: {points[0]:+.1f} points, 95 % interval {points[1]:+.1f} to {points[2]:+.1f}.\n"
        f"Right at full depth only: {comparison.only_first}; right under {name} only: {comparison.only_second}; "
        f"McNemar's exact test: p = {comparison.p_value:.2g}."
    )
