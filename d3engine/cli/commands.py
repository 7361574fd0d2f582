"""The commands of the command line, mounted in one app.

The one idea: a command's module is imported when that command runs or is listed with its help, and none of them
imports torch before it has work to do.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer

from d3engine.cli.apps import Group, new_app
from d3engine.version import __version__

COMMANDS = {
    "generate": "d3engine.cli.generate",
    "chat": "d3engine.cli.chat",
    "serve": "d3engine.cli.serve",
    "batch": "d3engine.cli.batch",
    "schedule": "d3engine.cli.schedule",
    "plan": "d3engine.cli.plan",
    "eval": "d3engine.cli.eval",
    "calibrate": "d3engine.cli.calibrate",
    "bridge": "d3engine.cli.bridge",
    "analyze": "d3engine.cli.analyze",
    "paper": "d3engine.cli.paper",
    "weights": "d3engine.cli.weights",
    "integrations": "d3engine.cli.integrations",
}
"""Command -> module; the module's `app`, made by `new_app`, holds the command or its subcommands."""


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
