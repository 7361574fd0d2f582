"""`d3engine analyze`: what the layers of a model do while it answers, as tables, pictures and JSON.

The one idea: every subcommand measures the model's own greedy answers to some prompts (held-out word problems, or a
file of yours) and shows one result in the three ways.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from d3engine.cli.apps import new_app
from d3engine.cli.depth_options import AUTO, Depth, number, takes_depth
from d3engine.cli.engine_options import Model, Options, model_directory, takes_engine
from d3engine.cli.observing import (
    AsJson,
    Limit,
    MaxTokens,
    Png,
    Prompts,
    observe,
    picture_title,
    show_result,
    with_bar,
)
from d3engine.cli.output_files import check_output, printing_last, write_output
from d3engine.depth import D3, DepthPolicy, FullDepth, Schedule
from d3engine.depth.statistics import ModelShape, flops_ratio, mean_depth
from d3engine.errors import require, require_integer
from d3engine.progress import hides_bars

if TYPE_CHECKING:
    from d3engine.analysis.answers import Answered
    from d3engine.analysis.copying import Outcome, TailCopied
    from d3engine.analysis.sample import Sample
    from d3engine.engine import Engine

app = new_app(
    help="Look into a model while it answers: the D3 paper's analyses, each as table, picture and JSON.",
    no_args_is_help=True,
)

DEFAULT_DECAYS = (0.8, 0.9, 0.99, 0.999, 0.9999)
SAMPLE_DEPTH = D3(alpha=0.9, start=0.6)
"""What `sample` shows where neither --depth nor d3.json names a policy."""


@app.command()
@takes_engine
def saturation(
    engine_options: Options,
    model: Model = "demo",
    prompts: Prompts = None,
    limit: Limit = 100,
    max_tokens: MaxTokens = 128,
    png: Png = None,
    as_json: AsJson = False,
) -> None:
    """After how many layers each token's prediction is settled, and how sure it is then (Table 2)."""
    from d3engine.analysis.saturation import measure_saturation

    _, observer, answered = observe(model, engine_options, prompts, limit, max_tokens, png)
    result = measure_saturation(observer, with_bar(answered, "saturation"))
    with printing_last(partial(show_result, result, as_json)):
        if png:
            from d3engine.analysis.pictures import plot_saturation

            plot_saturation(result, png, picture_title(model, result.table()))


@app.command()
@takes_engine
def perplexity(
    engine_options: Options,
    model: Model = "demo",
    prompts: Prompts = None,
    limit: Limit = 500,
    max_tokens: MaxTokens = 128,
    png: Png = None,
    as_json: AsJson = False,
) -> None:
    """How sure the model is of its own answer, by generation step (Figure 2b)."""
    from d3engine.analysis.perplexity import measure_perplexity

    _, _, answered = observe(model, engine_options, prompts, limit, max_tokens, png)
    result = measure_perplexity(answered)
    with printing_last(partial(show_result, result, as_json)):
        if png:
            from d3engine.analysis.pictures import plot_perplexity

            plot_perplexity(result, png, picture_title(model, result.table()))


@app.command()
@takes_engine
def flow(
    engine_options: Options,
    model: Model = "demo",
    prompts: Prompts = None,
    limit: Limit = 50,
    max_tokens: MaxTokens = 128,
    png: Png = None,
    as_json: AsJson = False,
) -> None:
    """How much each layer, its attention and its MLP change what passes through (Figure 3)."""
    from d3engine.analysis.flow import measure_flow

    _, observer, answered = observe(model, engine_options, prompts, limit, max_tokens, png)
    result = measure_flow(observer, with_bar(answered, "flow"))
    with printing_last(partial(show_result, result, as_json)):
        if png:
            from d3engine.analysis.pictures import plot_flow

            plot_flow(result, png, f"{Path(model).name}: what each part of a layer changes in the residual stream")


