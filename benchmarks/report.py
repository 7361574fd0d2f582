"""What every benchmark writes beside its numbers: where they come from, and how they spread."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar, cast

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from d3engine.utils.files import write_whole
from d3engine.utils.version import __version__

PACKAGES = ("d3engine", "torch", "transformers", "numpy")


def positive(text: str) -> int:
    """A whole number of at least 1 on a command line."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return number


def environment(module: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The command, versions, processor and commit of a run; of a file named by its whole path only the name stays."""
    return {
        "command": shlex.join(["python", "-m", module, *map(_without_folder, arguments)]),
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": {package: version_of(package) for package in PACKAGES},
        "system": platform.system(),
        "cpu": cpuinfo().get("model name") or platform.processor() or platform.machine(),
        "logical_cores": os.cpu_count(),
    }


Settings = TypeVar("Settings")

OPTION = "option"
TYPES = {"int": positive, "float": float}
"""Annotation of a field of settings -> what reads it on a command line; all others are text."""


def option(default: Any = MISSING, help: str | None = None, **given: Any) -> Any:
    """A field of settings that is an option; `given` goes to `add_argument`, but for `flag`, its spelling."""
    return field(default=default, metadata={OPTION: {"help": help, **given}})


class Parser(argparse.ArgumentParser):
    """The command line of `python -m benchmarks.NAME`: --json and the options of its settings, without defaults.

    `arguments` None reads this process's own.
    """

    def __init__(
        self, name: str, doc: str | None, arguments: Sequence[str] | None, settings: type[Any] | None = None
    ) -> None:
        super().__init__(prog=f"python -m benchmarks.{name}", description=(doc or "").splitlines()[0])
        self._name, self._words = name, sys.argv[1:] if arguments is None else list(arguments)
        self.add_argument("--json", metavar="FILE", help="also write all figures to this file")
        for one in fields(settings) if settings is not None else ():
            if OPTION in one.metadata:
                self._add(one)

    def _add(self, one: Field[Any]) -> None:
        words = str(one.type).removesuffix(" | None")
        kind = TYPES.get(words.removeprefix("tuple[").removesuffix(", ...]"), str)
        usual: dict[str, Any] = {"dest": one.name, "type": kind, "required": one.default is MISSING}
        usual |= {"nargs": "+"} if words.startswith("tuple") else {}
        if words == "bool":
            usual = {"dest": one.name, "action": "store_true"}
        given = usual | one.metadata[OPTION]
        self.add_argument(given.pop("flag", f"--{one.name.replace('_', '-')}"), **given)

    def add_plot(self) -> None:
        """The option --plot of `publish`."""
        self.add_argument("--plot", metavar="FILE", help="also draw the figures to this PNG file (needs matplotlib)")

    def given(self) -> argparse.Namespace:
        """The options."""
        self._options = self.parse_args(self._words)
        return self._options

    def environment(self) -> dict[str, Any]:
        """Where the figures come from."""
        return environment(f"benchmarks.{self._name}", self._words)

    def publish(
        self,
        report: dict[str, Any],
        show: Callable[[dict[str, Any], Console], None],
        *,
        width: int | None = None,
        plot: Callable[[dict[str, Any], str], None] | None = None,
    ) -> None:
        """Add the environment to a report, print it, write it where --json says, and draw it where --plot does."""
        report["environment"] = self.environment()
        tell(report, show, width=width, file=self._options.json)
        if plot is not None and self._options.plot:
            plot(report, self._options.plot)


def settings_of(kind: type[Settings], options: argparse.Namespace, **others: Any) -> Settings:
    """A dataclass of settings: the options that were given, lists as tuples, and `others`."""
    given = {one.name: getattr(options, one.name, None) for one in fields(cast(Any, kind))}
    return kind(**{name: _frozen(value) for name, value in given.items() if value is not None} | others)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def plot_main(name: str, doc: str | None, plot: Callable[[Path], None]) -> Callable[[], None]:
    """`main` of a command that draws committed figures to --plot."""

    def main() -> None:
        parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=(doc or "").splitlines()[0])
        parser.add_argument("--plot", metavar="FILE", type=Path, required=True, help="the PNG file to draw")
        plot(parser.parse_args().plot)

    return main


def main_of(
    name: str,
    doc: str | None,
    settings: type[Settings],
    measure: Callable[[Settings], dict[str, Any]],
    show: Callable[[dict[str, Any], Console], None],
    *,
    width: int,
    plot: Callable[[dict[str, Any], str], None] | None = None,
) -> Callable[..., int]:
    """`main` of a benchmark: read the settings, measure, print the report, and write or draw it where that is asked."""

    def main(arguments: Sequence[str] | None = None) -> int:
        parser = Parser(name, doc, arguments, settings)
        if plot is not None:
            parser.add_plot()
        parser.publish(measure(settings_of(settings, parser.given())), show, width=width, plot=plot)
        return 0

    return main


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median, least and most of one value per round, and the values themselves."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "rounds": list(values)}


def ratios(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """One system's figures over another's, each of the same round."""
    return [a / b for a, b in zip(one, other, strict=True)]


def in_turns(
    systems: Mapping[str, Callable[[], float]], rounds: int, title: str
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The figures of two systems that take turns, summed up by name, and the second's over the first's within a round.

    A turn of each counts for nothing; every other round begins with the other one.
    """
    found: dict[str, list[float]] = {name: [] for name in systems}
    for measure in systems.values():
        measure()
    for turn in tqdm(range(rounds), desc=title, leave=False):
        for name in list(systems)[:: 1 if turn % 2 else -1]:
            found[name].append(systems[name]())
    first, second = found.values()
    return {name: summary(values) for name, values in found.items()}, summary(ratios(second, first))


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the median of one value per round; of fewer than six rounds their range.

    It goes from the k-th least to the k-th most, where fewer than k of n values lie below the median with a
    probability of at most 2.5 %: each does with one half, however they are distributed.
    """
    ordered, below, k = sorted(values), 0.0, 0
    while (below := below + math.comb(len(ordered), k) / 2 ** len(ordered)) <= 0.025:
        k += 1
    return ordered[max(k - 1, 0)], ordered[-max(k, 1)]


def spread(figure: dict[str, Any], scale: float = 1.0) -> str:
    """A summary in words: the median, and the least and the most, each times `scale`."""
    median, least, most = (figure[name] * scale for name in ("median", "min", "max"))
    return f"{median:.3g} ({least:.3g}-{most:.3g})"


def interval(figure: Mapping[str, float], form: str, scale: float = 1.0) -> str:
    """A figure with its interval: "0.137 (0.121 to 0.155)"."""
    value, low, high = (format(figure[name] * scale, form) for name in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def print_table(
    console: Console,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    title: str | None = None,
    *,
    left: Collection[str] = (),
    **look: Any,
) -> None:
    """Print a table whose columns stand at the right but for `left`; `look` goes to each column."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", **look)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def tell(
    report: dict[str, Any], show: Callable[[dict[str, Any], Console], None], *, width: int | None, file: str | None
) -> None:
    """Print a report, `width` columns wide where that is no terminal, and write it to a file if one is given."""
    console = Console()
    show(report, console if console.is_terminal or width is None else Console(width=width))
    if file:
        write_json(report, file)


