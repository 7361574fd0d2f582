"""`d3engine bridge tune`, `measure` and `nest`: bridges judged by what full depth says."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from d3engine.cli.bridge_texts import (
    OF_HELD_OUT,
    BridgesFile,
    TextOptions,
    bridges_of,
    bridges_path,
    open_passage,
    policy_of,
    read_own_bridges,
    schedule_of,
    takes_texts,
    write_own_bridges,
)
from d3engine.cli.commands import AsJson, check_output, note, printing_last, show_report
from d3engine.cli.engine_options import Model, Options, takes_engine
from d3engine.errors import NOTHING, require, require_integer, require_number
from d3engine.utils.progress import counting, progress_bar

if TYPE_CHECKING:
    from d3engine.engine.engine import Engine
    from d3engine.model.bridges import Bridge, Window
    from d3engine.research.bridges.decoded import Comparison
    from d3engine.research.bridges.judging import Reading
    from d3engine.research.bridges.nesting import Order
    from d3engine.research.bridges.own_answers import OwnComparison


@takes_texts(
    "Texts to tune on at most; their states are kept.", "out", ["answers"], texts=48, text_tokens=256, held_out_texts=8
)
@takes_engine
def tune_command(
    engine_options: Options,
    policy: Annotated[
        str, typer.Option("--depth", help='Whose bridges to tune, with its options: "d3 alpha=A start=S".')
    ],
    model: Model = "demo",
    bridges: BridgesFile = None,
    *,
    asked: TextOptions,
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
    out: Annotated[Path | None, typer.Option("--out", help="The file to write (the same file).")] = None,
    as_json: AsJson = False,
) -> None:
    """Tune the bridges that a policy crosses, all at work as in decoding; the model stays as it is.

    They are written only if held-out text says that they are better (its KL divergence from full depth falls). A run
    that was cut off goes on where its saved state (OUT.part) ends.
    """
    path = bridges_path(model, bridges)
    target = out or path
    check_output("--out", target)
    asked.check()
    require_integer("--steps", steps, 1)
    require_integer("--rows", rows, 1)
    require_number("--rate", rate, 0, 1, open_low=True)

    from d3engine.research.bridges.decoded import Candidate, measure_decoded
    from d3engine.research.bridges.fitting import text_hash
    from d3engine.research.bridges.judging import FullText, first_layers, long_enough
    from d3engine.research.bridges.tuning import Tuning, TuningOptions

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
    full = [FullText(passage, one, layers) for one in progress_bar("texts", "text", None, iterable=tune_on)]
    state = target.with_name(f"{target.name}.part")
    texts = text_hash([one.token_ids for one in tune_on])
    key = json.dumps([own.fingerprint, policy, asdict(options), texts, _hash(before)])
    with progress_bar("tune", "step", steps) as bar:

        def advance(loss: float) -> None:
            bar.update()
            if loss == loss:
                bar.set_postfix(kl=f"{loss:.3f}", refresh=False)

        tuning.run(full, state, key, advance)
    begun = Candidate("skipped" if from_nothing else "fitted", schedule, before)
    with counting("held out", "text", len(judge_on)) as progress:
        result = measure_decoded(passage, [begun, Candidate("tuned", schedule, tuning.bridges)], judge_on, progress)
    pays = result.policies[1].mean("kl").value < result.policies[0].mean("kl").value
    with printing_last(partial(_show_tuned, result, pays, target, as_json)):
        if pays:
            told = {"policy": policy, **asdict(options), "source": asked.source, "texts": len(tune_on)}
            earlier = own.about.get("tuned", [])
            about = {**own.about, "tuned": [*earlier, {**told, "text_hash": texts}]}
            write_own_bridges(replace(own, by_window={**own.by_window, **tuning.bridges}, about=about), target)
        state.unlink(missing_ok=True)


def _hash(bridges: Mapping[Window, Bridge]) -> str:
    """By which the bridges that a run began with are known again."""
    from hashlib import sha256

    digest = sha256()
    for window, bridge in sorted(bridges.items()):
        digest.update(repr(window).encode())
        for tensor in (bridge.weight, bridge.offset, bridge.down):
            digest.update(b"" if tensor is None else tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _show_tuned(result: Comparison, pays: bool, target: Path, as_json: bool) -> None:
    written = str(target) if pays else None
    show_report(
        lambda: {"out": written, "held_out": result.as_dict()}, lambda: (result.table(), result.step_table()), as_json
    )
    if not as_json:
        note(f"tuned bridges written to {target}" if pays else "nothing was written: held-out text is no better for it")


@takes_texts("Texts to measure on at most.", "as_json", OF_HELD_OUT, texts=8, text_tokens=256)
@takes_engine
def measure_command(
    engine_options: Options,
    model: Model = "demo",
    bridges: BridgesFile = None,
    policies: Annotated[
        list[str] | None,
        typer.Option("--depth", help='A policy with its options, "d3 alpha=A start=S"; may be repeated.'),
    ] = None,
    *,
    asked: TextOptions,
    as_json: AsJson = False,
) -> None:
    """Read texts at the depths that each policy has for them, and compare every next-token distribution with full
    depth's, by generation step. Each policy stands there twice: its windows skipped as they are, and bridged.

    With --prompts, or --task chat, each policy also answers by itself, and what it keeps of full depth's answers is
    counted.
    """
    asked.check()
    require(bool(policies), "--depth", NOTHING, "given at least once")

    from d3engine.research.bridges.decoded import Candidate, measure_decoded

    engine, passage = open_passage(model, engine_options)
    path = bridges_path(model, bridges)
    own = read_own_bridges(engine, path, passage.device)
    candidates = []
    for policy in policies or ():
        schedule = schedule_of(policy, engine.config.num_layers)
        candidates.append(Candidate(policy, schedule, None))
        candidates.append(Candidate(f"{policy}, bridged", schedule, bridges_of(schedule, own, path)))
    read = asked.read_one_kind(engine, engine_options.get("seed", 0))
    with counting("measure", "text", len(read)) as advance:
        result = measure_decoded(passage, candidates, read, advance)
    require(result.policies[0].positions > 0, "--text", asked.source, "texts longer than their prompts by two tokens")
    answers = _answered(engine, policies or [], path, read) if asked.are_chats else None
    told = {} if answers is None else {"own_answers": answers}
    show_report(
        lambda: result.as_dict() | {name: one.as_dict() for name, one in told.items()},
        lambda: [result.table(), result.step_table(), *(one.table() for one in told.values())],
        as_json,
    )


def _answered(engine: Engine, policies: Sequence[str], bridges: Path, readings: Sequence[Reading]) -> OwnComparison:
    """What each policy answers itself to the prompts of full depth's answers, skipped and bridged."""
    from d3engine.research.bridges.own_answers import OwnAnswers, OwnComparison, own_answers

    kept = [one for one in readings if len(one.token_ids) > one.prompt_length]
    both = []
    for words in policies:
        both.append((words, policy_of(words)))
        both.append((f"{words}, bridged", policy_of(words, f"bridges={bridges}")))
    asked = progress_bar("answers", "policy", None, iterable=both)
    found = [OwnAnswers(name, own_answers(engine, policy, kept)) for name, policy in asked]
    return OwnComparison(OwnAnswers("full", [one.token_ids[one.prompt_length :] for one in kept]), found)


