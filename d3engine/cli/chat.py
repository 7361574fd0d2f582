"""`d3engine chat MODEL`: a conversation on a terminal or over a pipe, one line a turn, or several in quotes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from d3engine.cli.commands import ExitCode, new_app, note
from d3engine.cli.depth_options import AUTO, Depth, parse_depth, takes_depth
from d3engine.cli.engine_options import (
    CHAT_MAX_TOKENS,
    MODEL,
    Lora,
    Options,
    check_sampling,
    model_directory,
    open_engine,
    sampling_params,
    takes_chat_sampling,
    takes_engine,
    with_adapter,
)
from d3engine.cli.streams import given_text, wrapped
from d3engine.errors import D3EngineError, EngineDeadError, FailedError, InvalidValueError, require
from d3engine.request.params import CHECKS
from d3engine.utils.files import UnreadableFileError, read_text, write_whole

if TYPE_CHECKING:
    from d3engine.engine.engine import Engine
    from d3engine.request.params import SamplingParams

app = new_app()

HELP = """\
/system [TEXT]    show the system message, or set it; /system "" removes it
/set [NAME VALUE] show what sampling is set to, or set it: /set temperature 0.2
/regenerate       answer the last message again
/save FILE        write the conversation to a file, as JSON
/load FILE        go on with a conversation that was saved
/reset            forget the conversation (a system message stays)
/depth            show the depth policy
/depth NAME ...   change it: /depth full, /depth d3 alpha=A start=S, /depth auto
/help             this text
/exit             end (as does the end of input)

A message of several lines begins and ends with three quotation marks: \"\"\""""

QUOTES = '"""'
"""Around a message of several lines."""
SETTABLE = tuple(name for name in CHECKS if name not in ("n", "detokenize", "logprobs", "prompt_logprobs"))
"""What /set changes: all that makes a difference to one answer that is shown as text."""


@app.command()
@takes_depth
@takes_chat_sampling
@takes_engine
def chat(
    engine_options: Options,
    sampling: Options,
    depth: Depth,
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"{MODEL} It needs a chat template.")],
    system: Annotated[str | None, typer.Option("--system", help="System message.", show_default=False)] = None,
    lora: Lora = None,
    color_depth: Annotated[
        bool, typer.Option("--color-depth", help="Colour each token by the number of layers it ran, on a terminal.")
    ] = False,
) -> None:
    """Talk to a model. Type /help for the commands; Ctrl-C stops an answer, Ctrl-D ends.

    From a pipe, each line is a turn and stdout gets the answers alone.
    """
    sampling = {"max_tokens": CHAT_MAX_TOKENS, **sampling}
    check_sampling(sampling)
    _require_template(model)
    from d3engine.engine.model_directory import chat_defaults

    sampling = {**chat_defaults(model_directory(model)), **sampling}
    engine = open_engine(model, with_adapter(engine_options, lora), depth)
    params = sampling_params(engine, sampling)
    Conversation(engine, params, system, color_depth).run()


def _require_template(model: str) -> None:
    """Refuse a model that cannot chat before its weights are loaded."""
    directory = model_directory(model)
    from d3engine.model.config import ModelConfig
    from d3engine.text.chat_template import load_chat_template

    ModelConfig.from_directory(directory)  # where there is no model, a template is not what is missing
    if load_chat_template(directory) is None:
        allowed = "a model with a chat template, or chat_template.jinja next to it (`d3engine generate` needs none)"
        raise InvalidValueError("model", model, allowed)


