"""What all commands are made with: one way to begin, to be verbose and to end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import typer
from typer.core import TyperCommand, TyperGroup

from d3engine.cli.ending import ending
from d3engine.cli.signatures import naming_flags
from d3engine.cli.usage import UsageError, in_words, shows_help
from d3engine.cli.verbosity import note, takes_verbosity
from d3engine.errors import D3EngineError, require

CommandFunction = TypeVar("CommandFunction", bound=Callable[..., Any])


RENAMED = {
    "--admission-waves": ("--admission-interval", ""),
    "--request-timeout": ("--timeout", "request="),
    "--header-timeout": ("--timeout", "header="),
    "--body-timeout": ("--timeout", "body="),
    "--write-timeout": ("--timeout", "write="),
    "--timeout-keep-alive": ("--timeout", "keep-alive="),
    "--shutdown-timeout": ("--timeout", "shutdown="),
}
"""Options of the release before -> option, and what its value begins with. They go with the next release."""


def with_new_names(args: list[str]) -> list[str]:
    """The words of a command line with the options of `RENAMED` under their new names, each noted on stderr."""
    found: list[str] = []
    words = iter(args)
    for word in words:
        flag, separator, value = word.partition("=")
        if flag not in RENAMED:
            found.append(word)
            if word == "--":
                break
            continue
        new, begin = RENAMED[flag]
        value = value if separator else next(words, "")
        note(f"{flag} is now {new} {begin}{value}; the old name goes with the next release")
        found += [new, f"{begin}{value}"]
    return [*found, *words]


class Worded:
    """Says what is wrong with a command line as every other fault of input is said."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Take the options and arguments in; raises `D3EngineError` for those that cannot be read."""
        args = with_new_names(args)
        words = list(args)
        parent: Any = super()
        try:
            return parent.parse_args(ctx, args)
        except UsageError as error:
            if shows_help(error):
                raise
            raise D3EngineError(in_words(error, ctx, lambda: parent.make_parser(ctx).parse_args(words)[0])) from None


class Command(Worded, TyperCommand):
    """A command, whose errors name the flags that were typed."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options under the names of their panels, as typer does only on a terminal."""
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                usual = "Arguments" if param.param_type_name == "argument" else "Options"
                panels.setdefault(getattr(param, "rich_help_panel", None) or usual, []).append(record)
        for name, records in panels.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        params: Any = self.params
        typed = [param for param in params if ctx.get_parameter_source(param.name).name == "COMMANDLINE"]
        flags = [max(param.opts, key=len) for param in typed if param.param_type_name == "option"]
        with naming_flags({flag.removeprefix("--").replace("-", "_"): flag for flag in flags}):
            return super().invoke(ctx)


class Group(Worded, TyperGroup):
    """A group of commands that all end in one way."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first of the words names; raises `InvalidValueError` where it names none."""
        known = self.get_command(ctx, args[0]) is not None
        require(known, "COMMAND", args[0], f"one of {', '.join(self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def make_context(self, *arguments: Any, **named: Any) -> Any:
        """Read the command line; prints --help and --version."""
        with ending():
            return super().make_context(*arguments, **named)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with ending():
            return super().invoke(ctx)


class App(typer.Typer):
    """An app whose commands take `-v` and `-q`."""

    def command(self, *arguments: Any, **named: Any) -> Callable[[CommandFunction], CommandFunction]:
        """As typer's."""
        register = super().command(*arguments, **{"cls": Command, **named})

        def decorate(function: CommandFunction) -> CommandFunction:
            return cast(CommandFunction, register(takes_verbosity(function)))

        return decorate


def new_app(*, cls: type[Group] = Group, **settings: Any) -> App:
    """A typer app with the settings all commands share: no boxes in a pipe, plain tracebacks."""
    markup: Any = "rich" if sys.stdout.isatty() else None
    return App(cls=cls, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=markup, **settings)
