"""`d3engine bridge`: fit affine maps that stand in for windows of skipped layers, and look into a file of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from d3engine.cli.apps import new_app
from d3engine.cli.bridge_chats import chats_command
from d3engine.cli.bridge_measure import measure_command
from d3engine.cli.bridge_nest import nest_command, windows_in_words
from d3engine.cli.bridge_texts import (
    ANSWER_TOKENS,
    Data,
    HeldOutFile,
    HeldOutTexts,
    MaxTokens,
    Prompts,
    PromptTokens,
    Task,
    Text,
    TextOptions,
    TextTokens,
    open_passage,
    progress_bar,
    write_own_bridges,
)
from d3engine.cli.bridge_tune import tune_command
from d3engine.cli.bridge_windows import Grid, Policies, Starts, WindowOptions, Windows
from d3engine.cli.engine_options import Model, Options, model_directory, takes_engine
from d3engine.cli.output_files import check_output, printing_last
from d3engine.cli.verbosity import note
from d3engine.errors import NOTHING, require
from d3engine.files import beside

if TYPE_CHECKING:
    from d3engine.bridges.fitting import Fitted
    from d3engine.bridges.held_out import HeldOut
    from d3engine.engine import Engine
    from d3engine.model.bridges import Bridges, Window

app = new_app(help="Fit affine maps that stand in for skipped layers, and inspect them.", no_args_is_help=True)


CHOOSING_EVERY = 5
"""The same of that file's: fewer texts cannot be fitted on."""

app.command("chats")(chats_command)
app.command("nest")(nest_command)
app.command("tune")(tune_command)
app.command("measure")(measure_command)


