"""How a command ends: its exit code, and one line on stderr for what went wrong.

The one idea: commands raise, and only `ending` here turns what they raised into words and a code, the same in all.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import typer

from d3engine.cli.lines import wrapped
from d3engine.cli.streams import discard_stdout
from d3engine.errors import D3EngineError


class ExitCode(IntEnum):
    """The exit codes of every command; `docs/cli.md` explains them to users."""

    DONE = 0
    FAILED = 1  # it ran and failed, or what was asked is not so
    REFUSED = 2  # options, files or what is installed must change first; nothing has run
    NO_SAFE_SETTING = 3  # of `calibrate`, as the next
    TOO_LITTLE_KNOWN = 4  # full depth itself is hardly ever right
    INTERRUPTED = 130  # as a shell says of SIGINT
    PIPE_CLOSED = 141  # and of SIGPIPE


@contextmanager
def ending() -> Iterator[None]:
    """Words what ends a command, and raises `typer.Exit` with its code; stdout is flushed at the end."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except D3EngineError as error:
        say_error(str(error))
        raise typer.Exit(code_of(error)) from None
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except BrokenPipeError:
        discard_stdout()
        raise typer.Exit(ExitCode.PIPE_CLOSED) from None
    except OSError as error:
        discard_stdout()
        say_error(f"{error.filename or 'stdout'}: {error.strerror or error}")
        raise typer.Exit(ExitCode.FAILED) from None


def code_of(error: D3EngineError) -> ExitCode:
    """A RuntimeError happened on the way; all others say what was wrong with the input."""
    return ExitCode.FAILED if isinstance(error, RuntimeError) else ExitCode.REFUSED


def say_error(message: str) -> None:
    """One line on stderr, which a terminal gets broken at spaces."""
    typer.echo(wrapped("error: " + " ".join(message.split()), sys.stderr), err=True)
