"""`d3engine bridge`: fit affine maps for windows of skipped layers, and inspect a file of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from d3engine.cli.bridge_judged import measure_command, nest_command, tune_command, windows_in_words
from d3engine.cli.bridge_texts import (
    ANSWER_TOKENS,
    TextOptions,
    open_passage,
    policy_of,
    takes_texts,
    write_own_bridges,
)
from d3engine.cli.commands import (
    AsJson,
    ExitCode,
    check_output,
    check_plot,
    new_app,
    note,
    print_json,
    print_table,
    print_tables,
    printing_last,
    showing_what_is_done,
    write_output,
)
from d3engine.cli.depth_options import number, window_of
from d3engine.cli.engine_options import Model, Options, beside_weights, engine_arguments, model_directory, takes_engine
from d3engine.depth import FullDepth
from d3engine.depth.schedule import exact_fraction
from d3engine.errors import require, require_integer
from d3engine.utils.progress import counting

if TYPE_CHECKING:
    from d3engine.engine.engine import Engine
    from d3engine.model.bridges import Bridges, Window
    from d3engine.research.bridges.fitting import Fitted, HeldOut


GRID_WIDTHS = 3
"""As `d3engine.research.bridges.fitting.GRID_WIDTHS`, which is not loaded for help."""


def _windows(
    directory: Path, starts: Sequence[str], windows: Sequence[str], policies: Sequence[str], grid: int | None
) -> tuple[list[Window], list[Window]]:
    """The windows to measure, and all to fit, in order; those of D3's start 0.8 where nothing was given."""
    from d3engine.model.config import ModelConfig
    from d3engine.research.bridges.fitting import grid_windows, windows_from

    layers = ModelConfig.from_directory(directory).num_layers
    if not (starts or windows or policies) and grid is None:
        starts = ["0.8"]
    reported = {
        *windows_from([_first_of(start, layers) for start in starts], layers),
        *(window_of("--window", window, layers) for window in windows),
        *(window for policy in policies for window in _left_out(policy, layers)),
    }
    by_grid = [] if grid is None else grid_windows(require_integer("--grid", grid, 1, layers), layers)
    return sorted(reported), sorted({*reported, *by_grid})


def _first_of(start: str, num_layers: int) -> int:
    exact = exact_fraction("--start", number(start))
    require(0 < exact < 1, "--start", start, "a number in (0, 1), as d3's")
    return int(exact * num_layers)


def _left_out(words: str, num_layers: int) -> list[Window]:
    found = policy_of(words).schedule(num_layers).windows()
    require(bool(found), "--depth", words, "one that is known beforehand to leave layers out")
    return found


@takes_engine
def chats_command(
    engine_options: Options,
    out: Annotated[Path, typer.Option("--out", help="The .jsonl file to write.")],
    model: Model = "demo",
    texts: Annotated[int, typer.Option("--texts", help="Conversations at most.")] = 200,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens of an answer at most.")] = ANSWER_TOKENS,
) -> None:
    """Write questions that the model makes up, with its greedy answers to them at full depth: a text for --text.

    What --task chat takes is the same, made anew by each command. Ctrl-C or SIGTERM writes those that are answered.
    """
    check_output("--out", out)
    require(out.suffix == ".jsonl", "--out", str(out), "a file whose name ends in .jsonl")
    require_integer("--texts", texts, 1)
    require_integer("--max-tokens", max_tokens, 2)

    from d3engine.engine.engine import Engine
    from d3engine.research.analysis.answers import answer
    from d3engine.research.bridges.own_answers import made_up_batches

    with showing_what_is_done() as gather:
        with Engine(model, depth=FullDepth(), **engine_arguments(model, engine_options)) as engine:

            def answered(asked: list[str]) -> list[str]:
                turns = [{"role": "user", "content": one} for one in asked]
                answers = answer(engine, [engine.chat_prompt([turn]) for turn in turns], max_tokens)
                messages = [
                    [turn, {"role": "assistant", "content": one.text}] for turn, one in zip(turns, answers, strict=True)
                ]
                return [json.dumps({"messages": own}) for own in messages]

            batches = made_up_batches(engine, texts, 2 * engine_options.get("seed", 0))
            lines = [line for batch in gather(map(answered, batches)) for line in batch]
        write_output("--out", out, "\n".join(lines) + "\n")
        note(f"{len(lines)} conversations written to {out}")