@takes_texts("Texts to choose by at most.", "out", OF_HELD_OUT, texts=8, text_tokens=256)
@takes_engine
def nest_command(
    engine_options: Options,
    model: Model = "demo",
    bridges: BridgesFile = None,
    *,
    asked: TextOptions,
    width: Annotated[int, typer.Option("--width", help="Layers of each window, as --grid of d3engine bridge fit.")] = 3,
    count: Annotated[int, typer.Option("--count", help="Windows to choose at most.")] = 3,
    out: Annotated[Path | None, typer.Option("--out", help="The file to write (the same file).")] = None,
    as_json: AsJson = False,
) -> None:
    """Choose windows one after the other, each the one that costs least beside those before it, all of them bridged.

    The order is written into the file of bridges, and is what nested's windows take.
    """
    path = bridges_path(model, bridges)
    target = out or path
    check_output("--out", target)
    asked.check()
    require_integer("--width", width, 1)
    require_integer("--count", count, 1)

    from d3engine.research.bridges.judging import FullText, long_enough
    from d3engine.research.bridges.nesting import choose_order, grid_of

    engine, passage = open_passage(model, engine_options)
    found = read_own_bridges(engine, path, passage.device)
    candidates = grid_of(found.by_window, width)
    require(len(candidates) > 0, "--width", width, "that of --grid when the bridges were fitted")
    chosen = long_enough(asked.read_one_kind(engine, engine_options.get("seed", 0)))
    full = [FullText(passage, one, {first for first, _ in candidates}) for one in chosen]
    attempts = sum(range(max(len(candidates) - count, 0) + 1, len(candidates) + 1))
    with counting("windows", "attempt", attempts) as advance:
        order = choose_order(full, found.by_window, candidates, count, advance)
    with printing_last(partial(_show_order, order, as_json)):
        write_own_bridges(replace(found, about={**found.about, "nested": order.as_dict()}), target)


def _show_order(order: Order, as_json: bool) -> None:
    show_report(order.as_dict, lambda: [order.table()], as_json)
    if not as_json:
        typer.echo(f'--depth "nested alpha=... windows={windows_in_words(order.as_dict()["windows"])}"')


def windows_in_words(windows: list[list[int]]) -> str:
    """ "6:9,12:15", as nested takes them."""
    return ",".join(f"{first}:{stop}" for first, stop in windows)
