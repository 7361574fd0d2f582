"""`-v` and `-q` of every command: how much is told on stderr beside the result.

The one idea: the level of the logger "d3engine" is the only switch. Messages, notes and progress bars all ask it.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from d3engine.cli.lines import wrapped
from d3engine.cli.signatures import give_parameters, keyword
from d3engine.errors import NOTHING, require

LOGGER = logging.getLogger("d3engine")
CERTIFICATION = logging.getLogger("d3engine.loading.certification")

Verbose = Annotated[
    int,
    typer.Option(
        "-v",
        "--verbose",
        count=True,
        metavar="",
        show_default=False,
        help="Tell what is done, on stderr; -vv in detail.",
    ),
]
Quiet = Annotated[
    bool, typer.Option("-q", "--quiet", show_default=False, help="Nothing on stderr but errors; no progress bar.")
]


def takes_verbosity(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a typer command `-v` and `-q`."""

    @functools.wraps(command)
    def with_verbosity(**arguments: Any) -> Any:
        set_verbosity(arguments.pop("verbose"), arguments.pop("quiet"))
        return command(**arguments)

    own = inspect.signature(command, eval_str=True).parameters.values()
    give_parameters(with_verbosity, [*own, keyword("verbose", Verbose, 0), keyword("quiet", Quiet, False)])
    return with_verbosity


def set_verbosity(verbose: int, quiet: bool) -> None:
    """Warnings by default; `-v` adds what is done, `-vv` its details, `-q` leaves errors alone."""
    require(not (verbose and quiet), "--quiet", NOTHING, "given without --verbose")
    level = logging.ERROR if quiet else (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    for handler in [one for one in LOGGER.handlers if isinstance(one, _ToStderr)]:
        LOGGER.removeHandler(handler)
    LOGGER.addHandler(_ToStderr())
    LOGGER.setLevel(level)
    CERTIFICATION.setLevel(logging.NOTSET)


def measures_depths() -> None:
    """Leave out the warnings of depths that are not certified: the command measures what they cost."""
    CERTIFICATION.setLevel(logging.ERROR)


def note(text: str) -> None:
    """What a reader of the result may want to know, on stderr; not under `-q`."""
    if LOGGER.isEnabledFor(logging.WARNING):
        typer.echo(wrapped(text, sys.stderr), err=True)


class _ToStderr(logging.Handler):
    """Writes to the stderr of the moment; a level above info is named."""

    def emit(self, record: logging.LogRecord) -> None:
        level = f"{record.levelname.lower()}: " if record.levelno != logging.INFO else ""
        print(wrapped(f"{level}{record.getMessage()}", sys.stderr), file=sys.stderr)
        if record.exc_info:  # a fault of d3engine's own, of which nobody else is told
            print(logging.Formatter().formatException(record.exc_info), file=sys.stderr)