def write_json(report: dict[str, Any], path: str | Path) -> None:
    """Write a report, whole or not at all: fields in their order, floats in 8 digits, a row of a table on a line."""
    fields = []
    for name, value in report.items():
        is_table = isinstance(value, list) and any(isinstance(row, dict) for row in value)
        lines = "[\n" + ",\n".join(map(_wrapped, value)) + "\n]" if is_table else _wrapped(value)
        fields.append(f"{json.dumps(name)}: {lines}")
    write_whole(path, "{\n" + ",\n".join(fields) + "\n}\n")


def _wrapped(value: Any) -> str:
    """JSON in lines of some 120 columns, which end behind commas."""
    lines = [""]
    for part in json.JSONEncoder().iterencode(_rounded(value)):
        if part.startswith(", ") and len(lines[-1]) > 110:
            lines[-1] += ","
            lines.append("  " + part[2:])
        else:
            lines[-1] += part
    return "\n".join(lines)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.8g}") if isinstance(value, float) else value


def _without_folder(argument: str) -> str:
    option, equals, value = argument.rpartition("=")
    return option + equals + (Path(value).name if os.path.isabs(value) else value)


def _commit() -> str | None:
    """The commit, with "+changes" where tracked files differ from it; None outside a checkout."""

    def git(*arguments: str) -> str:
        command, folder = ["git", *arguments], Path(__file__).parent
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def version_of(package: str) -> str | None:
    """What is installed of a package; None where nothing is."""
    try:
        return version(package)
    except PackageNotFoundError:
        return __version__ if package == "d3engine" else None  # of a checkout that is not installed


def cpuinfo() -> dict[str, str]:
    """What Linux tells of the first processor; empty on other systems."""
    if sys.platform != "linux":
        return {}
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    return dict(map(str.strip, line.partition(":")[::2]) for line in lines)
