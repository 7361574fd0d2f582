"""`d3engine bridge`: fit affine maps that stand in for windows of skipped layers, and look into a file of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from d3engine.cli.apps import new_app
from d3engine.cli.depth_options import number
from d3engine.cli.engine_options import Model, Options, engine_arguments, model_directory, takes_engine
from d3engine.cli.output_files import check_output, printing_last
from d3engine.cli.verbosity import note
from d3engine.depth.window import exact_fraction
from d3engine.errors import NOTHING, InvalidValueError, require, require_integer
from d3engine.files import beside
from d3engine.progress import hides_bars

if TYPE_CHECKING:
    from d3engine.bridges.fitting import Fitted
    from d3engine.bridges.held_out import HeldOut
    from d3engine.engine import Engine
    from d3engine.model.bridges import Bridges, Window

app = new_app(help="Fit affine maps that stand in for skipped layers, and inspect them.", no_args_is_help=True)


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
    text: Annotated[
        list[Path] | None,
        typer.Option(
            "--text",
            help='What to fit on; may be repeated: plain text, or .jsonl with "text", "messages", or "question" and '
            '"answer" on each line.',
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option("--task", help="Or the model's own answers to a task's questions, as d3engine calibrate has it."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder with gsm8k/ and bbh/ to read questions from.")
    ] = None,
    held_out: Annotated[
        Path | None, typer.Option("--held-out", help="What to measure on (every eighth of the texts to fit on).")
    ] = None,
    starts: Annotated[
        list[str] | None,
        typer.Option("--start", help="d3's start: all windows from there on; may be repeated (0.8)."),
    ] = None,
    windows: Annotated[
        list[str] | None,
        typer.Option("--window", metavar="A:B", help="Also the layers A to B - 1 alone; may be repeated."),
    ] = None,
    rank: Annotated[int | None, typer.Option("--rank", help="Rank of each map (full).")] = None,
    texts: Annotated[int, typer.Option("--texts", help="Texts to fit on at most.")] = 150,
    held_out_texts: Annotated[int, typer.Option("--held-out-texts", help="Texts to measure on at most.")] = 24,
    text_tokens: Annotated[int, typer.Option("--text-tokens", help="Tokens of a text at most.")] = 512,
    prompt_tokens: Annotated[
        int,
        typer.Option("--prompt-tokens", help="First tokens of a held-out text, which run every layer, as prompts do."),
    ] = 40,
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
    wanted = _windows(directory, starts or [], windows or [])
    _check_numbers(texts, held_out_texts, text_tokens, prompt_tokens)
    require((text is None or text == []) != (task is None), "--text", NOTHING, "given, or --task in its place")

    from d3engine.analysis.answers import open_model
    from d3engine.bridges.fitting import Fit
    from d3engine.bridges.held_out import measure_held_out

    engine, observer = open_model(model, engine_arguments(model, engine_options))
    size = engine.config.hidden_size
    require(rank is None or 1 <= rank < size, "--rank", rank, f"an integer from 1 to {size - 1}")
    seed = engine_options.get("seed", 0)
    fit_on, judge_on = _texts(engine, text or [], task, data, held_out, seed, text_tokens, texts, held_out_texts)
    about = {"source": task or [path.name for path in text or []], "seed": seed}
    fit = Fit(observer, wanted)
    state = target.with_name(f"{target.name}.part")
    with _bar("fit", "text", len(fit_on)) as bar:
        fit.gather_all(fit_on, state, _key(directory, wanted, fit_on), lambda: bar.update() and None)
    found = fit.solve(rank)
    bridges = _bridges(engine, found, fit, fit_on, about)
    with _bar("held out", "text", len(judge_on)) as bar:
        result = measure_held_out(
            observer, [fitted.bridge for fitted in found], judge_on, prompt_tokens, lambda: bar.update() and None
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
    about = {name: value for name, value in bridges.about.items() if name != "held_out"}
    typer.echo(", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in about.items()))


# -- what is fitted --------------------------------------------------------------------------------------------


def _target(model: str, directory: Path, out: Path | None) -> Path:
    from d3engine.loading.model_directory import DEMO
    from d3engine.model.bridges import BRIDGES_FILE

    bundled = "given as a file to write, since the bundled model's directory belongs to the package"
    require(out is not None or model != DEMO, "--out", NOTHING, bundled)
    return out if out is not None else beside(directory, BRIDGES_FILE)


def _windows(directory: Path, starts: Sequence[str], windows: Sequence[str]) -> list[Window]:
    from d3engine.bridges.fitting import windows_from
    from d3engine.model.config import ModelConfig

    layers = ModelConfig.from_directory(directory).num_layers
    firsts = []
    for start in starts or ([] if windows else ["0.8"]):
        exact = exact_fraction("--start", number(start))
        require(0 < exact < 1, "--start", start, "a number in (0, 1), as d3's")
        firsts.append(int(exact * layers))
    found = windows_from(firsts, layers)
    for window in windows:
        first, _, stop = window.partition(":")
        allowed = f"A:B with 0 <= A < B <= {layers}, the layers A to B - 1"
        require(
            first.isdecimal() and stop.isdecimal() and int(first) < int(stop) <= layers, "--window", window, allowed
        )
        found.append((int(first), int(stop)))
    return sorted(set(found))


def _check_numbers(texts: int, held_out_texts: int, text_tokens: int, prompt_tokens: int) -> None:
    from d3engine.bridges.fitting import CHOOSING_EVERY

    require_integer("--texts", texts, CHOOSING_EVERY)
    require_integer("--held-out-texts", held_out_texts, 1)
    require_integer("--prompt-tokens", prompt_tokens, 1)
    require_integer("--text-tokens", text_tokens, prompt_tokens + 2)


def _texts(
    engine: Engine,
    files: Sequence[Path],
    task: str | None,
    data: Path | None,
    held_out: Path | None,
    seed: int,
    text_tokens: int,
    count: int,
    held_out_count: int,
) -> tuple[list[list[int]], list[list[int]]]:
    """What is fitted on, and what is measured on: other texts, of a file of their own where there is one."""
    from d3engine.bridges.texts import TextReader, parted, shuffled

    reader = TextReader(engine.directory, engine.get_tokenizer(), text_tokens)
    if task is None:
        require(data is None, "--data", data, "absent without --task")
        texts = [text for path in files for text in reader.read(path, "--text")]
    else:
        texts = _own_answers(engine, task, data, seed, text_tokens, count + (0 if held_out else held_out_count))
    if held_out is not None:
        fit_on, judge_on = texts, reader.read(held_out, "--held-out")
    else:
        fit_on, judge_on = parted(texts)
    return shuffled(fit_on, count, seed), shuffled(judge_on, held_out_count, seed + 1)


def _own_answers(
    engine: Engine, task: str, data: Path | None, seed: int, text_tokens: int, count: int
) -> list[list[int]]:
    """Prompts of a task's validation split with the model's own greedy answers at full depth behind them."""
    from d3engine.analysis.answers import answer
    from d3engine.calibration.tasks import calibration_task

    asked = calibration_task(task, data, seed=seed, shots=None)
    prompts = [question.prompt for question in asked.load("validation", count)][:count]
    progress = sys.stderr.isatty() and not hides_bars()
    answers = answer(engine, prompts, min(asked.max_tokens, text_tokens), stop=asked.stop, progress=progress)
    return [(one.prompt_ids + one.token_ids)[-text_tokens:] for one in answers]


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


def _bar(name: str, unit: str, total: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc=name, unit=unit, disable=hides_bars(), leave=False)


def _write(bridges: Bridges, result: HeldOut, dtype: str, target: Path) -> None:
    from dataclasses import replace

    import torch

    from d3engine.model.bridges import DTYPES, write_bridges

    ready = replace(bridges, about={**bridges.about, "held_out": result.as_dict()})
    try:
        write_bridges(ready.to(DTYPES[dtype], torch.device("cpu")), target)
    except OSError as error:
        raise InvalidValueError("--out", str(target), f"a file that can be written ({error})") from error
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
