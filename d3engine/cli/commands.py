"""The frame of every command: its app, verbosity, errors and exit codes."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar, cast

import typer
from typer.core import TyperCommand, TyperGroup

from d3engine.cli.signatures import give_parameters, keyword, naming_flags
from d3engine.cli.streams import discard_stdout, wrapped
from d3engine.errors import NOTHING, D3EngineError, InvalidValueError, must_be, require
from d3engine.utils.files import is_writable, write_whole
from d3engine.utils.version import __version__

if TYPE_CHECKING:
    from d3engine.research.analysis.report import Table


def check_output(option: str, path: Path | None) -> None:
    """Refuse, before the work whose result it will hold, a file that cannot be written."""
    require(path is None or is_writable(path), option, str(path), "a file that can be written, in an existing folder")


def check_plot(option: str, path: Path | None) -> None:
    """The same of a picture, whose suffix matplotlib must know."""
    if path is not None:
        from d3engine.research.plots import check_picture

        check_picture(option, path)


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Name `option` in an `InvalidValueError` where the block cannot write the file."""
    try:
        yield
    except OSError as error:
        raise InvalidValueError(option, str(path), f"a file that can be written ({error})") from error


def write_output(option: str, path: Path, content: str) -> None:
    """Write a file whole or not at all; raises `InvalidValueError` that names `option` where that cannot be done."""
    with writing(option, path):
        write_whole(path, content)


@contextmanager
def printing_last(show: Callable[[], None]) -> Iterator[None]:
    """Call `show` after the block, which writes files, even when it fails: a full disk must not cost the results."""
    try:
        yield
    finally:
        show()


Gather: TypeAlias = Callable[[Iterable[Any]], list[Any]]


@contextmanager
def showing_what_is_done() -> Iterator[Gather]:
    """Yields what gathers results until Ctrl-C or SIGTERM: the block shows those that there are, and the command ends
    behind it.

    Without a result both end the command at once.
    """
    interrupted = False

    def gather(results: Iterable[Any]) -> list[Any]:
        nonlocal interrupted
        found = []
        try:
            for one in results:
                found.append(one)
        except KeyboardInterrupt:
            if not found:
                raise
            interrupted = True
        return found

    with interrupted_by_signals():
        yield gather
    if interrupted:
        raise KeyboardInterrupt


AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def print_json(report: Any) -> None:
    """Print a report as JSON, indented."""
    typer.echo(json.dumps(report, indent=2))


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> None:
    """As `d3engine.cli.terminal.print_table`, which is imported for the first table: its libraries are slow to load."""
    from d3engine.cli import terminal

    terminal.print_table(title, header, rows, notes)


def print_tables(tables: Iterable[Table], *, apart: bool = False) -> None:
    """Print tables; between them an empty line where they stand `apart`."""
    for place, table in enumerate(tables):
        typer.echo("", nl=apart and place > 0)
        print_table(table.title, table.header, table.rows, table.notes)


def show_report(
    report: Callable[[], Any], tables: Callable[[], Iterable[Table]], as_json: bool, *, apart: bool = False
) -> None:
    """Print a report as JSON, or as its tables."""
    if as_json:
        print_json(report())
    else:
        print_tables(tables(), apart=apart)


def tell_verdict(found: Any, show: Callable[[Any], None], as_json: bool) -> None:
    """Print a report as JSON or by `show`; the command fails where the report says that something does not hold."""
    if as_json:
        print_json(found.as_dict())
    else:
        show(found)
    if not found.holds:
        raise typer.Exit(ExitCode.FAILED)


PROGRAM = "d3engine"


def as_typed(*words: str) -> str:
    """The command `d3engine` with these words, quoted for a shell."""
    return shlex.join([*_program(), *words])


def _program() -> list[str]:
    called = Path(sys.argv[0])
    if called.name == PROGRAM and called.is_file():
        return [_shortest(called)]
    return [_shortest(Path(sys.executable)), "-m", PROGRAM]


def _shortest(file: Path) -> str:
    """The name alone where the shell finds this very file by it; otherwise its path, from here if it lies below.

    Links are not followed: a virtual environment's python is a link to one without our package.
    """
    path = os.path.abspath(file)
    found = shutil.which(file.name)
    if found is not None and os.path.abspath(found) == path:
        return file.name
    try:
        below = os.path.relpath(path)
    except ValueError:  # on another drive of Windows
        return path
    return path if below.startswith(os.pardir) else os.path.join(os.curdir, below) if os.sep not in below else below


LOGGER = logging.getLogger("d3engine")
CERTIFICATION = logging.getLogger("d3engine.engine.depth")

