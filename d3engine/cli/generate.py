"""`d3engine generate`: text for prompts, streamed to stdout; without a prompt, the demo."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from d3engine.cli.commands import ExitCode, new_app, note
from d3engine.cli.depth_options import Depth, takes_depth
from d3engine.cli.engine_options import (
    Lora,
    Model,
    Options,
    check_sampling,
    model_directory,
    naming_the_flag,
    open_engine,
    sampling_params,
    takes_engine,
    takes_samples,
    text_of,
    with_adapter,
)
from d3engine.cli.streams import given_text, is_unicode
from d3engine.errors import NOTHING, ModelFormatError, require

if TYPE_CHECKING:
    from d3engine.cli.answers import Answer
    from d3engine.engine.engine import Engine
    from d3engine.request.params import SamplingParams
    from d3engine.text.prompts import Prompt

app = new_app()


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
    prompt_file: Annotated[Path | None, typer.Option("--prompt-file", help="File that holds one prompt.")] = None,
    raw_prompt: Annotated[
        bool,
        typer.Option(
            "--raw-prompt", help="Use prompts as they are, even if the model expects questions in another form."
        ),
    ] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send each prompt as a chat message, by the model's chat template.")
    ] = False,
    problem_seed: Annotated[
        int | None,
        typer.Option(
            "--problem-seed",
            help="Number of the demo's word problem [default: 0].",
            show_default=False,
        ),
    ] = None,
    color_depth: Annotated[
        bool | None,
        typer.Option(
            "--color-depth/--no-color-depth",
            help="Colour each token by the number of layers it ran [default: for the demo's answers].",
            show_default=False,
        ),
    ] = None,
    depth_suffix: Annotated[
        bool, typer.Option("--depth-suffix", help="Write the number of layers behind each token: word[9].")
    ] = False,
    lora: Lora = None,
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
    engine_options = with_adapter(engine_options, lora)
    if not texts:
        is_problem = model == "demo" or problem_seed is not None
        require(is_problem, "PROMPT", NOTHING, 'given: a text, "-" for stdin, or --prompt-file FILE')
        for flag, given in (("--chat", chat), ("--raw-prompt", raw_prompt)):
            require(not given, flag, NOTHING, f"given with a prompt (d3engine chat {quote(model)} asks for one)")
        from d3engine.cli.demo import show_problem

        with naming_the_flag(sampling):
            show_problem(
                engine_options,
                sampling,
                depth,
                model,
                problem_seed or 0,
                color_depth=color_depth is not False,
                depth_suffix=depth_suffix,
                as_json=as_json,
            )
        return
    require(problem_seed is None, "--problem-seed", problem_seed, "absent where there is a prompt")
    if chat:
        require(not raw_prompt, "--raw-prompt", NOTHING, "given without --chat")
        from d3engine.model.config import ModelConfig
        from d3engine.text.chat_template import load_chat_template

        directory = model_directory(model)
        ModelConfig.from_directory(directory)  # where there is no model, that is what is wrong
        has_template = load_chat_template(directory) is not None
        require(has_template, "--chat", NOTHING, "absent, since the model has no chat template")
    engine = open_engine(model, engine_options, depth)
    params = sampling_params(engine, sampling)
    if not raw_prompt and not chat:
        texts = _in_form_of(model, model_directory(model), texts)
    in_form: Sequence[Prompt] = texts
    if chat:
        in_form = [engine.chat_prompt([{"role": "user", "content": text}]) for text in texts]
    with naming_the_flag(sampling):  # whether it can be compiled is found out with the first request
        _show_prompts(engine, texts, in_form, params, bool(color_depth), depth_suffix, as_json)


def _read_prompts(prompts: Sequence[str], prompt_file: Path | None) -> list[str]:
    """The prompts of the command line; "-" is all of stdin, less its last line feed."""
    require(prompts.count("-") <= 1, "PROMPT", NOTHING, 'given as "-" once at most, since stdin can be read only once')
    texts = [_whole_stdin() if prompt == "-" else given_text(prompt) for prompt in prompts]
    for text in texts:
        require(is_unicode(text), "PROMPT", text, "UTF-8 text")
    if prompt_file is not None:
        texts.append(text_of("--prompt-file", prompt_file, ', or the prompt "-" for stdin').removesuffix("\n"))
    return texts


def _whole_stdin() -> str:
    return sys.stdin.read().removeprefix("\ufeff").removesuffix("\n")


def _in_form_of(model: str, directory: Path, texts: list[str]) -> list[str]:
    """The prompts in the form that the model answers in, if its directory names one; stderr says so.

    A chat template is not used, as by the completions of every API; stderr says what uses it.
    """
    from d3engine.text.chat_template import load_chat_template
    from d3engine.text.prompts import load_question_template

    form = load_question_template(directory)
    if form is None:
        with suppress(ModelFormatError):  # a template that is broken is nothing to recommend
            if load_chat_template(directory) is not None:
                note(
                    "note: continued as plain text; --chat asks by the model's chat template, and d3engine chat"
                    f" {quote(model)} talks to it"
                )
        return texts
    found = [form.complete(text) for text in texts]
    if found != texts:
        shown = json.dumps(str(form), ensure_ascii=False)
        note(f"note: asked in the form that the model was trained on, {shown}; --raw-prompt asks as is")
    return found


def _show_prompts(
    engine: Engine,
    texts: list[str],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    color_depth: bool,
    depth_suffix: bool,
    as_json: bool,
) -> None:
    """Answer prompts, which their texts name."""
    from d3engine.cli.answers import depths_of, run_answers, show_tokens
    from d3engine.cli.terminal import DepthColours, Writer, new_console

    console = new_console()
    writer = Writer(console)
    colours = DepthColours(depths_of(engine, params), console, wanted=color_depth and not as_json)
    colours.legend(engine.config.num_layers)
    several = len(texts) * params.n > 1

    def show(answer: Answer) -> None:
        if as_json:
            if answer.finished:
                typer.echo(json.dumps(answer.as_dict(engine.config.num_layers, texts[_number(answer)])))
            return
        if several and answer.is_new:
            writer.write(_header(answer, texts, params.n))
            writer.end_line()
        show_tokens(answer, writer, colours, suffix=depth_suffix)
        if answer.finished:
            writer.end_line()

    run = run_answers(engine, prompts, params, show)
    if run.interrupted and not as_json:
        writer.end_line()
    note(run.summary())
    if run.interrupted:
        raise typer.Exit(ExitCode.INTERRUPTED)


def _number(answer: Answer) -> int:
    return int(answer.request_id.removeprefix("prompt-"))


def _header(answer: Answer, texts: list[str], n: int) -> str:
    place = f"{_number(answer) + 1}/{len(texts)}" + (f", answer {answer.index + 1} of {n}" if n > 1 else "")
    words = " ".join(texts[_number(answer)].split())
    return f"[{place}] {words if len(words) <= 60 else words[:57] + '...'}"
