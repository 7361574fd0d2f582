"""What the subcommands of `d3engine analyze` share: flags, the answers that they observe, and how a result is shown."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from d3engine.cli.engine_options import Options, engine_arguments, model_directory
from d3engine.errors import require_integer
from d3engine.progress import hides_bars

if TYPE_CHECKING:
    from d3engine.analysis.answers import Answered
    from d3engine.analysis.observer import Observer
    from d3engine.analysis.report import Analysis, Table
    from d3engine.engine import Engine

Prompts: TypeAlias = Annotated[
    Path | None,
    typer.Option("--prompts", help="One prompt per line, or a .json list of texts (held-out word problems)."),
]
Limit: TypeAlias = Annotated[int, typer.Option("--limit", help="How many prompts.")]
MaxTokens: TypeAlias = Annotated[int, typer.Option("--max-tokens", help="Tokens of an answer at most.")]
Png: TypeAlias = Annotated[
    Path | None, typer.Option("--png", help="Also draw it to this file (PNG, or what its suffix says).")
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def observe(
    model: str, options: Options, prompts: Path | None, limit: int, max_tokens: int, png: Path | None
) -> tuple[Engine, Observer, list[Answered]]:
    """The model, and its answers at full depth. What can be refused is refused before the model is loaded."""
    from d3engine.analysis.answers import MAX_PROMPTS, answer, default_prompts, open_model, read_prompts

    require_integer("--limit", limit, 1, MAX_PROMPTS)
    model_directory(model)
    if png is not None:
        from d3engine.pictures.plots import check_picture

        check_picture("--png", png)
    texts = default_prompts(options.get("seed", 0), limit) if prompts is None else read_prompts(prompts, limit)
    engine, observer = open_model(model, engine_arguments(model, options))
    return engine, observer, answer(engine, texts, max_tokens, progress=sys.stderr.isatty() and not hides_bars())


def with_bar(answered: Sequence[Answered], name: str) -> Any:
    """The answers under a progress bar on a terminal."""
    from tqdm import tqdm

    return tqdm(answered, desc=name, unit="answer", disable=hides_bars(), leave=False)


def picture_title(model: str, table: Table) -> str:
    """The title of a picture beside a table: the model's name, and what the table says of itself."""
    return f"{Path(model).name}: {table.title[0].lower()}{table.title[1:]}"


def show_result(result: Analysis, as_json: bool) -> None:
    """Print a result as JSON, or as a table."""
    if as_json:
        typer.echo(json.dumps(result.as_dict(), indent=2))
    else:
        from d3engine.cli.terminal import print_table

        table = result.table()
        print_table(table.title, table.header, table.rows)
