"""`d3engine analyze`: what the layers of a model do while it answers, as tables, plots and JSON."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from d3engine.cli.commands import (
    AsJson,
    check_output,
    check_plot,
    new_app,
    print_json,
    print_table,
    printing_last,
    showing_what_is_done,
    write_output,
)
from d3engine.cli.depth_options import Depth, number, takes_depth
from d3engine.cli.engine_options import Model, Options, model_directory, takes_engine
from d3engine.cli.observing import (
    AnalysisOptions,
    Limit,
    Png,
    analysis,
    takes_questions,
    with_bar,
)
from d3engine.depth import D3, FullDepth, Schedule
from d3engine.depth.statistics import ModelShape, flops_ratio, mean_depth
from d3engine.errors import require, require_integer
from d3engine.utils.progress import counting, shows_bars

if TYPE_CHECKING:
    from d3engine.research.analysis.sample import Sample

app = new_app(
    help="Look into a model while it answers: the D3 paper's analyses, each as table, picture and JSON.",
    no_args_is_help=True,
)

DEFAULT_DECAYS = (0.8, 0.9, 0.99, 0.999, 0.9999)
LastLayers = Annotated[
    list[int] | None,
    typer.Option("--layers", help="Last layers to copy; may be repeated (1, 1/8, 1/4 and 1/2 of all)."),
]


@analysis(app, limit=12)
def layers(
    options: AnalysisOptions,
    widths: Annotated[
        list[int] | None,
        typer.Option("--width", help="Layers of a window; may be repeated (1, 2, 4 and 8, up to a third of all)."),
    ] = None,
    steps: Annotated[
        list[int] | None,
        typer.Option("--from-step", help="Step to skip from; may be repeated (1 and 32)."),
    ] = None,
) -> None:
    """Which layers the model can spare, and from which step on: the next token's loss by every window of layers.

    Every window is skipped in the same text, the model's own answers or with --reference-answers those of the task, and
    the next token's distribution is compared with full depth's: no task has to be solved. Ctrl-C or SIGTERM shows the
    texts that are done.
    """
    from d3engine.research.analysis.layers import measure_layers, passes
    from d3engine.research.analysis.plots import plot_layers

    total = options.num_layers
    chosen = sorted(set(widths or [width for width in (1, 2, 4, 8) if width == 1 or 3 * width <= total]))
    from_steps = sorted(set(steps or [1, 32]))
    for width in chosen:
        require_integer("--width", width, 1, total - 1)
    for step in from_steps:
        require_integer("--from-step", step, 1)
    seen = options.observe()
    longest = max(len(one.token_ids) for one in seen.answered)
    reached = [step for step in from_steps if step < longest] if steps is None else from_steps
    count = len(seen.answered) * passes(total, chosen, reached)
    with showing_what_is_done() as gather:
        with counting("layers", "window", count) as progress:
            result = measure_layers(seen.observer, seen.answered, chosen, reached, progress, gather)
        words = "loss of the next token by the window of layers skipped"
        options.present(result, plot_layers, words, lambda: (result.table(), result.position_table()))


@analysis(app, limit=50)
def kinds(options: AnalysisOptions, depth: Depth) -> None:
    """Digits, "####", line breaks, words ...: layers until settled, and what a policy costs each (the paper's limits).

    Steps are gathered by the token that they yield, and by the one that they are fed with, whose kind is known
    beforehand. The text is given: the model's own answers, or with --reference-answers those of the task. Without
    --depth the policy is the model's own (d3.json).
    """
    from d3engine.depth.labels import policy_in_words
    from d3engine.research.analysis.answers import answer
    from d3engine.research.analysis.kinds import SIDES, TokenKinds, measure_by_kind
    from d3engine.research.analysis.plots import plot_kinds

    policy = options.policy_or_own(depth)
    total = options.num_layers
    schedule = policy.schedule(total)
    is_plain = schedule.is_nested and policy.exit_rule(total) is None and not (policy.drafts or schedule.students)
    require(is_plain, "--depth", policy.name, "a policy whose layers are known before and stay skipped, such as d3")
    seen = options.observe()
    known = TokenKinds(seen.tokenizer(options.model), seen.engine.config.eos_token_ids)
    decoded = None
    if seen.asked.references is None:
        asked = seen.asked
        decoded = answer(seen.engine, asked.prompts, asked.max_tokens, policy, stop=asked.stop, progress=shows_bars())
    with counting("kinds", "answer", len(seen.answered)) as done:
        words = policy_in_words(policy)
        result = measure_by_kind(seen.observer, known, seen.answered, schedule, words, decoded, done)
    title = "what kinds of tokens need, and what they lose"
    options.present(result, plot_kinds, title, lambda: map(result.table, SIDES))


@analysis(app, limit=100)
def saturation(options: AnalysisOptions) -> None:
    """After how many layers each token's prediction is settled, and how sure it is then (Table 2)."""
    from d3engine.research.analysis.plots import plot_saturation
    from d3engine.research.analysis.saturation import measure_saturation

    seen = options.observe()
    options.present(measure_saturation(seen.observer, with_bar(seen.answered, "saturation")), plot_saturation)


@analysis(app, limit=500)
def perplexity(options: AnalysisOptions) -> None:
    """The model's confidence in its answer, by generation step (Figure 2b)."""
    from d3engine.research.analysis.plots import plot_perplexity
    from d3engine.research.analysis.saturation import measure_perplexity

    options.present(measure_perplexity(options.observe().answered), plot_perplexity)


@analysis(app, limit=50)
def flow(options: AnalysisOptions) -> None:
    """How much each layer, its attention and its MLP change what passes through (Figure 3)."""
    from d3engine.research.analysis.plots import plot_flow
    from d3engine.research.analysis.saturation import measure_flow

    seen = options.observe()
    result = measure_flow(seen.observer, with_bar(seen.answered, "flow"))
    options.present(result, plot_flow, "what each part of a layer changes in the residual stream")


@analysis(app, limit=50)
def copy(
    options: AnalysisOptions,
    layers: LastLayers = None,
    steps: Annotated[
        list[int] | None,
        typer.Option("--from-step", help="Step to copy from; may be repeated (1, 2, 4, 8, 16 and 32)."),
    ] = None,
) -> None:
    """What is still right when the last layers are copied from some step on (Figure 2a).

    Right is a question's own answer; with --prompts it is the answer that the model gives at full depth.
    """
    from d3engine.research.analysis.copying import Grid, measure_copying
    from d3engine.research.analysis.plots import plot_copying
    from d3engine.research.analysis.report import counted

    counts, from_steps = options.grid(layers, steps, "--from-step")
    seen = options.observe(judges=True)
    outcome, measure = seen.judge()
    lengths = [len(one.token_ids) for one in seen.answered]
    with counting("copy", "setting", 1 + len(counts) * len(from_steps)) as progress:
        result = measure_copying(outcome, Grid(measure, seen.asked.max_tokens, lengths, counts, from_steps), progress)
    options.present(result, plot_copying, f"last layers copied, {counted(len(lengths), 'answer')}")


@analysis(app, limit=50)
def perturb(
    options: AnalysisOptions,
    layers: LastLayers = None,
    steps: Annotated[
        list[int] | None,
        typer.Option("--at-step", help="The step to copy at; may be repeated (1, 2, 4, 8, 16 and 32)."),
    ] = None,
) -> None:
    """What one perturbed step costs: the last layers are copied there alone, and run again after it (Figure 2a).

    What these layers hold of that token is copied from the layer below, or recomputed from the state that passed them;
    later tokens read it. Right is as for `copy`.
    """
    from d3engine.research.analysis.copying import ENTRIES, Grid, measure_perturbing
    from d3engine.research.analysis.plots import plot_perturbing
    from d3engine.research.analysis.report import counted

    counts, at_steps = options.grid(layers, steps, "--at-step", spare=1)
    seen = options.observe(judges=True)
    outcome, measure = seen.judge()
    lengths = [len(one.token_ids) for one in seen.answered]
    with counting("perturb", "setting", 1 + len(ENTRIES) * len(counts) * len(at_steps)) as progress:
        result = measure_perturbing(outcome, Grid(measure, seen.asked.max_tokens, lengths, counts, at_steps), progress)
    options.present(result, plot_perturbing, f"one step perturbed, {counted(len(lengths), 'answer')}")


@analysis(app, limit=20, draws=False)
def oracle(options: AnalysisOptions) -> None:
    """What is lost if every token leaves at the layer where its prediction is settled (section 3.2).

    The layers above hold a copied or a recomputed entry of it. Token by token, one answer after the other: slow.
    """
    from d3engine.research.analysis.copying import ask_oracle

    seen = options.observe(judges=True)
    tokenizer, asked = seen.tokenizer(options.model), seen.asked
    texts = with_bar(seen.answered, "oracle")
    options.present(ask_oracle(seen.observer, tokenizer, texts, asked.max_tokens, asked.stop, asked.questions))


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
    from d3engine.model.config import ModelConfig

    require_integer("--steps", steps, 1, 10_000_000)
    check_plot("--png", png)
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
        print_json({**report, "schedules": summaries})
    else:
        print_table(title, header, rows)
    if png:
        from d3engine.research.plots import plot_decay

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
@takes_questions
@takes_depth
@takes_engine
def sample(
    engine_options: Options,
    asking: Options,
    depth: Depth,
    model: Model = "demo",
    limit: Limit = 1,
    guesses: Annotated[
        int,
        typer.Option("--guess-layers", help="Number of evenly spread layers whose guesses are shown."),
    ] = 4,
    png: Png = None,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a page with the guesses on hover.")] = None,
    as_json: AsJson = False,
) -> None:
    """Answers at full depth and under a policy, each token coloured by the layers it ran (Figure 7).

    Without --depth the policy is the model's own (d3.json).
    """
    from d3engine.research.analysis.answers import answer
    from d3engine.research.analysis.report import counted
    from d3engine.research.analysis.sample import Sample, guess_layers, take_sample

    require_integer("--guess-layers", guesses, 1)
    check_output("--html", html)
    options = AnalysisOptions(model, engine_options, asking, limit, png, as_json)
    policy = options.policy_or_own(depth)
    seen = options.observe(judges=True)
    engine = seen.engine
    tokenizer, layers = seen.tokenizer(model), guess_layers(engine.config.num_layers, guesses)
    answers = []
    for prompt, full in zip(seen.asked.prompts, with_bar(seen.answered, "sample"), strict=True):
        for one in dict.fromkeys([FullDepth(), policy]):
            found = (
                full
                if isinstance(one, FullDepth)
                else answer(engine, [prompt], seen.asked.max_tokens, one, stop=seen.asked.stop)[0]
            )
            answers.append(take_sample(seen.observer, tokenizer, found, one, layers))
    result = Sample(engine.config.num_layers, answers)
    title = f"{Path(model).name}: {counted(len(seen.answered), 'prompt')}, by layers run"
    with printing_last(partial(_print_sample, result, as_json)):
        if png:
            from d3engine.research.analysis.plots import plot_sample

            plot_sample(result, png, title, [one.heading(result.num_layers) for one in answers])
        if html:
            from d3engine.cli.sample_page import sample_page

            write_output("--html", html, sample_page(result, title))


def _print_sample(result: Sample, as_json: bool) -> None:
    if as_json:
        print_json(result.as_dict())
    else:
        from d3engine.cli.sample_page import show_sample

        show_sample(result)