class Conversation:
    """The messages so far, and the loop that adds to them."""

    def __init__(self, engine: Engine, params: SamplingParams, system: str | None, color_depth: bool) -> None:
        from d3engine.cli.terminal import Writer, new_console

        self._engine = engine
        self._params = params
        self._color_depth = color_depth
        self._console = new_console()
        self._writer = Writer(self._console, wrap=self._console.is_terminal)
        self._messages = [] if system is None else [{"role": "system", "content": given_text(system)}]
        self._own_file: Path | None = None  # which this conversation was written to or read from
        self._is_interactive = sys.stdin.isatty()

    def run(self) -> None:
        """Read turns until /exit or the end of input; exit code 1 where a message from a pipe got no answer."""
        has_failed = False
        if self._is_interactive:
            _use_line_editing()
            self._say("Type /help for the commands.")
        while (read := self._read()) is not None:
            line, is_quoted = read
            if not line.strip():
                continue
            try:
                if line.startswith("/") and not is_quoted:
                    if not self._command(line):
                        break
                else:
                    self._answer([*self._messages, {"role": "user", "content": line}])
            except EngineDeadError:
                raise
            except D3EngineError as error:  # of this turn: the conversation is as it was before
                self._say(f"error: {' '.join(str(error).split())}")
                has_failed |= is_quoted or not line.startswith("/")
        if has_failed and not self._is_interactive:
            raise typer.Exit(ExitCode.FAILED)

    def _read(self) -> tuple[str, bool] | None:
        """The next line, or the lines between two `QUOTES`, and whether they stood there; None at the end of input.

        Ctrl-C drops what has been typed, as in a shell; it ends a pipe.
        """
        lines: list[str] = []
        try:
            line = self._read_line("> ")
            if line is None or not line.lstrip().startswith(QUOTES):
                return None if line is None else (line, False)
            lines.append(line.lstrip().removeprefix(QUOTES))
            while not lines[-1].rstrip().endswith(QUOTES) and (line := self._read_line("... ")) is not None:
                lines.append(line)
        except KeyboardInterrupt:
            if not self._is_interactive:
                return None
            self._say("" if lines else "\nCtrl-D or /exit ends the chat.")
            return "", True
        lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
        return "\n".join(lines).strip("\n"), True

    def _read_line(self, prompt: str) -> str | None:
        try:
            if self._is_interactive and sys.stdout.isatty():
                return input(prompt)
            if self._is_interactive:  # `input` would write the prompt among the answers
                typer.echo(prompt, nl=False, err=True)
            line = sys.stdin.readline()
            return line.rstrip("\r\n") if line else None
        except EOFError:
            self._say("")
            return None

    def _say(self, text: str) -> None:
        """To stderr, so that a pipe gets the answers alone."""
        typer.echo(wrapped(text, sys.stderr), err=True)

    def _command(self, line: str) -> bool:
        """Run a line that begins with "/"; False for /exit."""
        name, *rest = line.split(maxsplit=1)
        given = rest[0].strip() if rest else ""
        alone: dict[str, Callable[[], None]] = {
            "/regenerate": self._regenerate,
            "/reset": self._reset,
            "/help": partial(self._say, HELP),
        }
        with_argument = {"/system": self._system, "/set": self._set, "/save": self._save, "/load": self._load}
        with_argument["/depth"] = self._depth
        known = [*alone, *with_argument, "/exit"]
        require(name in known, "command", name, f"one of {', '.join(known)}")
        if name in with_argument:
            with_argument[name](given)
            return True
        require(not given, name, given, "typed alone")
        if name in alone:
            alone[name]()
        return name != "/exit"

    @property
    def _system_messages(self) -> list[dict[str, Any]]:
        return self._messages[:1] if self._messages and self._messages[0]["role"] == "system" else []

    def _system(self, given: str) -> None:
        before = self._system_messages
        if given:
            text = "" if given in ('""', "''") else given
            self._messages[: len(before)] = [{"role": "system", "content": text}] if text else []
        found = self._system_messages
        self._say(f"System message: {found[0]['content']}" if found else "There is no system message.")

    def _set(self, given: str) -> None:
        if not given:
            width = max(map(len, SETTABLE))
            shown = [f"{name:<{width}} {json.dumps(getattr(self._params, name))}" for name in SETTABLE]
            self._say("\n".join(shown))
            return
        name, _, value = given.partition(" ")
        require(name in SETTABLE, "/set", name, f"one of {', '.join(SETTABLE)}")
        require(bool(value.strip()), f"/set {name}", value, "followed by a value")
        try:
            read: Any = json.loads(value)
        except (ValueError, RecursionError):
            read = value.strip()  # a stop string, without quotation marks
        params = replace(self._params, **{name: read})
        self._engine.prepare([0], params)
        self._params = params
        self._say(f"{name}: {json.dumps(getattr(params, name))}")

    def _save(self, given: str) -> None:
        require(bool(given), "/save", given, "followed by the name of a file")
        path = Path(os.path.expanduser(given))
        is_free = path == self._own_file or not os.path.exists(path)  # where it cannot be looked at, writing fails
        require(is_free, "/save", given, "a file that is not there yet, or this conversation's own")
        text = json.dumps({"messages": self._messages}, indent=2, ensure_ascii=False) + "\n"
        try:
            write_whole(path, text)
        except (OSError, ValueError) as error:
            raise FailedError(f"{given} cannot be written: {getattr(error, 'strerror', None) or error}") from None
        self._own_file = path
        self._say(f"Saved {len(self._messages)} messages to {given}.")

    def _load(self, given: str) -> None:
        require(bool(given), "/load", given, "followed by the name of a file")
        path = Path(os.path.expanduser(given))
        try:
            found = json.loads(read_text(path))
        except (UnreadableFileError, ValueError, RecursionError) as error:
            raise InvalidValueError("/load", given, f"a file that /save has written ({error})") from None
        messages = found.get("messages") if isinstance(found, dict) else None
        fits = isinstance(messages, list) and all(_is_message(message) for message in messages)
        require(fits, "/load", given, 'a file that /save has written: {"messages": [{"role", "content"}, ...]}')
        assert isinstance(messages, list)
        self._messages, self._own_file = messages, path
        self._say(f"Loaded {len(messages)} messages from {given}.")

    def _regenerate(self) -> None:
        last = len(self._messages) - 1
        while last >= 0 and self._messages[last]["role"] == "assistant":
            last -= 1
        has_question = last >= 0 and self._messages[last]["role"] == "user"
        require(has_question, "/regenerate", "no message", "typed after a message")
        self._answer(self._messages[: last + 1])

    def _reset(self) -> None:
        self._messages = self._system_messages
        self._own_file = None
        self._say("The conversation is forgotten.")

    def _depth(self, given: str) -> None:
        from d3engine.depth.labels import policy_in_words

        if given:
            depth = parse_depth(" ".join(given.split()), "/depth")
            policy = None if depth == AUTO else depth
            params = replace(self._params, depth=policy)
            self._engine.prepare([0], params)  # the engine refuses or warns now, not at the next turn
            self._params = params
        self._say(f"Depth: {policy_in_words(self._params.depth or self._engine.depth)}")

    def _answer(self, messages: list[dict[str, Any]]) -> None:
        """Answer a conversation, which is then this one."""
        from d3engine.cli.answers import depths_of, run_answers, show_tokens
        from d3engine.cli.terminal import DepthColours

        prompt = self._engine.chat_prompt(messages)
        colours = DepthColours(depths_of(self._engine, self._params), self._console, wanted=self._color_depth)
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


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content"))


def _use_line_editing() -> None:
    """Arrow keys and earlier lines at the prompt, and a pasted text as one message, where Python has readline."""
    with suppress(ImportError):
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")  # which Python turns off