app = new_app(help="Fit affine maps that stand in for skipped layers, and inspect them.", no_args_is_help=True)


CHOOSING_EVERY = 5
"""The same of that file's: fewer texts cannot be fitted on."""

SHRINK_TEXTS = 6
ENOUGH_TO_SHRINK = 40
"""Texts to fit on of which the last `SHRINK_TEXTS` say how far maps are shrunk, and are not fitted on."""

app.command("chats")(chats_command)
app.command("nest")(nest_command)
app.command("tune")(tune_command)
app.command("measure")(measure_command)


BridgeDtype = StrEnum("BridgeDtype", ["float32", "bfloat16", "float16"])
"""What the maps are written in; `DTYPES` as an option."""


@app.command("fit")
@takes_texts("Texts to fit on at most.", "bridge_dtype", texts=150, text_tokens=512, held_out_texts=24)
@takes_engine
def fit_command(
    engine_options: Options,
    model: Model = "demo",
    *,
    asked: TextOptions,
    starts: Annotated[
        list[str] | None,
        typer.Option("--start", help="d3's start: all windows from there on; may be repeated (0.8)."),
    ] = None,
    windows: Annotated[
        list[str] | None,
        typer.Option("--window", metavar="A:B", help="Also the layers A to B - 1 alone; may be repeated."),
    ] = None,
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--depth", help='Also the windows that a policy leaves out, "skipdecode mean-layers=24"; may be repeated.'
        ),
    ] = None,
    grid: Annotated[
        int | None,
        typer.Option(
            "--grid",
            metavar="WIDTH",
            help="Also what d3engine bridge nest needs, not measured here: windows between multiples of WIDTH, "
            f"up to {GRID_WIDTHS} WIDTHs wide.",
        ),
    ] = None,
    rank: Annotated[int | None, typer.Option("--rank", help="Rank of each map (full).")] = None,
    bridge_dtype: Annotated[
        BridgeDtype, typer.Option("--bridge-dtype", help="What the maps are written in.")
    ] = BridgeDtype.float32,
    even_if_worse: Annotated[
        bool,
        typer.Option(
            "--even-if-worse", help="Write maps too that held-out text says are worse than leaving layers out."
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="The file to write (bridges.safetensors beside the weights).")
    ] = None,
    png: Annotated[Path | None, typer.Option("--png", help="Also draw what was measured to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was measured as JSON.")] = False,
) -> None:
    """Fit a bridge for every window from a start, in one pass over a text, and measure all of them on held-out text.

    Of the model's own answers the generated positions count. Of many texts a few say how far each map is shrunk
    towards a state that passes as it is. A map that is worse than none on held-out text is not written; exit code 3
    says that no map was.

    A fit that was cut off goes on where its saved state (OUT.part) ends.
    """
    from d3engine.model.bridges import BRIDGES_FILE

    directory = model_directory(model)
    target = beside_weights(model, directory, out, BRIDGES_FILE)
    for option, path in (("--out", target), ("--png", png)):
        check_output(option, path)
    check_plot("--png", png)
    reported, wanted = _windows(directory, starts or [], windows or [], policies or [], grid)
    is_one = asked.answers is None or asked.held_out is None
    require(is_one, "--held-out", asked.held_out, "absent beside --answers, which has its own")
    asked.check(fewest=CHOOSING_EVERY)

    from d3engine.research.bridges.fitting import Fit, measure_held_out, shrink

    engine, passage = open_passage(model, engine_options)
    size = engine.config.hidden_size
    require(rank is None or 1 <= rank < size, "--rank", rank, f"an integer from 1 to {size - 1}")
    seed = engine_options.get("seed", 0)
    readings, judge_on = asked.read(engine, seed)
    shrink_on = readings[-SHRINK_TEXTS:] if len(readings) >= ENOUGH_TO_SHRINK else []
    readings = readings[: len(readings) - len(shrink_on)]
    fit_on = [one.token_ids for one in readings]
    firsts = [one.prompt_length for one in readings] if asked.are_answers else None
    fit = Fit(passage, wanted)
    state = target.with_name(f"{target.name}.part")
    with counting("fit", "text", len(fit_on)) as advance:
        key = _key(directory, wanted, fit_on, firsts)
        fit.gather_all(fit_on, state, key, advance, firsts)
    found = fit.solve(rank)
    shares: dict[Window, float] = {}
    if shrink_on:
        measured = [one.bridge for one in found if one.bridge.window in reported]
        with counting("shrink", "text", len(shrink_on)) as advance:
            shares = shrink(passage, measured, shrink_on, advance)
        found = [replace(one, bridge=one.bridge.shrunk(shares.get(one.bridge.window, 1.0))) for one in found]
    about = {"source": asked.source, "seed": seed}
    shrunk = {f"{first}:{stop}": share for (first, stop), share in shares.items()}
    bridges = _bridges(engine, found, fit, fit_on, {**about, "shrunk": shrunk})
    with counting("held out", "text", len(judge_on)) as advance:
        result = measure_held_out(
            passage,
            [fitted.bridge for fitted in found if fitted.bridge.window in reported],
            judge_on,
            advance,
        )
    worse = [] if even_if_worse or not result.num_texts else result.worse_than_none()
    kept = {window: one for window, one in bridges.by_window.items() if window not in worse}
    bridges = replace(bridges, by_window=kept)
    with printing_last(partial(_show, result, found, target if bridges.by_window else None, as_json)):
        if worse:
            shown = ", ".join(f"[{first}, {stop})" for first, stop in worse)
            note(f"not written, since held-out text says that leaving the layers out costs no more: {shown}")
        if bridges.by_window:
            _write(bridges, result, bridge_dtype.value, target)
        state.unlink(missing_ok=True)
        if png is not None:
            from d3engine.research.bridges.nesting import plot_held_out

            plot_held_out(result, png, f"{Path(model).name}: windows skipped and bridged")
    if not bridges.by_window:
        raise typer.Exit(ExitCode.NO_SAFE_SETTING)


