"""The command line, `d3engine COMMAND`.

The one idea: a command's module is imported when that command runs, so that `d3engine schedule` needs no
torch. An error that the engine raises on purpose ends any command with one line on stderr and exit code 2.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from d3engine import __version__
from d3engine.errors import D3EngineError

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


class Commands(TyperGroup):
    """Mounts `COMMANDS` on first use and words errors."""

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

    def invoke(self, ctx: Any) -> Any:
        """Run the command; `D3EngineError` becomes one line on stderr and exit code 2."""
        try:
            return super().invoke(ctx)
        except D3EngineError as error:
            typer.echo("error: " + " ".join(str(error).split()), err=True)
            raise typer.Exit(2) from None


def new_app(**settings: Any) -> typer.Typer:
    """A typer app with the settings all commands share: no boxes in a pipe, plain tracebacks."""
    markup: Any = "rich" if sys.stdout.isatty() else None
    return typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=markup, **settings)


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


def main() -> None:
    """Entry point of the `d3engine` script."""
    app(prog_name="d3engine")
