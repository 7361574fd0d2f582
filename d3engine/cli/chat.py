"""`d3engine chat MODEL`: a conversation on a terminal or over a pipe, one line a turn."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from d3engine.cli.commands import new_app, note, wrapped
from d3engine.cli.depth_options import AUTO, Depth, parse_depth, takes_depth
from d3engine.cli.engine_options import (
    CHAT_DEFAULTS,
    CHAT_MAX_TOKENS,
    MODEL,
    Options,
    check_sampling,
    model_directory,
    open_engine,
    sampling_params,
    takes_chat_sampling,
    takes_engine,
)
from d3engine.cli.streams import given_text
from d3engine.errors import InvalidValueError, require

if TYPE_CHECKING:
    from d3engine.depth import DepthPolicy
    from d3engine.engine import Engine
    from d3engine.request.params import SamplingParams

app = new_app()

HELP = """\
/reset            forget the conversation (a system message stays)
/depth            show the depth policy
/depth NAME ...   change it: /depth full, /depth d3 alpha=A start=S, /depth auto
/help             this text
/exit             end (as does the end of input)"""


@app.command()
@takes_depth
@takes_chat_sampling
@takes_engine
def chat(
    engine_options: Options,
    sampling: Options,
    depth: Depth,
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"{MODEL} It needs a chat template.")],
    system: Annotated[str | None, typer.Option("--system", help="A system message.", show_default=False)] = None,
    color_depth: Annotated[
        bool, typer.Option("--color-depth", help="Colour each token by the layers it ran, on a terminal.")
    ] = False,
) -> None:
    """Talk to a model. Type /help for the commands; Ctrl-C stops an answer, Ctrl-D ends.

    From a pipe, each line is a turn and stdout gets the answers alone.
    """
    sampling = {"max_tokens": CHAT_MAX_TOKENS, **sampling}
    check_sampling(sampling)
    _require_template(model)
    sampling = {**_defaults(model), **sampling}
    engine = open_engine(model, engine_options, depth)
    params = sampling_params(engine, sampling)
    Conversation(engine, params, system, color_depth).run()


def _require_template(model: str) -> None:
    """Refuse a model that cannot chat before its weights are loaded."""
    directory = model_directory(model)
    from d3engine.model.config import ModelConfig
    from d3engine.text.chat_template import load_chat_template

    ModelConfig.from_directory(directory)  # where there is no model, a template is not what is missing
    if load_chat_template(directory) is None:
        allowed = "a model with a chat template (`d3engine generate` takes plain prompts for this one)"
        raise InvalidValueError("model", model, allowed)


def _defaults(model: str) -> Options:
    """With what to sample a model whose own files do not say it."""
    from d3engine.loading.model_directory import names_sampling

    return {} if names_sampling(model_directory(model)) else CHAT_DEFAULTS


class Conversation:
    """The messages so far, and the loop that adds to them."""

    def __init__(self, engine: Engine, params: SamplingParams, system: str | None, color_depth: bool) -> None:
        from d3engine.cli.terminal import Writer, new_console

        self._engine = engine
        self._params = params
        self._color_depth = color_depth
        self._console = new_console()
        self._writer = Writer(self._console)
        self._messages = [] if system is None else [{"role": "system", "content": given_text(system)}]
        self._kept_messages = len(self._messages)
        self._is_interactive = sys.stdin.isatty()

    def run(self) -> None:
        """Read turns until /exit or the end of input."""
        if self._is_interactive:
            _use_line_editing()
            self._say("Type /help for the commands.")
        while (line := self._read()) is not None:
            if not line.strip():
                continue
            try:
                if line.startswith("/"):
                    if not self._command(line):
                        return
                else:
                    self._turn(line)
            except InvalidValueError as error:  # of this turn: the conversation goes on as it was before
                self._say(f"error: {' '.join(str(error).split())}")

    def _read(self) -> str | None:
        """The next line, without its end; None at the end of input."""
        try:
            if self._is_interactive:
                return input("> ")
            line = sys.stdin.readline()
            return line.rstrip("\r\n") if line else None
        except (EOFError, KeyboardInterrupt):
            self._say("")
            return None

    def _say(self, text: str) -> None:
        """To stderr, so that a pipe gets the answers alone."""
        typer.echo(wrapped(text, sys.stderr), err=True)

    def _command(self, line: str) -> bool:
        """Run a line that begins with "/"; False for /exit."""
        name, *words = line.split()
        known = {"/reset": self._reset, "/depth": self._depth, "/help": self._help}
        if name == "/exit" and not words:
            return False
        require(name in known, "command", name, "one of /reset, /depth, /help, /exit")
        known[name](words)
        return True

    def _help(self, words: list[str]) -> None:
        require(not words, "/help", " ".join(words), "typed alone")
        self._say(HELP)

    def _reset(self, words: list[str]) -> None:
        require(not words, "/reset", " ".join(words), "typed alone")
        del self._messages[self._kept_messages :]
        self._say("The conversation is forgotten.")

    def _depth(self, words: list[str]) -> None:
        from d3engine.depth.labels import policy_in_words

        if words:
            depth = parse_depth(" ".join(words), "/depth")
            policy = None if depth == AUTO else depth
            params = replace(self._params, depth=policy)
            self._engine.prepare([0], params)  # the engine refuses or warns now, not at the next turn
            self._params = params
        self._say(f"Depth: {policy_in_words(self._policy)}")

    @property
    def _policy(self) -> DepthPolicy:
        return self._params.depth or self._engine.depth

    def _turn(self, text: str) -> None:
        from d3engine.cli.answers import run_answers, show_tokens
        from d3engine.cli.terminal import DepthColours, possible_depths

        messages = [*self._messages, {"role": "user", "content": text}]
        prompt = self._engine.chat_prompt(messages)
        steps = self._params.max_tokens or self._engine.max_model_len
        depths = possible_depths(self._policy, self._engine.config.num_layers, steps)
        colours = DepthColours(depths, self._console, wanted=self._color_depth)
        run = run_answers(
            self._engine, [prompt], self._params, lambda answer: show_tokens(answer, self._writer, colours)
        )
        self._writer.end_line()
        answer = run.answers[0]
        if answer.has_begun:
            self._messages = [*messages, {"role": "assistant", "content": answer.text.lstrip(" ")}]
        if self._is_interactive:
            colours.legend(run.num_layers)
            note(f"[{run.summary()}]")


def _use_line_editing() -> None:
    """Arrow keys and earlier lines at the prompt, where Python has readline."""
    with suppress(ImportError):
        import readline  # noqa: F401