@app.command("inspect")
def inspect_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that d3engine bridge fit has written.")],
    as_json: AsJson = False,
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
        print_json({**whose, "bytes": bridges.num_bytes, "bridges": rows, "about": bridges.about})
        return
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


def _key(
    directory: Path, windows: Sequence[Window], texts: Sequence[Sequence[int]], firsts: Sequence[int] | None
) -> str:
    """By which a saved state is known to be of this very fit."""
    from d3engine.model.expected_tensors import fingerprint
    from d3engine.research.bridges.fitting import text_hash

    return json.dumps([fingerprint(directory), list(windows), text_hash(texts), firsts])


def _bridges(
    engine: Engine, found: Sequence[Fitted], fit: Any, texts: Sequence[Sequence[int]], about: dict[str, Any]
) -> Bridges:
    from d3engine.model.bridges import Bridges
    from d3engine.model.expected_tensors import fingerprint
    from d3engine.research.bridges.fitting import text_hash

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
    import torch

    from d3engine.model.bridges import DTYPES

    ready = replace(bridges, about={**bridges.about, "held_out": result.as_dict()})
    write_own_bridges(ready.to(DTYPES[dtype], torch.device("cpu")), target)
    note(f"{len(bridges.by_window)} bridges written to {target}")


def _show(result: HeldOut, found: Sequence[Fitted], target: Path | None, as_json: bool) -> None:
    if as_json:
        fits = [
            {"window": list(one.bridge.window), "ridge": one.ridge, "unexplained": one.unexplained} for one in found
        ]
        print_json({"out": target and str(target), "fits": fits, "held_out": result.as_dict()})
        return
    if result.num_texts == 0:
        note("no held-out text is long enough to be measured on")
        return
    print_tables([result.table()])
