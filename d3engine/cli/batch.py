"""`d3engine batch IN OUT`: answer a file of requests in OpenAI's batch format."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from d3engine.cli.commands import ExitCode, new_app, note
from d3engine.cli.depth_options import AUTO, Depth, takes_depth
from d3engine.cli.engine_options import (
    MODEL,
    Options,
    engine_arguments,
    model_directory,
    takes_engine,
    tell_own_setting,
)
from d3engine.cli.server_options import require_server_packages, served_as, takes_bodies
from d3engine.errors import InvalidValueError, require, require_integer
from d3engine.utils.progress import progress_bar

if TYPE_CHECKING:
    from d3engine.integrations.batch_file import Line, Result, Results

app = new_app()

RAY = 'Let engines of this Ray cluster answer; "auto" is the one that runs here, "local" a new one (extra ray).'

Answering: TypeAlias = "Callable[[Iterable[Line]], Iterator[Result]]"
"""Turns lines into results as they come, in any order."""


@app.command()
@takes_depth
@takes_engine
@takes_bodies
def batch(
    engine_options: Options,
    what: Options,
    depth: Depth,
    source: Annotated[Path, typer.Argument(metavar="IN", help="A file with a request on each line, as JSON.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Gets a line for each; goes on if it is there.")],
    model: Annotated[str, typer.Option("--model", help=MODEL)] = "demo",
    ray: Annotated[str | None, typer.Option("--ray", metavar="ADDRESS", help=RAY, show_default=False)] = None,
    ray_engines: Annotated[int, typer.Option("--ray-engines", help="Engines on that cluster.")] = 1,
) -> None:
    """Answer a file of requests, in OpenAI's batch format.

    A line that cannot be run becomes a line that says why. Started again, the command goes on where it was ended.
    """
    require_server_packages("d3engine batch")
    require_integer("--ray-engines", ray_engines, 1)
    require(ray is not None or ray_engines == 1, "--ray-engines", ray_engines, "given with --ray alone")
    from d3engine.integrations.batch_file import open_results
    from d3engine.server.settings import ServerSettings

    settings = ServerSettings(**served_as(model, what))
    model_directory(model)
    require(source.is_file(), "IN", str(source), "a regular file that is there, since it is read more than once")
    is_same = target.exists() and target.samefile(source)
    require(not is_same, "OUT", str(target), "another file than IN")
    total = _check_names(source)
    with open_results(target) as results:
        missing = sum(1 for _ in _missing(source, results))
        if missing < total:
            note(f"{total - missing} of {total} lines have their results in {target} already")
        errors = 0
        if missing:
            if ray is None:
                answerers = _engine(model, depth, engine_options, settings)
            else:
                answerers = _engines_on_ray(ray, ray_engines, model, depth, engine_options, settings)
            with answerers as answering:
                errors = _run(source, results, answering, missing)
    note(f"{total} lines, and a result for each; {missing - errors} answered now, {errors} told why not")
    if errors:
        raise typer.Exit(ExitCode.FAILED)


def _check_names(source: Path) -> int:
    """How many lines there are; raises `InvalidValueError` where two have one name."""
    from d3engine.integrations.batch_file import read_lines

    numbers: dict[str, int] = {}
    total = 0
    for line in read_lines(source):
        total += 1
        if line.custom_id is None:
            continue
        first = numbers.setdefault(line.custom_id, line.number)
        if first != line.number:
            found = f"{line.custom_id!r} in lines {first} and {line.number}"
            raise InvalidValueError("custom_id", found, "another in each line, since results are known by it")
    return total


def _missing(source: Path, results: Results) -> Iterator[Line]:
    from d3engine.integrations.batch_file import read_lines

    return (line for line in read_lines(source) if not results.has(line))


@contextmanager
def _engine(model: str, depth: Depth, options: Options, settings: Any) -> Iterator[Answering]:
    """An engine of this process."""
    from d3engine.async_engine.async_engine import AsyncEngine
    from d3engine.integrations.batch_runner import BatchRunner

    engine = AsyncEngine(model, depth=depth, **engine_arguments(model, options))
    try:
        if depth == AUTO:
            tell_own_setting(engine, model)
        yield BatchRunner(engine, settings).results
    finally:
        asyncio.run(engine.close())


@contextmanager
def _engines_on_ray(
    address: str, num_engines: int, model: str, depth: Depth, options: Options, settings: Any
) -> Iterator[Answering]:
    """Engines of a Ray cluster; each reads the options where it runs."""
    from d3engine.integrations.ray_batch import RayBatchRunner

    on_gpu = str(options.get("device", "")).startswith("cuda")
    answers = RayBatchRunner(
        address,
        partial(_arguments, model, depth, options),
        settings,
        num_engines=num_engines,
        actor_options={"num_gpus": 1} if on_gpu else None,
    )
    try:
        yield answers.results
    finally:
        answers.close()


def _arguments(model: str, depth: Depth, options: Options) -> dict[str, Any]:
    return {"model": model, "depth": depth, **engine_arguments(model, options)}


def _run(source: Path, results: Results, answering: Answering, missing: int) -> int:
    """Write a result of each line that has none; returns how many were not answered."""
    errors = 0
    with (
        progress_bar("batch", "line", missing, leave=True) as bar,
        closing(answering(_missing(source, results))) as found,  # type: ignore[type-var]  # what it gives is a generator
    ):
        for result in found:
            results.add(result)
            errors += not result.is_answer
            bar.update()
    return errors
