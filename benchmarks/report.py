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
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar, cast

from rich.console import Console

from d3engine.utils.files import write_whole
from d3engine.utils.version import __version__

PACKAGES = ("d3engine", "torch", "transformers", "numpy")


def environment(module: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The command, versions, processor and commit of a run; of a file named by its whole path only the name stays."""
    return {
        "command": shlex.join(["python", "-m", module, *map(_without_folder, arguments)]),
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in PACKAGES},
        "system": platform.system(),
        "cpu": _cpu(),
        "logical_cores": os.cpu_count(),
    }


class Parser(argparse.ArgumentParser):
    """The command line of `python -m benchmarks.NAME`, with --json; None reads this process's own."""

    def __init__(self, name: str, doc: str | None, arguments: Sequence[str] | None) -> None:
        super().__init__(prog=f"python -m benchmarks.{name}", description=(doc or "").splitlines()[0])
        self._name, self._words = name, sys.argv[1:] if arguments is None else list(arguments)
        self.add_argument("--json", metavar="FILE", help="also write all figures to this file")

    def given(self) -> argparse.Namespace:
        """The options."""
        return self.parse_args(self._words)

    def environment(self) -> dict[str, Any]:
        """Where the figures come from."""
        return environment(f"benchmarks.{self._name}", self._words)


Settings = TypeVar("Settings")


def settings_of(kind: type[Settings], options: argparse.Namespace, **others: Any) -> Settings:
    """A dataclass of settings: the options that are fields of it, lists as tuples, and `others`."""
    given = {one.name: getattr(options, one.name) for one in fields(cast(Any, kind)) if hasattr(options, one.name)}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()} | others)


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median, least and most of one value per round, and the values themselves."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "rounds": list(values)}


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


def tell(
    report: dict[str, Any], show: Callable[[dict[str, Any], Console], None], *, width: int, file: str | None
) -> None:
    """Print a report, `width` columns wide where that is no terminal, and write it to a file if one is given."""
    console = Console()
    show(report, console if console.is_terminal else Console(width=width))
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


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return __version__ if package == "d3engine" else None  # of a checkout that is not installed


def _cpu() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def keep(report: dict[str, Any], options: argparse.Namespace, plot: Callable[[dict[str, Any], str], None]) -> None:
    """Write to the file of --json and draw to that of --plot, where they were given; the numbers first."""
    if options.json:
        write_json(report, options.json)
    if options.plot:
        plot(report, options.plot)


def positive(text: str) -> int:
    """A whole number of at least 1 on a command line."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return number
