"""The commands of the command line, and the app that they are mounted in.

The one idea: a command's module is imported when that command runs or is listed with its help, and none of them
imports torch before it has work to do.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from d3engine import __version__
from d3engine.cli.ending import ending
from d3engine.cli.verbosity import takes_verbosity

COMMANDS = {
    "generate": "d3engine.cli.generate",
    "chat": "d3engine.cli.chat",
    "schedule": "d3engine.cli.schedule",
    "eval": "d3engine.cli.eval",
    "calibrate": "d3engine.cli.calibrate",
    "analyze": "d3engine.cli.analyze",
    "paper": "d3engine.cli.paper",
    "weights": "d3engine.weights_tools.cli",
}
"""Command -> module; the module's `app`, made by `new_app`, holds the command or its subcommands."""


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


class Commands(Group):
    """Mounts `COMMANDS` on first use."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names alone: nothing is imported for them."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name, or None."""
        if cmd_name in COMMANDS and cmd_name not in self.commands:
            command: Any = typer.main.get_command(import_module(COMMANDS[cmd_name]).app)
            command.name = cmd_name
            self.commands[cmd_name] = command
        return self.commands.get(cmd_name)


class App(typer.Typer):
    """An app whose commands take `-v` and `-q`."""

    def command(self, *arguments: Any, **named: Any) -> Any:
        """As typer's."""
        register = super().command(*arguments, **named)
        return lambda function: register(takes_verbosity(function))


def new_app(**settings: Any) -> App:
    """A typer app with the settings all commands share: no boxes in a pipe, plain tracebacks."""
    markup: Any = "rich" if sys.stdout.isatty() else None
    return App(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=markup, **settings)


app = new_app(cls=Commands, no_args_is_help=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"d3engine {__version__}")
        raise typer.Exit


@app.callback()
def _d3engine(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """A Llama inference engine in which a skipped layer is time and memory really saved."""