@app.command()
@takes_engine
def copy(
    engine_options: Options,
    model: Model = "demo",
    prompts: Prompts = None,
    limit: Limit = 50,
    max_tokens: MaxTokens = 128,
    layers: Annotated[
        list[int] | None,
        typer.Option("--layers", help="Last layers to copy; may be repeated (1, 1/8, 1/4 and 1/2 of all)."),
    ] = None,
    steps: Annotated[
        list[int] | None,
        typer.Option("--from-step", help="Step to copy from; may be repeated (1, 2, 4, 8, 16 and 32)."),
    ] = None,
    png: Png = None,
    as_json: AsJson = False,
) -> None:
    """What is still right when the last layers are copied from some step on (Figure 2a).

    Right is the word problem's answer; with --prompts it is the answer that the model gives at full depth.
    """
    from tqdm import tqdm

    from d3engine.analysis.copying import measure_copying
    from d3engine.analysis.report import counted
    from d3engine.model.config import ModelConfig

    total = ModelConfig.from_directory(model_directory(model)).num_layers
    counts = sorted(set(layers or [1, max(total // 8, 1), max(total // 4, 1), max(total // 2, 1)]))
    from_steps = sorted(set(steps or [1, 2, 4, 8, 16, 32]))
    for count in counts:
        require_integer("--layers", count, 1, total)
    for step in from_steps:
        require_integer("--from-step", step, 1)
    engine, _, answered = observe(model, engine_options, prompts, limit, max_tokens, png)
    outcome, measure = _outcome(engine, prompts, engine_options, answered, max_tokens)
    lengths = [len(one.token_ids) for one in answered]
    with tqdm(
        total=1 + len(counts) * len(from_steps), desc="copy", unit="setting", disable=hides_bars(), leave=False
    ) as bar:
        result = measure_copying(
            outcome, measure, max_tokens, lengths, counts, from_steps, lambda: bar.update() and None
        )
    with printing_last(partial(show_result, result, as_json)):
        if png:
            from d3engine.analysis.pictures import plot_copying

            plot_copying(result, png, f"{Path(model).name}: last layers copied, {counted(len(answered), 'answer')}")


def _outcome(
    engine: Engine, prompts: Path | None, options: Options, answered: Sequence[Answered], max_tokens: int
) -> tuple[Callable[[TailCopied], Outcome], str]:
    """How a policy's answers are judged, and the name of that measure."""
    from d3engine.analysis.copying import Outcome

    if prompts is not None:
        return partial(_agreement, engine, answered, max_tokens), "answers equal to full depth's"
    from d3engine.evaluation.accuracy import measure, take_problems
    from d3engine.request.params import SamplingParams

    problems = take_problems("test", options.get("seed", 0), len(answered))
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)

    def exact_match(policy: TailCopied) -> Outcome:
        score = measure(engine, problems, policy, params)
        return Outcome(len(problems), score.correct, score.unfinished)

    return exact_match, "exact match"


def _agreement(engine: Engine, full: Sequence[Answered], max_tokens: int, policy: TailCopied) -> Outcome:
    from d3engine.analysis.answers import answer
    from d3engine.analysis.copying import Outcome

    found = answer(engine, [one.prompt for one in full], max_tokens, policy)
    right = sum(a.token_ids == b.token_ids for a, b in zip(found, full, strict=True))
    return Outcome(len(full), right, sum(one.cut_off for one in found))


@app.command("schedule")
def show_schedule(
    model: Model = "demo",
    alphas: Annotated[
        list[float] | None,
        typer.Option("--alpha", help="A decay to draw; may be repeated (0.8, 0.9, 0.99, 0.999 and 0.9999)."),
    ] = None,
    start: Annotated[
        str, typer.Option("--start", parser=number, metavar="NUMBER", help="Fraction of the layers below the window.")
    ] = "0.6",
    tail: Annotated[int, typer.Option("--tail", help="This many last layers are never skipped.")] = 0,
    steps: Annotated[int, typer.Option("--steps", help="Generated tokens to look at.")] = 200,
    png: Png = None,
    as_json: AsJson = False,
) -> None:
    """How depth falls along an answer for several decays (Figure 4). Needs the model's config alone.

    `d3engine schedule` shows a single policy layer by layer.
    """
    from d3engine.cli.terminal import print_table
    from d3engine.model.config import ModelConfig

    require_integer("--steps", steps, 1, 10_000_000)
    if png:
        from d3engine.pictures.plots import check_picture, plot_decay

        check_picture("--png", png)
    config = ModelConfig.from_directory(model_directory(model))
    fields = ("hidden_size", "intermediate_size", "vocab_size", "num_heads", "num_kv_heads", "head_dim")
    shape = ModelShape(config.num_layers, **{field: getattr(config, field) for field in fields})
    policies = [D3(alpha=alpha, start=cast(Any, start), tail=tail) for alpha in alphas or DEFAULT_DECAYS]
    found = {f"alpha {policy.alpha:g}": policy.schedule(config.num_layers) for policy in policies}
    summaries = {label: _decay(schedule, steps, shape) for label, schedule in found.items()}
    rows = [
        (
            label,
            f"{one['mean_layers']:.3f}",
            f"{one['flops_ratio']:.2f}",
            f"{one['last_depth']}",
            f"{one['deepest_skip_from']}",
        )
        for label, one in summaries.items()
    ]
    title = f"D3, start {start}" + (f", tail {tail}" if tail else "") + f", {config.num_layers} layers, {steps} tokens"
    header = ("decay", "mean layers", "FLOPs ratio", "layers at the end", "since step (from 0)")
    if as_json:
        report = {"num_layers": config.num_layers, "start": start, "tail": tail, "steps": steps}
        typer.echo(json.dumps({**report, "schedules": summaries}, indent=2))
    else:
        print_table(title, header, rows)
    if png:
        plot_decay(found, steps, png, title)


def _decay(schedule: Schedule, steps: int, shape: ModelShape) -> dict[str, Any]:
    mean = mean_depth(schedule, steps)
    last, _ = schedule.runs(steps)[-1]
    return {
        "mean_layers": mean,
        "flops_ratio": flops_ratio(mean, shape.num_layers, shape.layer_parameters, shape.head_parameters),
        "last_depth": schedule.depth_at(last),
        "deepest_skip_from": last,
        "runs": [
            {"first_step": first, "last_step": end - 1, "depth": schedule.depth_at(first)}
            for first, end in schedule.runs(steps)
        ],
    }


@app.command()
@takes_depth
@takes_engine
def sample(
    engine_options: Options,
    depth: Depth,
    model: Model = "demo",
    prompts: Prompts = None,
    limit: Limit = 1,
    answer_tokens: MaxTokens = 128,  # depth has a max_tokens of its own
    guesses: Annotated[
        int,
        typer.Option("--guess-layers", help="After so many layers (all at most), evenly spread, show the guesses."),
    ] = 4,
    png: Png = None,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a page with the guesses on hover.")] = None,
    as_json: AsJson = False,
) -> None:
    """Answers at full depth and under a policy, each token coloured by the layers it ran (Figure 7).

    Without --depth the policy is the model's own (d3.json), or D3 with alpha 0.9 and start 0.6.
    """
    from d3engine.analysis.answers import answer
    from d3engine.analysis.report import counted
    from d3engine.analysis.sample import Sample, guess_layers, take_sample

    require_integer("--guess-layers", guesses, 1)
    check_output("--html", html)
    engine, observer, answered = observe(model, engine_options, prompts, limit, answer_tokens, png)
    require(engine.tokenizer is not None, "model", model, "a model with a tokenizer")
    assert engine.tokenizer is not None
    policy = _sample_policy(model, depth)
    layers = guess_layers(engine.config.num_layers, guesses)
    answers = []
    for full in with_bar(answered, "sample"):
        for one in dict.fromkeys([FullDepth(), policy]):
            found = full if isinstance(one, FullDepth) else answer(engine, [full.prompt], answer_tokens, one)[0]
            answers.append(take_sample(observer, engine.tokenizer, found, one, layers))
    result = Sample(engine.config.num_layers, answers)
    title = f"{Path(model).name}: {counted(len(answered), 'prompt')}, by layers run"
    with printing_last(partial(_print_sample, result, as_json)):
        if png:
            from d3engine.analysis.pictures import plot_sample

            plot_sample(result, png, title, [one.heading(result.num_layers) for one in answers])
        if html:
            from d3engine.cli.sample_page import sample_page

            write_output("--html", html, sample_page(result, title))


def _sample_policy(model: str, depth: Depth) -> DepthPolicy:
    from d3engine.loading.depth import resolve_depth

    if depth != AUTO:
        return depth
    own = resolve_depth(AUTO, model_directory(model))
    return SAMPLE_DEPTH if isinstance(own, FullDepth) else own


def _print_sample(result: Sample, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(result.as_dict(), indent=2))
    else:
        from d3engine.cli.sample_text import show_sample

        show_sample(result)