class BridgeDtype(StrEnum):
    """What the maps are written in; `DTYPES` as an option."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@app.command("fit")
@takes_engine
def fit_command(
    engine_options: Options,
    model: Model = "demo",
    text: Text = None,
    task: Task = None,
    prompts: Prompts = None,
    data: Data = None,
    held_out: HeldOutFile = None,
    starts: Starts = None,
    windows: Windows = None,
    policies: Policies = None,
    grid: Grid = None,
    rank: Annotated[int | None, typer.Option("--rank", help="Rank of each map (full).")] = None,
    texts: Annotated[int, typer.Option("--texts", help="Texts to fit on at most.")] = 150,
    held_out_texts: HeldOutTexts = 24,
    text_tokens: TextTokens = 512,
    prompt_tokens: PromptTokens = None,
    max_tokens: MaxTokens = ANSWER_TOKENS,
    bridge_dtype: Annotated[
        BridgeDtype, typer.Option("--bridge-dtype", help="What the maps are written in.")
    ] = BridgeDtype.float32,
    out: Annotated[
        Path | None, typer.Option("--out", help="The file to write (bridges.safetensors beside the weights).")
    ] = None,
    png: Annotated[Path | None, typer.Option("--png", help="Also draw what was measured to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was measured as JSON.")] = False,
) -> None:
    """Fit a bridge for every window from a start, in one pass over a text, and measure all of them on held-out text.

    A fit that was cut off goes on where its saved state (OUT.part) ends.
    """
    directory = model_directory(model)
    target = _target(model, directory, out)
    for option, path in (("--out", target), ("--png", png)):
        check_output(option, path)
    if png is not None:
        from d3engine.pictures.plots import check_picture

        check_picture("--png", png)
    reported, wanted = WindowOptions(starts or [], windows or [], policies or [], grid).find(directory)
    asked = TextOptions(
        text or [], task, prompts, data, texts, text_tokens, prompt_tokens, max_tokens, held_out, held_out_texts
    )
    asked.check(fewest=CHOOSING_EVERY)

    from d3engine.bridges.fitting import Fit
    from d3engine.bridges.held_out import measure_held_out

    engine, passage = open_passage(model, engine_options)
    size = engine.config.hidden_size
    require(rank is None or 1 <= rank < size, "--rank", rank, f"an integer from 1 to {size - 1}")
    seed = engine_options.get("seed", 0)
    readings, judge_on = asked.read(engine, seed)
    fit_on = [one.token_ids for one in readings]
    about = {"source": asked.source, "seed": seed}
    fit = Fit(passage, wanted)
    state = target.with_name(f"{target.name}.part")
    with progress_bar("fit", "text", len(fit_on)) as bar:
        fit.gather_all(fit_on, state, _key(directory, wanted, fit_on), lambda: bar.update() and None)
    found = fit.solve(rank)
    bridges = _bridges(engine, found, fit, fit_on, about)
    with progress_bar("held out", "text", len(judge_on)) as bar:
        result = measure_held_out(
            passage,
            [fitted.bridge for fitted in found if fitted.bridge.window in reported],
            judge_on,
            lambda: bar.update() and None,
        )
    with printing_last(partial(_show, result, found, target, as_json)):
        _write(bridges, result, bridge_dtype.value, target)
        state.unlink(missing_ok=True)
        if png is not None:
            from d3engine.bridges.picture import plot_held_out

            plot_held_out(result, png, f"{Path(model).name}: windows skipped and bridged")


@app.command("inspect")
def inspect_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that d3engine bridge fit has written.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show whose bridges a file holds, their windows, ranks and sizes, and what they were fitted on."""
    from d3engine.model.bridges import read_bridges

    bridges = read_bridges(file)
    found = [
        (bridge, str(bridge.weight.dtype).removeprefix("torch."), bridge.num_parameters)
        for bridge in bridges.by_window.values()
    ]
    if as_json:
        rows = [
            {"window": list(bridge.window), "rank": bridge.rank, "dtype": dtype, "parameters": count}
            for bridge, dtype, count in found
        ]
        whose = {"fingerprint": bridges.fingerprint, "num_layers": bridges.num_layers}
        typer.echo(json.dumps({**whose, "bytes": bridges.num_bytes, "bridges": rows, "about": bridges.about}, indent=2))
        return
    from d3engine.cli.terminal import print_table

    shown = [
        (f"[{bridge.first}, {bridge.stop})", f"{bridge.rank or 'full'}", dtype, f"{count:,}")
        for bridge, dtype, count in found
    ]
    title = f"Bridges of {bridges.num_layers} layers, {bridges.num_bytes / 2**20:.1f} MiB, {bridges.fingerprint}"
    print_table(title, ("window", "rank", "dtype", "parameters"), shown)
    about = {name: value for name, value in bridges.about.items() if name not in ("held_out", "nested", "tuned")}
    if "nested" in bridges.about:
        about["nested windows"] = windows_in_words(bridges.about["nested"]["windows"])
    if "tuned" in bridges.about:
        about["tuned for"] = "; ".join(str(one["policy"]) for one in bridges.about["tuned"])
    typer.echo(", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in about.items()))


# -- what is fitted --------------------------------------------------------------------------------------------


def _target(model: str, directory: Path, out: Path | None) -> Path:
    from d3engine.loading.model_directory import DEMO
    from d3engine.model.bridges import BRIDGES_FILE

    bundled = "given as a file to write, since the bundled model's directory belongs to the package"
    require(out is not None or model != DEMO, "--out", NOTHING, bundled)
    return out if out is not None else beside(directory, BRIDGES_FILE)


def _key(directory: Path, windows: Sequence[Window], texts: Sequence[Sequence[int]]) -> str:
    """By which a saved state is known to be of this very fit."""
    from d3engine.bridges.fitting import text_hash
    from d3engine.model.fingerprint import fingerprint

    return json.dumps([fingerprint(directory), list(windows), text_hash(texts)])


def _bridges(
    engine: Engine, found: Sequence[Fitted], fit: Any, texts: Sequence[Sequence[int]], about: dict[str, Any]
) -> Bridges:
    from d3engine.bridges.fitting import text_hash
    from d3engine.model.bridges import Bridges
    from d3engine.model.fingerprint import fingerprint

    ridges = {f"{one.bridge.first}:{one.bridge.stop}": one.ridge for one in found}
    return Bridges(
        fingerprint=fingerprint(engine.directory),
        num_layers=engine.config.num_layers,
        hidden_size=engine.config.hidden_size,
        by_window={one.bridge.window: one.bridge for one in found},
        about={
            **about,
            "texts": fit.num_texts,
            "positions": fit.num_positions,
            "text_hash": text_hash(texts),
            "ridges": ridges,
        },
    )


# -- what is said ----------------------------------------------------------------------------------------------


def _write(bridges: Bridges, result: HeldOut, dtype: str, target: Path) -> None:
    from dataclasses import replace

    import torch

    from d3engine.model.bridges import DTYPES

    ready = replace(bridges, about={**bridges.about, "held_out": result.as_dict()})
    write_own_bridges(ready.to(DTYPES[dtype], torch.device("cpu")), target)
    note(f"{len(bridges.by_window)} bridges written to {target}")


def _show(result: HeldOut, found: Sequence[Fitted], target: Path, as_json: bool) -> None:
    if as_json:
        fits = [
            {"window": list(one.bridge.window), "ridge": one.ridge, "unexplained": one.unexplained} for one in found
        ]
        typer.echo(json.dumps({"out": str(target), "fits": fits, "held_out": result.as_dict()}, indent=2))
        return
    from d3engine.cli.terminal import print_table

    if result.num_texts == 0:
        note("no held-out text is long enough to be measured on")
        return
    table = result.table()
    print_table(table.title, table.header, table.rows)
