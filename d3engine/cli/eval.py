"""`d3engine eval`: exact match under one or several depth policies, with intervals and cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from d3engine.cli.bridge_texts import Data, Fewshot
from d3engine.cli.commands import (
    AsJson,
    check_output,
    measures_depths,
    new_app,
    note,
    print_json,
    print_table,
    printing_last,
    write_output,
)
from d3engine.cli.depth_options import AUTO, Depth, takes_depth
from d3engine.cli.engine_options import (
    Model,
    Options,
    check_sampling,
    open_engine,
    sampling_params,
    takes_engine,
    takes_task_sampling,
)
from d3engine.depth import D3, DepthPolicy, FullDepth
from d3engine.depth.labels import policy_in_words
from d3engine.errors import NOTHING, InvalidValueError, require, require_integer
from d3engine.integrations.lm_eval_harness import find_tasks, harness_charts, harness_dict, harness_tables, run_tasks
from d3engine.research.analysis.report import Table
from d3engine.research.evaluation import catalogue
from d3engine.research.evaluation.accuracy import Score, measure, measure_with_shared_prompts, shape_of
from d3engine.research.evaluation.baselines import (
    BISECTIONS,
    at_equal_depth,
    bridge_hashes,
    bridged_rivals,
    early_exit_at_depth,
    open_bridges,
    published_order,
)
from d3engine.research.evaluation.benchmark import Benchmark, Question, check_prompts
from d3engine.research.evaluation.chat_form import length_of
from d3engine.research.evaluation.kept import KeptAnswers
from d3engine.research.evaluation.report import (
    Chart,
    Result,
    as_dict,
    benchmark_tables,
    chart,
    side_by_side,
    tables,
)
from d3engine.utils.progress import counting, progress_bar, shows_bars

if TYPE_CHECKING:
    from d3engine.engine.engine import Engine
    from d3engine.request.params import SamplingParams


HARNESS_MAX_TOKENS = 256
"""Tokens of an answer whose task in lm-evaluation-harness does not say, as in the harness itself; gsm8k and bbh have
those of the paper."""


def resolve_policies(
    engine: Engine, wanted: Sequence[Depth], compare_full: bool, baselines: bool, max_tokens: int
) -> list[DepthPolicy]:
    """The policies to run, in order; the same one twice is refused."""
    named = [engine.depth if depth == AUTO else depth for depth in wanted]
    policies: list[DepthPolicy] = [FullDepth()] if compare_full else []
    is_repeated = compare_full and any(isinstance(one, FullDepth) for one in named)
    require(not is_repeated, "--compare-full", NOTHING, "given with other depths (--depth)")
    for nth, one in enumerate(named):
        require(one not in named[:nth], "--depth", policy_in_words(one), "a different one each time")
    has_d3 = any(isinstance(one, D3) for one in named)
    require(has_d3 or not baselines, "--baselines", NOTHING, "given with a D3 policy, whose mean depth they take")
    shape = shape_of(engine.config)
    order = published_order(shape)
    for one in named:
        policies.append(one)
        if baselines and isinstance(one, D3):
            at_depth = at_equal_depth(one, num_layers=shape.num_layers, max_tokens=max_tokens, removal_order=order)
            at_depth += bridged_rivals(engine, one, max_tokens)
            policies += [other for other in at_depth if other not in policies and other not in named]
    for one in policies:
        one.schedule(engine.config.num_layers)  # refused before the first has run
    open_bridges(engine, policies)
    return policies


@dataclass
class Run:
    """One run of the command: what was asked for, and how its results are shown."""

    facts: dict[str, Any]
    depths: Sequence[Depth]
    sampling: Options
    compare_full: bool
    shots: int | None
    html: Path | None
    as_json: bool
    shares_prompts: bool
    answers: Path | None
    has_printed: bool = False

    def with_benchmarks(
        self,
        engine: Engine,
        benchmarks: Sequence[Benchmark],
        depth_questions: Callable[[Benchmark], Sequence[Question]] | None,
    ) -> None:
        """Measure every benchmark under every policy, and show each one's results when it is done.

        With `depth_questions`, the baselines at each D3's depth too; by those questions that of early exit is set.
        Whatever would end the run halfway is refused before it begins: prompts too long, policies that do not fit.
        """
        check_prompts(benchmarks, length_of(engine), engine.max_model_len)
        baselines = depth_questions is not None
        planned = [self._plan(engine, benchmark, baselines) for benchmark in benchmarks]
        kept = None if self.answers is None else _kept_answers(self.answers, engine, planned)
        if depth_questions is not None:
            ask = partial(measure, engine, shares_prompts=self.shares_prompts, kept=kept)
            planned = [
                (_with_early_exits(ask, depth_questions(benchmark), policies, params), params)
                for benchmark, (policies, params) in zip(benchmarks, planned, strict=True)
            ]
        results = []
        for benchmark, (policies, params) in zip(benchmarks, planned, strict=True):
            results.append(_measure(engine, benchmark, policies, params, self.shares_prompts, kept))
            self._print(benchmark_tables(results[-1]))
        self.facts |= computed_by(engine)
        described = {"benchmarks": [as_dict(result) for result in results]}
        if len(results) > 1:
            self._print([side_by_side(results)])
        self._write(tables(results), described, [chart(result) for result in results])

    def with_harness(self, engine: Engine, found: Any, policies: Sequence[DepthPolicy], max_tokens: int | None) -> None:
        """Let lm-evaluation-harness run its tasks under every policy, and show the results."""
        runs = run_tasks(
            engine,
            self.facts["tasks"],
            [(policy_in_words(one), one) for one in policies],
            shots=self.shots,
            limit=self.facts["limit"],
            seed=self.facts["seed"],
            max_gen_toks=partial(catalogue.harness_length, otherwise=HARNESS_MAX_TOKENS)
            if max_tokens is None
            else max_tokens,
            manager=found,
        )
        self.facts |= computed_by(engine)
        described = {"harness": [harness_dict(run, runs[0]) for run in runs]}
        self._print(harness_tables(runs))
        self._write(harness_tables(runs), described, harness_charts(runs))

    def _print(self, found: Sequence[Table]) -> None:
        """Tables for people, now; nothing where JSON is to come."""
        if self.as_json:
            return
        for table in found:
            typer.echo("", nl=self.has_printed)
            self.has_printed = True
            print_table(table.title, table.header, table.rows, table.notes)

    def _write(self, found: Sequence[Table], described: dict[str, Any], charts: Sequence[Chart]) -> None:
        """What holds the whole run: the page, and JSON."""

        def report() -> None:
            if self.as_json:
                print_json({**self.facts, **described})

        with printing_last(report):
            if self.html is not None:
                from d3engine.research.evaluation.report import page

                facts = {name: _readable(value) for name, value in self.facts.items() if value is not None}
                write_output("--html", self.html, page("d3engine eval", facts, charts, found))

    def _plan(self, engine: Engine, benchmark: Benchmark, baselines: bool) -> tuple[list[DepthPolicy], SamplingParams]:
        """The policies of a benchmark, and how its answers are sampled."""
        stop = [*self.sampling.get("stop", ()), *benchmark.stop]
        options = {"max_tokens": benchmark.max_tokens, "temperature": 0.0, **self.sampling, "stop": stop or None}
        params = sampling_params(engine, options)
        assert params.max_tokens is not None  # every benchmark has a number, and so has --max-tokens
        return resolve_policies(engine, self.depths, self.compare_full, baselines, params.max_tokens), params


def _kept_answers(
    path: Path, engine: Engine, planned: Sequence[tuple[Sequence[DepthPolicy], SamplingParams]]
) -> KeptAnswers:
    """As `kept_answers`; refused where an answer depends on more than its prompt."""
    for policies, params in planned:
        require(params.temperature == 0, "--answers", str(path), "absent unless answers are greedy (--temperature 0)")
        for policy in policies:
            rule = policy.exit_rule(engine.config.num_layers)
            alone = rule is None or rule.batch == "per_row"
            require(alone, "--answers", str(path), "absent where company changes answers (exit-batch=batch_min)")
    return kept_answers(path, engine, [policy for policies, _ in planned for policy in policies])


def kept_answers(
    path: Path, engine: Engine, policies: Sequence[DepthPolicy], made_of: Mapping[str, str] | None = None
) -> KeptAnswers:
    """The answers of earlier runs of the same weights, and of the files that `policies` name; `made_of` is that of
    `KeptAnswers`."""
    from d3engine.model.expected_tensors import fingerprint

    bridges = bridge_hashes(engine, policies)
    about = {"weights": fingerprint(engine.directory), **computed_by(engine)}
    kept = KeptAnswers(path, about, bridges, made_of, engine.max_model_len)
    note(f"{path} has {len(kept)} answers.")
    return kept


def _with_early_exits(
    ask: Callable[..., Score], questions: Sequence[Question], policies: Sequence[DepthPolicy], params: SamplingParams
) -> list[DepthPolicy]:
    """The policies, and after the last an early exit for each D3 that runs as many layers on these questions."""
    decays = [policy for policy in policies if isinstance(policy, D3)]
    with progress_bar("early exit", "run", len(decays) * (1 + BISECTIONS)) as bar:

        def depth_of(policy: DepthPolicy) -> float:
            bar.update()
            return ask(questions, policy, params).realised_mean_layers

        exits = [early_exit_at_depth(depth_of, depth_of(policy)) for policy in decays]
    return [*policies, *(one for one in dict.fromkeys(exits) if one not in policies)]


def _measure(
    engine: Engine,
    benchmark: Benchmark,
    policies: Sequence[DepthPolicy],
    params: SamplingParams,
    shares_prompts: bool,
    kept: KeptAnswers | None,
) -> Result:
    questions = benchmark.questions
    measure(engine, questions[:1], policies[0], params, kept=kept)  # whatever is slow the first time is not measured
    if shares_prompts:
        with counting(benchmark.name, "question", len(questions)) as done:
            scores = measure_with_shared_prompts(engine, benchmark, policies, params, done=done, kept=kept)
    else:
        scores = [measure(engine, questions, policy, params, progress=shows_bars(), kept=kept) for policy in policies]
    return Result(benchmark, tuple(policy_in_words(policy) for policy in policies), tuple(scores))


def computed_by(engine: Engine) -> dict[str, str]:
    """What answers depend on beside weights, prompt and sampling."""
    settings = engine.settings
    dtypes = {"dtype": engine.dtype, "weight_dtype": engine.weight_dtype, "kv_cache_dtype": settings.kv_dtype}
    told = {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()}
    return {"device": str(engine.device), **told, "activations": settings.activations}


def _readable(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)


app = new_app()


SplitName = StrEnum("SplitName", ["train", "validation", "test"])
"""The parts of a task; they share no question."""


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
            "that size; functions, whose code a sandbox runs; gsm8k, humaneval, mbpp, bbh and bbh/<task> with --data; "
            "without it, any task of lm-evaluation-harness (eval).",
        ),
    ] = "word-problems",
    data: Data = None,
    split: Annotated[SplitName, typer.Option("--split", help="Which questions.")] = SplitName.test,
    limit: Annotated[
        int | None, typer.Option("--limit", help="Questions of each task (500 generated ones; else all).")
    ] = None,
    num_fewshot: Fewshot = None,
    compare_full: Annotated[bool, typer.Option("--compare-full", help="Full depth first, to compare with.")] = False,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Ask a chat model in its own form: by its chat template, examples as earlier turns (none), 512 tokens "
            "of an answer, of which the last box, number or block of code counts. With functions, and tasks of --data.",
        ),
    ] = False,
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
    as_json: AsJson = False,
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
    facts = {"model": model, "tasks": names, "seed": seed, "limit": limit}
    run = Run(facts, depths, sampling, compare_full, num_fewshot, html, as_json, share_prompts, answers)
    if is_harness:
        require(not chat, "--chat", NOTHING, catalogue.ASKED_AS_CHATS)
        require(not share_prompts, "--share-prompts", NOTHING, "given with tasks that are not the harness's")
        require(answers is None, "--answers", str(answers), "absent with tasks that are not d3engine's")
        only = {name: value for name, value in sampling.items() if name != "max_tokens"}
        for name, value in only.items():
            raise InvalidValueError("--" + name.replace("_", "-"), value, "left to the tasks of the harness")
        require(split is SplitName.test, "--split", split.value, "'test', since harness tasks split for themselves")
        found = find_tasks(names, str(include_path) if include_path else None)
        engine = open_engine(model, engine_options, AUTO if AUTO in depths else FullDepth())
        lengths = {sampling.get("max_tokens", catalogue.harness_length(name, HARNESS_MAX_TOKENS)) for name in names}
        same = f"tasks of one length beside --baselines, whose depth is over it (here {sorted(lengths)} tokens)"
        require(not baselines or len(lengths) == 1, "--tasks", tasks, same)
        policies = resolve_policies(engine, depths, compare_full, baselines, max(lengths))
        run.with_harness(engine, found, policies, sampling.get("max_tokens"))
        return
    check_sampling(sampling)
    given = {"split": split.value, "seed": seed, "limit": limit, "shots": num_fewshot}
    files = partial(catalogue.from_files, chat=chat)
    benchmarks = files(names, data, **given) if data else catalogue.generated(names, chat=chat, **given)
    engine = open_engine(model, engine_options, AUTO if AUTO in depths else FullDepth())
    more = {"seed": seed, "shots": num_fewshot, "most": exit_questions}
    depth_questions = partial(catalogue.depth_questions, folder=data, chat=chat, **more) if baselines else None
    run.with_benchmarks(engine, benchmarks, depth_questions)