Verbose = Annotated[
    int,
    typer.Option(
        "-v",
        "--verbose",
        count=True,
        metavar="",
        show_default=False,
        help="Log what is done to stderr; -vv for details.",
    ),
]
Quiet = Annotated[
    bool, typer.Option("-q", "--quiet", show_default=False, help="Errors alone on stderr; no progress bar.")
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
        if record.exc_info:  # a fault of d3engine, which is reported only here
            print(logging.Formatter().formatException(record.exc_info), file=sys.stderr)


UsageError: Any = typer.BadParameter.__bases__[0]
"""What typer raises for a command line that it cannot read; which package has it depends on typer's version."""

KINDS = {"INTEGER": "an integer", "NUMBER": "a number"}
"""What a value of such a name in the help must be."""


def _fault(error: Any, given: Callable[[], Mapping[str, Any]]) -> str:
    """The sentence for an error of typer's; `given` has the values of the command line as they stand there."""
    parameter = getattr(error, "param", None)
    if parameter is None:
        return _unknown(error) if hasattr(error, "possibilities") else error.format_message().rstrip(".")
    is_option = parameter.param_type_name == "option"
    name = max(parameter.opts, key=len) if is_option else parameter.metavar or parameter.name.upper()
    if hasattr(error, "param_type"):  # it is missing
        text = (parameter.help or "a value").rstrip(".")
        return must_be(name, NOTHING, f"given: {text[0].lower()}{text[1:]}")
    if parameter.metavar in KINDS:
        return must_be(name, given().get(parameter.name), KINDS[parameter.metavar])
    return f"{name}: {error.message.removeprefix('Value error, ').rstrip('.')}"


def _unknown(error: Any) -> str:
    from d3engine.cli.depth_options import respelled  # which loads the policies

    new = respelled(error.option_name)
    if new is not None:
        return f"there is no option {error.option_name} any more: write {new}"
    for argument in error.ctx.command.params if error.ctx else ():  # --model, as other programs have it
        name = argument.metavar or ""
        if argument.param_type_name == "argument" and name.lower().startswith(error.option_name.strip("-")):
            return f"there is no option {error.option_name}: {name} is an argument"
    like = f" (is it {' or '.join(sorted(error.possibilities))}?)" if error.possibilities else ""
    return f"there is no option {error.option_name}{like}"


class ExitCode(IntEnum):
    """The exit codes of every command; `docs/reference/errors.md` explains them to users."""

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


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Let a terminal that is closed, or a `kill`, end the block as Ctrl-C does, so that it leaves nothing half done."""
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]  # which nohup sets
    before = {number: signal.signal(number, signal.default_int_handler) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def code_of(error: D3EngineError) -> ExitCode:
    """A RuntimeError happened on the way; all others say what was wrong with the input."""
    return ExitCode.FAILED if isinstance(error, RuntimeError) else ExitCode.REFUSED


def say_error(message: str) -> None:
    """One line on stderr, which a terminal gets broken at spaces."""
    typer.echo(wrapped("error: " + " ".join(message.split()), sys.stderr), err=True)


CommandFunction = TypeVar("CommandFunction", bound=Callable[..., Any])


RENAMED: dict[str, tuple[str, str | None]] = {
    "--pack-weights": ("--weight-compression=bf12", None),
    "--no-pack-weights": ("--weight-compression=none", None),
    "--admission-waves": ("--admission-interval", ""),
    "--request-timeout": ("--timeout", "request="),
    "--header-timeout": ("--timeout", "header="),
    "--body-timeout": ("--timeout", "body="),
    "--write-timeout": ("--timeout", "write="),
    "--timeout-keep-alive": ("--timeout", "keep-alive="),
    "--shutdown-timeout": ("--timeout", "shutdown="),
}
"""Options of the release before -> option, and what its value begins with; None: it has no value.

They go with the next release.
"""


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
        if begin is None:
            note(f"{flag} is now {new}; the old name goes with the next release")
            found.append(new)
            continue
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
            if type(error).show is not UsageError.show:  # no fault: a group named alone, which shows its help
                raise
            fault = _fault(error, lambda: parent.make_parser(ctx).parse_args(words)[0])
            raise D3EngineError(f"{fault}; see {as_typed(*ctx.command_path.split()[1:], '--help')}") from None


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
    "depth": "d3engine.cli.depth_train",
    "analyze": "d3engine.cli.analyze",
    "paper": "d3engine.cli.paper",
    "weights": "d3engine.cli.weights",
    "models": "d3engine.cli.models",
    "verify": "d3engine.cli.verify",
    "speculate": "d3engine.cli.speculate",
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
    """A Llama inference engine in which each request has its own depth."""
