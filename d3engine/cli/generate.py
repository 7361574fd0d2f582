"""`d3engine generate`: prompts to text, as it comes. Without a prompt the demo model shows what it can do.

The one idea: text goes to stdout and everything about it to stderr, so that a pipe gets the text alone; with
`--color-depth` each token says by its colour how many layers it ran.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from d3engine.cli.apps import new_app
from d3engine.cli.depth_options import AUTO, Depth, takes_depth
from d3engine.cli.ending import ExitCode
from d3engine.cli.engine_options import (
    Model,
    Options,
    check_sampling,
    model_directory,
    open_engine,
    sampling_params,
    takes_engine,
    takes_samples,
)
from d3engine.cli.invocation import as_typed
from d3engine.cli.streams import given_text, is_unicode
from d3engine.cli.turns import Speedup, speedup
from d3engine.cli.verbosity import note
from d3engine.depth import D3, DepthPolicy, FullDepth
from d3engine.errors import NOTHING, InvalidValueError, require, require_integer
from d3engine.files import UnreadableFileError, read_text

if TYPE_CHECKING:
    from d3engine.cli.answers import Answer, Run
    from d3engine.engine import Engine
    from d3engine.evaluation.word_problems import Problem
    from d3engine.request.params import SamplingParams

app = new_app()

DEMO_DEPTH = D3(alpha=0.9, start=0.6)
"""What the demo compares with full depth where neither --depth nor d3.json names a policy."""

WARM_UP_TOKENS = 4
"""Tokens before the first answer of the demo; nobody sees them, and somebody waits for them."""


@app.command()
@takes_depth
@takes_samples
@takes_engine
def generate(
    engine_options: Options,
    sampling: Options,
    depth: Depth,
    model: Model = "demo",
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help='Prompts, quoted; "-" is stdin.', show_default=False),
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option("--prompt-file", help="A file that holds one prompt.")] = None,
    raw_prompt: Annotated[
        bool, typer.Option("--raw-prompt", help="Leave prompts as they are where the model has a form for questions.")
    ] = False,
    problem_seed: Annotated[
        int | None,
        typer.Option("--problem-seed", help="Without a prompt: which held-out word problem (0).", show_default=False),
    ] = None,
    color_depth: Annotated[
        bool | None,
        typer.Option(
            "--color-depth/--no-color-depth",
            help="Colour each token by the layers it ran (plain text where there are no colours).",
            show_default=False,
        ),
    ] = None,
    depth_suffix: Annotated[
        bool, typer.Option("--depth-suffix", help="Write the layers it ran behind each token: word[9].")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON for each answer.")] = False,
) -> None:
    """Generate text from prompts, or show the demo model at work.

    Without MODEL and PROMPT the bundled model answers a word problem that it has never seen, at full depth and with
    depth decay, and both answers are checked.
    """
    texts = _read_prompts(prompts or [], prompt_file)
    require(not (depth_suffix and color_depth), "--depth-suffix", NOTHING, "given without --color-depth")
    check_sampling(sampling)
    model_directory(model, " (the prompt comes after it)")
    if not texts:
        is_problem = model == "demo" or problem_seed is not None
        require(is_problem, "PROMPT", NOTHING, 'given: a text, "-" for stdin, or --prompt-file FILE')
        _show_problem(engine_options, sampling, depth, model, problem_seed or 0, color_depth, depth_suffix, as_json)
        return
    require(problem_seed is None, "--problem-seed", problem_seed, "absent where there is a prompt")
    engine = open_engine(model, engine_options, depth)
    params = sampling_params(engine, sampling)
    if not raw_prompt:
        texts = _in_form_of(model_directory(model), texts)
    _show_prompts(engine, texts, params, bool(color_depth), depth_suffix, as_json)


def _read_prompts(prompts: Sequence[str], prompt_file: Path | None) -> list[str]:
    """The prompts of the command line; "-" is all of stdin, less its last line feed."""
    require(prompts.count("-") <= 1, "PROMPT", NOTHING, 'given as "-" once at most, since stdin can be read only once')
    texts = [sys.stdin.read().removesuffix("\n") if prompt == "-" else given_text(prompt) for prompt in prompts]
    for text in texts:
        require(is_unicode(text), "PROMPT", text, "UTF-8 text")
    if prompt_file is not None:
        try:
            texts.append(read_text(prompt_file).removesuffix("\n"))
        except UnreadableFileError as error:
            allowed = f'a regular file of UTF-8 text, or the prompt "-" for stdin ({error})'
            raise InvalidValueError("--prompt-file", str(prompt_file), allowed) from error
    return texts


def _in_form_of(directory: Path, texts: list[str]) -> list[str]:
    """The prompts in the form that the model answers in, if its directory names one; stderr says so."""
    from d3engine.text.prompt_form import load_prompt_form

    form = load_prompt_form(directory)
    if form is None:
        return texts
    found = [form.complete(text) for text in texts]
    if found != texts:
        shown = json.dumps(str(form), ensure_ascii=False)
        note(f"note: asked in the form that the model was trained on, {shown}; --raw-prompt asks as is")
    return found


# -- prompts of the user's own -------------------------------------------------------------------------------------


def _show_prompts(
    engine: Engine, texts: list[str], params: SamplingParams, color_depth: bool, depth_suffix: bool, as_json: bool
) -> None:
    from d3engine.cli.answers import run_answers, show_tokens
    from d3engine.cli.terminal import DepthColours, Writer, new_console

    console = new_console()
    writer = Writer(console)
    colours = DepthColours(_depths(engine, params), console, wanted=color_depth and not as_json)
    colours.legend(engine.config.num_layers)
    several = len(texts) * params.n > 1

    def show(answer: Answer) -> None:
        if as_json:
            if answer.finished:
                typer.echo(json.dumps(_as_dict(answer, engine.config.num_layers, texts[_number(answer)])))
            return
        if several and answer.is_new:
            writer.write(_header(answer, texts, params.n))
            writer.end_line()
        show_tokens(answer, writer, colours, suffix=depth_suffix)
        if answer.finished:
            writer.end_line()

    run = run_answers(engine, texts, params, show)
    if run.interrupted and not as_json:
        writer.end_line()
    note(run.summary())
    if run.interrupted:
        raise typer.Exit(ExitCode.INTERRUPTED)


def _depths(engine: Engine, params: SamplingParams) -> list[int]:
    """All depths that an answer can have."""
    from d3engine.cli.terminal import possible_depths

    steps = min(params.max_tokens or engine.max_model_len, engine.max_model_len)
    return possible_depths(params.depth or engine.depth, engine.config.num_layers, steps)


def _number(answer: Answer) -> int:
    return int(answer.request_id.removeprefix("prompt-"))


def _header(answer: Answer, texts: list[str], n: int) -> str:
    place = f"{_number(answer) + 1}/{len(texts)}" + (f", answer {answer.index + 1} of {n}" if n > 1 else "")
    words = " ".join(texts[_number(answer)].split())
    return f"[{place}] {words if len(words) <= 60 else words[:57] + '...'}"


def _as_dict(answer: Answer, num_layers: int, prompt: str) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "index": answer.index,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "num_layers": num_layers,
        "mean_layers": sum(answer.depths) / max(len(answer.depths), 1),
        "tokens": [token._asdict() for token in answer.tokens()],
    }


# -- the demo: one word problem, answered at full depth and with depth decay ---------------------------------------


def _show_problem(
    engine_options: Options,
    sampling: Options,
    depth: Depth,
    model: str,
    seed: int,
    color_depth: bool | None,
    depth_suffix: bool,
    as_json: bool,
) -> None:
    from d3engine.evaluation.word_problems import problems

    require_integer("--problem-seed", seed, 0)
    require(sampling.get("n", 1) == 1, "--n", sampling.get("n"), "1 without a prompt, since the answer is checked")
    problem = next(problems("test", seed))
    engine = open_engine(model, engine_options)
    params = sampling_params(engine, sampling)
    demo = _Demo(engine, problem, params, color_depth is not False, depth_suffix, as_json)
    demo.show(_policies(engine, depth), seed)


def _policies(engine: Engine, depth: Depth) -> list[DepthPolicy]:
    """Full depth first, then the policy asked for, the model's own, or the paper's."""
    chosen = engine.depth if depth == AUTO else depth
    if depth == AUTO and isinstance(chosen, FullDepth):
        chosen = DEMO_DEPTH
    return list(dict.fromkeys([FullDepth(), chosen]))


class _Demo:
    """Shows one problem and its answers."""

    def __init__(
        self,
        engine: Engine,
        problem: Problem,
        params: SamplingParams,
        color_depth: bool,
        depth_suffix: bool,
        as_json: bool,
    ) -> None:
        from d3engine.cli.terminal import Writer, new_console
        from d3engine.evaluation.word_problems import format_prompt

        self.engine, self.problem, self.params = engine, problem, params
        self.prompt = format_prompt(problem.question)
        self.color_depth, self.depth_suffix, self.as_json = color_depth, depth_suffix, as_json
        self.console = new_console()
        self.writer = Writer(self.console, wrap=True, indent="  ")
        self.text = Writer(self.console, wrap=True)

    def show(self, policies: list[DepthPolicy], seed: int) -> None:
        """The problem, an answer by each policy, and what the second one saved."""
        layers = self.engine.config.num_layers
        if not self.as_json:
            self.text.write_words(
                f"A word problem that the model ({layers} layers) has never seen, answered"
                + (" at full depth, then with depth decay." if len(policies) > 1 else " at full depth.")
            )
            self.text.end_line()
            self.writer.write_words(self.problem.question)
        self._warm_up()
        runs = [self._show_answer(policy) for policy in policies]
        if self.as_json:
            self._print_json(policies, runs, seed)
            return
        self.text.end_line()
        if len(runs) > 1:
            turns = speedup(*(partial(self._seconds_per_token, policy) for policy in policies))
            self.text.write_words(self._comparison(runs[0], runs[1], turns))
        another = as_typed("generate", "--problem-seed", str(seed + 1))
        self.text.write_words(f"Another problem:        {another}")
        self.text.write_words(f"How often it is right:  {as_typed('eval', 'demo', *_flags(policies[-1]))}")

    def _warm_up(self) -> None:
        """A few tokens that are not shown: the first steps of a process are slower than any other."""
        from d3engine.cli.answers import run_answers

        params = replace(self.params, depth=FullDepth(), min_tokens=0, max_tokens=WARM_UP_TOKENS)
        if run_answers(self.engine, [self.prompt], params, self._silently).interrupted:
            raise typer.Exit(ExitCode.INTERRUPTED)

    def _show_answer(self, policy: DepthPolicy) -> Run:
        from d3engine.cli.answers import show_tokens
        from d3engine.cli.terminal import DepthColours

        if self.as_json:
            return self._answer(policy, self._silently)
        params = replace(self.params, depth=policy)
        wanted = self.color_depth and not self.depth_suffix
        colours = DepthColours(_depths(self.engine, params), self.console, wanted=wanted)
        self.text.end_line()
        self.text.write_words(self._heading(policy))

        def show(answer: Answer) -> None:
            show_tokens(answer, self.writer, colours, suffix=self.depth_suffix)

        run = self._answer(policy, show)
        self.writer.end_line()
        if run.interrupted:
            note(run.summary())
            raise typer.Exit(ExitCode.INTERRUPTED)
        self.writer.write_words(self._verdict(run))
        self.writer.write_words(f"{run.summary()}.")
        if colours.enabled:
            self.console.out("  ", end="", highlight=False)
            colours.legend(run.num_layers)
        else:
            self.writer.write_words(f"Layers run by each token: {_in_short(run.depths)}.")
        return run

    def _heading(self, policy: DepthPolicy) -> str:
        from d3engine.depth.words import policy_in_words

        depths = _depths(self.engine, replace(self.params, depth=policy))
        if min(depths) == max(depths):
            return f"{policy_in_words(policy)}: every token runs all {max(depths)} layers."
        later = "as many as each needs" if policy.exit_rule(max(depths)) else "fewer for later ones"
        falls = f"{max(depths)} layers for the first token, {later}, down to {min(depths)}"
        return f"{policy_in_words(policy)}: {falls}."

    def _answer(self, policy: DepthPolicy, show: Callable[[Answer], None]) -> Run:
        from d3engine.cli.answers import run_answers

        self.engine.reset_prefix_cache()  # or the second answer would find the prompt computed
        return run_answers(self.engine, [self.prompt], replace(self.params, depth=policy), show)

    def _silently(self, answer: Answer) -> None:
        pass

    def _given(self, run: Run) -> int | None:
        from d3engine.evaluation.word_problems import extract_answer

        return extract_answer(run.answers[0].text)

    def _verdict(self, run: Run) -> str:
        given, right = self._given(run), self.problem.answer
        if given == right:
            return f"RIGHT, it is {right}."
        return f"WRONG, it is {right}" + ("; no answer was given." if given is None else f", not {given}.")

    def _seconds_per_token(self, policy: DepthPolicy) -> float:
        run = self._answer(policy, self._silently)
        if run.interrupted:
            raise typer.Exit(ExitCode.INTERRUPTED)
        return run.seconds / len(run.depths)

    def _comparison(self, full: Run, run: Run, turns: Speedup) -> str:
        fewer = 1 - run.mean_layers / full.mean_layers
        return (
            f"The second answer ran {fewer:.0%} fewer layers per token, held {self._kv_fraction(run):.0%} less KV "
            f"cache at its end, and was {turns}."
        )

    def _kv_fraction(self, run: Run) -> float:
        lengths = run.prompt_tokens["prompt-0"] + len(run.depths) - 1
        entry = 2 * self.engine.config.kv_size * self.engine.dtype.itemsize
        return run.kv_bytes_saved / (-(-lengths // self._block) * self._block * run.num_layers * entry)

    @property
    def _block(self) -> int:
        return self.engine.scheduler.cache.block_size

    def _print_json(self, policies: list[DepthPolicy], runs: list[Run], seed: int) -> None:
        for policy, run in zip(policies, runs, strict=True):
            answer = run.answers[0]
            report = {
                "problem_seed": seed,
                "depth": policy.describe(),
                "right": self._given(run) == self.problem.answer,
                "answer": self.problem.answer,
                "seconds": run.seconds,
                "kv_bytes_saved": run.kv_bytes_saved,
                **_as_dict(answer, run.num_layers, self.prompt),
            }
            typer.echo(json.dumps(report))


def _flags(policy: DepthPolicy) -> list[str]:
    """The flags that measure a policy of the demo."""
    if isinstance(policy, D3):
        return ["--compare-full", "--depth", "d3", "--alpha", str(policy.alpha), "--start", str(policy.start)]
    return []


def _in_short(depths: Sequence[int]) -> str:
    """Runs of equal depths: "16, 14, 12, 9 x 27"."""
    runs = [(depth, len(list(group))) for depth, group in groupby(depths)]
    return ", ".join(f"{depth} x {count}" if count > 1 else f"{depth}" for depth, count in runs)
