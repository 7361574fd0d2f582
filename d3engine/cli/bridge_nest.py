"""`d3engine bridge nest`: in which order windows are best left out, chosen on a text and written beside the bridges."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from d3engine.cli.bridge_texts import (
    ANSWER_TOKENS,
    BridgesFile,
    Data,
    MaxTokens,
    Prompts,
    PromptTokens,
    Task,
    Text,
    TextOptions,
    TextTokens,
    bridges_path,
    open_passage,
    progress_bar,
    read_own_bridges,
    write_own_bridges,
)
from d3engine.cli.engine_options import Model, Options, takes_engine
from d3engine.cli.output_files import check_output, printing_last
from d3engine.errors import require, require_integer

if TYPE_CHECKING:
    from d3engine.bridges.nesting import Order


@takes_engine
def nest_command(
    engine_options: Options,
    model: Model = "demo",
    bridges: BridgesFile = None,
    text: Text = None,
    task: Task = None,
    prompts: Prompts = None,
    data: Data = None,
    width: Annotated[int, typer.Option("--width", help="Layers of each window, as --grid of d3engine bridge fit.")] = 3,
    count: Annotated[int, typer.Option("--count", help="Windows to choose at most.")] = 3,
    texts: Annotated[int, typer.Option("--texts", help="Texts to choose by at most.")] = 8,
    text_tokens: TextTokens = 256,
    prompt_tokens: PromptTokens = None,
    max_tokens: MaxTokens = ANSWER_TOKENS,
    out: Annotated[Path | None, typer.Option("--out", help="The file to write (the same file).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Choose windows one after the other, each the one that costs least beside those before it, all of them bridged.

    The order is written into the file of bridges, and is what nested's windows take.
    """
    path = bridges_path(model, bridges)
    target = out or path
    check_output("--out", target)
    asked = TextOptions(text or [], task, prompts, data, texts, text_tokens, prompt_tokens, max_tokens)
    asked.check()
    require_integer("--width", width, 1)
    require_integer("--count", count, 1)

    from d3engine.bridges.judging import FullText, long_enough
    from d3engine.bridges.nesting import choose_order, grid_of

    engine, passage = open_passage(model, engine_options)
    found = read_own_bridges(engine, path, passage.device)
    candidates = grid_of(found.by_window, width)
    require(len(candidates) > 0, "--width", width, "that of --grid when the bridges were fitted")
    chosen = long_enough(asked.read_one_kind(engine, engine_options.get("seed", 0)))
    full = [FullText(passage, one, {first for first, _ in candidates}) for one in chosen]
    with progress_bar(
        "windows", "attempt", sum(range(max(len(candidates) - count, 0) + 1, len(candidates) + 1))
    ) as bar:
        order = choose_order(full, found.by_window, candidates, count, lambda: bar.update() and None)
    with printing_last(partial(_show, order, as_json)):
        write_own_bridges(replace(found, about={**found.about, "nested": order.as_dict()}), target)


def _show(order: Order, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(order.as_dict(), indent=2))
        return
    from d3engine.cli.terminal import print_table

    table = order.table()
    print_table(table.title, table.header, table.rows)
    typer.echo(f'--depth "nested alpha=... windows={windows_in_words(order.as_dict()["windows"])}"')


def windows_in_words(windows: list[list[int]]) -> str:
    """ "6:9,12:15", as nested takes them."""
    return ",".join(f"{first}:{stop}" for first, stop in windows)
