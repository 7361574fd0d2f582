"""What all commands are made with: one way to begin, to be verbose and to end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import typer
from typer.core import TyperGroup

from d3engine.cli.ending import ending
from d3engine.cli.verbosity import takes_verbosity

CommandFunction = TypeVar("CommandFunction", bound=Callable[..., Any])


class Group(TyperGroup):
    """A group of commands that all end in one way."""

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
        register = super().command(*arguments, **named)

        def decorate(function: CommandFunction) -> CommandFunction:
            return cast(CommandFunction, register(takes_verbosity(function)))

        return decorate


def new_app(**settings: Any) -> App:
    """A typer app with the settings all commands share: no boxes in a pipe, plain tracebacks."""
    markup: Any = "rich" if sys.stdout.isatty() else None
    return App(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=markup, **settings)
