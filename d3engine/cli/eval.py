"""`d3engine eval`: how often a model is right under one depth policy or several, with intervals, and what it cost.

The one idea: all policies of a run answer the same questions on one engine, and each is compared with the first,
question by question. The questions are generated, read from files, or lm-evaluation-harness's.
"""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from d3engine.cli.apps import new_app
from d3engine.cli.depth_options import AUTO, Depth, takes_depth
from d3engine.cli.engine_options import (
    Model,
    Options,
    check_sampling,
    open_engine,
    takes_engine,
    takes_task_sampling,
)
from d3engine.cli.eval_run import HARNESS_MAX_TOKENS, Run, resolve_policies
from d3engine.cli.output_files import check_output
from d3engine.cli.verbosity import measures_depths
from d3engine.errors import NOTHING, InvalidValueError, require, require_integer
from d3engine.evaluation import catalogue
from d3engine.integrations.lm_eval_harness import find_tasks

app = new_app()


class SplitName(StrEnum):
    """The parts of a task; they share no question."""

    train = "train"
    validation = "validation"
    test = "test"


@app.command("eval")
@takes_depth
@takes_task_sampling
@takes_engine
def evaluate(
    engine_options: Options,
    sampling: Options,
    depths: list[Depth],
    model: Model = "demo",
    tasks: Annotated[
        str,
        typer.Option(
            "--tasks",
            "--task",
            help="Names, with commas: generated tasks (word-problems, boolean-expressions, word-sorting, "
            "dyck-languages, object-counting, tracking-shuffled-objects, multistep-arithmetic), as word-sorting:3 of "
            "that size; gsm8k, bbh and bbh/<task> with --data; without it, any task of lm-evaluation-harness (eval).",
        ),
    ] = "word-problems",
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder with gsm8k/ and bbh/ to read questions from.")
    ] = None,
    split: Annotated[SplitName, typer.Option("--split", help="Which questions.")] = SplitName.test,
    limit: Annotated[
        int | None, typer.Option("--limit", help="Questions of each task (500 generated ones; all of a file).")
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option("--num-fewshot", help="Solved examples before a question (3; none if generated).")
    ] = None,
    compare_full: Annotated[bool, typer.Option("--compare-full", help="Full depth first, to compare with.")] = False,
    baselines: Annotated[
        bool,
        typer.Option(
            "--baselines",
            help="After each D3: other skips at its nominal mean depth, and Early Exit at its depth on validation; "
            "after one with bridges also itself without, and the nested windows of the file.",
        ),
    ] = False,
    exit_questions: Annotated[
        int | None,
        typer.Option(
            "--exit-questions",
            help="Questions by which --baselines finds Early Exit's threshold, up to nine times each (64, or fewer).",
        ),
    ] = None,
    share_prompts: Annotated[
        bool,
        typer.Option(
            "--share-prompts",
            help="Compute each prompt once for all policies; answers stay the same, times are no comparison.",
        ),
    ] = False,
    answers: Annotated[
        Path | None,
        typer.Option(
            "--answers",
            help="Keep every answer in this file (JSON lines), and ask only what is not in it: so a run can be ended "
            "and begun again, and get a larger --limit or more policies. Times are no comparison.",
        ),
    ] = None,
    include_path: Annotated[
        Path | None, typer.Option("--include-path", help="Folder with task files of your own for the harness.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Also write the tables to this page.")] = None,
) -> None:
    """Measure exact match under depth policies, with 95 % intervals, layers, FLOPs ratios, tokens and time.

    Greedy unless sampling options say otherwise; --seed also picks the questions and examples. Policies run in turn;
    the first --depth is the one that the others are compared with.
    """
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    require(len(names) > 0 and len(set(names)) == len(names), "--tasks", tasks, "different names, separated by commas")
    if limit is not None:
        require_integer("--limit", limit, 1)
    if exit_questions is not None:
        require_integer("--exit-questions", exit_questions, 1)
    check_output("--html", html)
    check_output("--answers", answers)
    is_harness = data is None and not catalogue.are_generated(names)
    require(is_harness or include_path is None, "--include-path", str(include_path), "given only with harness tasks")
    seed = engine_options.get("seed", 0)
    sets_exits = exit_questions is None or (baselines and not is_harness)
    require(sets_exits, "--exit-questions", exit_questions, "given with --baselines, and no task of the harness")
    if baselines:
        measures_depths()
    run = Run(model, names, seed, limit, num_fewshot, html, as_json, share_prompts, answers)
    if is_harness:
        require(not share_prompts, "--share-prompts", NOTHING, "given with tasks that are not the harness's")
        require(answers is None, "--answers", str(answers), "absent with tasks that are not d3engine's")
        only = {name: value for name, value in sampling.items() if name != "max_tokens"}
        for name, value in only.items():
            raise InvalidValueError("--" + name.replace("_", "-"), value, "left to the tasks of the harness")
        require(split is SplitName.test, "--split", split.value, "'test', since harness tasks split for themselves")
        found = find_tasks(names, str(include_path) if include_path else None)
        engine = open_engine(model, engine_options, AUTO if AUTO in depths else None)
        lengths = {sampling.get("max_tokens", catalogue.harness_length(name, HARNESS_MAX_TOKENS)) for name in names}
        same = f"tasks of one length beside --baselines, whose depth is over it (here {sorted(lengths)} tokens)"
        require(not baselines or len(lengths) == 1, "--tasks", tasks, same)
        policies = resolve_policies(engine, depths, compare_full, baselines, max(lengths))
        run.with_harness(engine, found, policies, sampling.get("max_tokens"))
        return
    check_sampling(sampling)
    given = {"split": split.value, "seed": seed, "limit": limit, "shots": num_fewshot}
    benchmarks = catalogue.from_files(names, data, **given) if data else catalogue.generated(names, **given)
    engine = open_engine(model, engine_options, AUTO if AUTO in depths else None)
    more = {"seed": seed, "shots": num_fewshot, "most": exit_questions}
    depth_questions = partial(catalogue.depth_questions, folder=data, **more) if baselines else None
    run.with_benchmarks(engine, benchmarks, depths, sampling, compare_full, depth_questions)
