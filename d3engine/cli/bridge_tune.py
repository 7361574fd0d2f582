"""`d3engine bridge tune`: steps on the bridges' own numbers towards full depth's distribution, kept if they pay."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from d3engine.cli.bridge_texts import (
    ANSWER_TOKENS,
    BridgesFile,
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
    bridges_of,
    bridges_path,
    open_passage,
    progress_bar,
    read_own_bridges,
    schedule_of,
    write_own_bridges,
)
from d3engine.cli.engine_options import Model, Options, takes_engine
from d3engine.cli.output_files import check_output, printing_last
from d3engine.cli.verbosity import note
from d3engine.errors import require, require_integer, require_number

if TYPE_CHECKING:
    from d3engine.bridges.decoded import Comparison
    from d3engine.bridges.judging import Reading
    from d3engine.model.bridges import Bridge, Bridges, Window


@takes_engine
def tune_command(
    engine_options: Options,
    policy: Annotated[
        str, typer.Option("--depth", help='Whose bridges to tune, with its options: "d3 alpha=A start=S".')
    ],
    model: Model = "demo",
    bridges: BridgesFile = None,
    text: Text = None,
    task: Task = None,
    prompts: Prompts = None,
    data: Data = None,
    held_out: HeldOutFile = None,
    from_nothing: Annotated[
        bool,
        typer.Option(
            "--from-nothing",
            help="Begin with maps that change nothing, and not with those of the file: for a model that was trained to "
            "have these layers skipped.",
        ),
    ] = False,
    steps: Annotated[int, typer.Option("--steps", help="Steps, each on one text.")] = 300,
    rows: Annotated[int, typer.Option("--rows", help="Positions of a text that a step looks at.")] = 128,
    rate: Annotated[float, typer.Option("--rate", help="Adam's rate at first; it falls to 0 in a line.")] = 3e-4,
    texts: Annotated[int, typer.Option("--texts", help="Texts to tune on at most; their states are kept.")] = 48,
    held_out_texts: HeldOutTexts = 8,
    text_tokens: TextTokens = 256,
    prompt_tokens: PromptTokens = None,
    max_tokens: MaxTokens = ANSWER_TOKENS,
    out: Annotated[Path | None, typer.Option("--out", help="The file to write (the same file).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tune the bridges that a policy crosses, all at work as in decoding; the model stays as it is.

    They are written only if held-out text says that they are better (its KL divergence from full depth falls). A run
    that was cut off goes on where its saved state (OUT.part) ends.
    """
    path = bridges_path(model, bridges)
    target = out or path
    check_output("--out", target)
    asked = TextOptions(
        text or [], task, prompts, data, texts, text_tokens, prompt_tokens, max_tokens, held_out, held_out_texts
    )
    asked.check()
    require_integer("--steps", steps, 1)
    require_integer("--rows", rows, 1)
    require_number("--rate", rate, 0, 1, open_low=True)

    from d3engine.bridges.judging import FullText, first_layers, long_enough
    from d3engine.bridges.tuning import Tuning, TuningOptions

    engine, passage = open_passage(model, engine_options)
    own = read_own_bridges(engine, path, passage.device)
    schedule = schedule_of(policy, engine.config.num_layers)
    before = bridges_of(schedule, own, path)
    if from_nothing:
        before = {window: bridge.of_nothing() for window, bridge in before.items()}
    seed = engine_options.get("seed", 0)
    options = TuningOptions(steps, rows, rate, seed)
    tune_on, judge_on = (long_enough(read) for read in asked.read(engine, seed))
    for option, kept in (("--text", tune_on), ("--held-out", judge_on)):
        require(len(kept) > 0, option, asked.source, "texts longer than their prompts by two tokens")
    tuning = Tuning(before, schedule, options)
    layers = first_layers([schedule])
    with progress_bar("texts", "text", len(tune_on)) as bar:
        full = []
        for one in tune_on:
            full.append(FullText(passage, one, layers))
            bar.update()
    state = target.with_name(f"{target.name}.part")
    key = json.dumps([own.fingerprint, policy, asdict(options), _text_hash(tune_on), _hash(before)])
    with progress_bar("tune", "step", steps) as bar:
        tuning.run(full, state, key, lambda loss: _advance(bar, loss))
    result = _compared(passage, schedule, before, tuning.bridges, judge_on, "skipped" if from_nothing else "fitted")
    pays = result.policies[1].mean("kl").value < result.policies[0].mean("kl").value
    with printing_last(partial(_show, result, pays, target, as_json)):
        if pays:
            told = {"policy": policy, **asdict(options), "source": asked.source, "texts": len(tune_on)}
            _write(own, tuning.bridges, {**told, "text_hash": _text_hash(tune_on)}, target)
        state.unlink(missing_ok=True)


def _advance(bar: Any, loss: float) -> None:
    bar.update()
    if loss == loss:
        bar.set_postfix(kl=f"{loss:.3f}", refresh=False)


def _text_hash(readings: Sequence[Reading]) -> str:
    from d3engine.bridges.fitting import text_hash

    return text_hash([one.token_ids for one in readings])


def _hash(bridges: Mapping[Window, Bridge]) -> str:
    """By which the bridges that a run began with are known again."""
    from hashlib import sha256

    digest = sha256()
    for window, bridge in sorted(bridges.items()):
        digest.update(repr(window).encode())
        for tensor in (bridge.weight, bridge.offset, bridge.down):
            digest.update(b"" if tensor is None else tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _compared(
    passage: Any,
    schedule: Any,
    before: Mapping[Window, Bridge],
    after: Mapping[Window, Bridge],
    texts: list[Any],
    name: str,
) -> Comparison:
    from d3engine.bridges.decoded import Candidate, measure_decoded

    candidates = [Candidate(name, schedule, before), Candidate("tuned", schedule, after)]
    with progress_bar("held out", "text", len(texts)) as bar:
        return measure_decoded(passage, candidates, texts, lambda: bar.update() and None)


def _write(own: Bridges, tuned: Mapping[Window, Bridge], told: dict[str, Any], target: Path) -> None:
    about = {**own.about, "tuned": [*own.about.get("tuned", []), told]}
    write_own_bridges(replace(own, by_window={**own.by_window, **tuned}, about=about), target)


def _show(result: Comparison, pays: bool, target: Path, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"out": str(target) if pays else None, "held_out": result.as_dict()}, indent=2))
        return
    from d3engine.cli.terminal import print_table

    for table in (result.table(), result.step_table()):
        print_table(table.title, table.header, table.rows)
    note(f"tuned bridges written to {target}" if pays else "nothing was written: held-out text is no better for it")
