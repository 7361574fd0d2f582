"""`d3engine depth`: students of a model, distilled from its own answers, and what policies lose on such answers."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from d3engine.cli.bridge_texts import policy_of
from d3engine.cli.commands import (
    AsJson,
    check_output,
    new_app,
    note,
    print_json,
    print_table,
    printing_last,
    show_report,
    showing_what_is_done,
    write_output,
    writing,
)
from d3engine.cli.depth_options import window_of
from d3engine.cli.engine_options import (
    AUTO,
    Model,
    Options,
    beside_weights,
    engine_arguments,
    model_directory,
    takes_engine,
    use_threads,
)
from d3engine.errors import NOTHING, InvalidValueError, integer_in, require, require_integer, require_number
from d3engine.utils.files import sha256_of
from d3engine.utils.progress import counting, progress_bar

if TYPE_CHECKING:
    from d3engine.research.bridges.own_answers import OwnComparison
    from d3engine.research.distillation.corpus import OwnAnswer
    from d3engine.research.distillation.passes import AnswerPass
    from d3engine.research.distillation.training import Distillation, Estimate, Shape

app = new_app(help="Distil students for generated tokens, and judge policies on own answers.", no_args_is_help=True)

Answers: TypeAlias = Annotated[
    list[Path],
    typer.Option(
        "--answers",
        help="A file of d3engine depth answers, made by these weights; may be repeated, the first is judged on.",
    ),
]
Threads: TypeAlias = Annotated[str, typer.Option("--threads", help="CPU threads: a number, or auto.")]
Dtype: TypeAlias = Annotated[
    str, typer.Option("--dtype", help="What passes compute in: bfloat16, float32, or auto, by the size of the model.")
]
AnswerTokens: TypeAlias = Annotated[int, typer.Option("--answer-tokens", help="Tokens of an answer that are read.")]
HeldOut: TypeAlias = Annotated[int, typer.Option("--held-out-texts", help="Held-out answers to judge on at most.")]

KINDS = "instructions,code,arithmetic"
RATE, GENTLE_RATE = 3e-4, 3e-5
"""Of a block that begins anew, or of maps; and of whole refitted matrices. A tenth of the first took Coder-0.5B's
refitted ones from 92.3 to 90.8 % the same token in 160 steps, a tenth of the second from 95.4 to 95.5 % in 107."""

WIDE = 512
"""Numbers of a hidden state from which passes compute in bfloat16."""

WINDOW_TEXTS = 16
"""Answers on which each window is measured, at most, where --window has a number of layers."""


@app.command("answers")
@takes_engine
def answers_command(
    engine_options: Options,
    out: Annotated[Path, typer.Option("--out", help="The .jsonl file to write, or to add to.")],
    model: Model = "demo",
    texts: Annotated[int, typer.Option("--texts", help="Answers to train on.")] = 2000,
    held_out_texts: Annotated[
        int, typer.Option("--held-out-texts", help="Answers to other prompts, to judge on.")
    ] = 64,
    kinds: Annotated[
        str | None,
        typer.Option(
            "--kinds",
            help="Kinds of prompts, with commas: instructions, code, arithmetic; library, functions as Python's own "
            f"documents them; chat, which the model makes up; gsm8k, training questions of --data.  [default: {KINDS}]",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts", metavar="FILE", help="Or your own: a line each, or a .json list, asked by the chat template."
        ),
    ] = None,
    prompts_of: Annotated[
        Path | None, typer.Option("--prompts-of", metavar="FILE", help="Or the prompts of these answers, in order.")
    ] = None,
    depth: Annotated[
        str | None,
        typer.Option(
            "--depth", help='Answer at this depth, "distilled student=FILE", to train a student on its own answers.'
        ),
    ] = None,
    data: Annotated[Path | None, typer.Option("--data", help="Folder with gsm8k/.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens of an answer at most.")] = 256,
    as_json: AsJson = False,
) -> None:
    """Write a model's own greedy answers, which students are trained and judged on.

    A run that was cut off goes on, and a larger --texts adds to the file. Held-out prompts are decided by their text.
    """
    check_output("--out", out)
    require_integer("--texts", texts, 1)
    require_integer("--held-out-texts", held_out_texts, 1)
    require_integer("--max-tokens", max_tokens, 3)
    from d3engine.research.distillation.corpus import (
        ALL_KINDS,
        GSM8K,
        add_answers,
        asked_again,
        asked_of,
        prompts_of_file,
        prompts_of_kinds,
        read_parts,
    )

    names = [name.strip() for name in (KINDS if kinds is None else kinds).split(",") if name.strip()]
    known = names and all(name in ALL_KINDS for name in names) and len(set(names)) == len(names)
    require(bool(known), "--kinds", kinds, f"different ones of {', '.join(ALL_KINDS)}")
    require(GSM8K not in names or data is not None, "--data", NOTHING, "given for the kind gsm8k")
    require(depth is None or prompts_of is not None, "--prompts-of", NOTHING, "given beside --depth")
    sources = {"--kinds": kinds, "--prompts": prompts, "--prompts-of": prompts_of}
    given = {option: str(value) for option, value in sources.items() if value is not None}
    for option in list(given)[1:]:
        raise InvalidValueError(option, given[option], f"left out beside {next(iter(given))}")

    of_file = None if prompts is None else prompts_of_file(prompts, held_out_texts, texts)

    import random

    from d3engine.depth import FullDepth
    from d3engine.engine.engine import Engine
    from d3engine.model.expected_tensors import fingerprint
    from d3engine.research.evaluation.baselines import bridge_hashes, open_bridges

    seed = engine_options.get("seed", 0)
    begun = time.monotonic()
    policy = None if depth is None else policy_of(depth)
    with Engine(model, depth=FullDepth(), **engine_arguments(model, engine_options)) as engine:
        name = fingerprint(engine.directory)
        if prompts_of is None:
            parts = of_file or [
                prompts_of_kinds(engine, names, count, seed, data, held_out=part)
                for count, part in ((held_out_texts, True), (texts, False))
            ]
            held_out, own = ([asked_of(engine, kind, prompt) for kind, prompt in part] for part in parts)
            random.Random(seed).shuffle(own)  # so that a file that is not finished has all kinds
        else:
            at = [depth or "full"]
            if policy is not None:  # a student trained further has other answers
                open_bridges(engine, [policy])
                at += bridge_hashes(engine, [policy]).values()
            own, held_out = ([asked_again(one, " ".join(at)) for one in part] for part in read_parts(prompts_of, name))
            own, held_out = own[:texts], held_out[:held_out_texts]
        for option, wanted, part in (("--held-out-texts", held_out_texts, held_out), ("--texts", texts, own)):
            if len(part) < wanted:
                note(f"note: there are prompts for {len(part)} of {wanted} answers ({option})")
        asked = held_out + own
        with counting("answers", "text", len(asked)) as advance:
            tokens = add_answers(engine, out, name, asked, max_tokens, policy, advance)
    found = {"out": str(out), "texts": len(asked), "tokens": tokens, "seconds": round(time.monotonic() - begun, 1)}
    typer.echo(json.dumps(found, indent=2) if as_json else f"{len(asked)} answers, {tokens:,} tokens in {out}")


@app.command("train")
def train_command(
    answers: Answers,
    model: Model = "demo",
    window: Annotated[
        str | None,
        typer.Option(
            "--window",
            metavar="A:B",
            help="The layers A to B - 1 make way for one trained layer; or N: those N layers without which the "
            "answers suffer least, as measured.",
        ),
    ] = None,
    keep: Annotated[
        str,
        typer.Option("--keep", help="The layer of the window that is trained in its place, several with commas; auto."),
    ] = AUTO,
    width: Annotated[
        float | None, typer.Option("--width", help="The part of each MLP's neurons that stays, such as 0.8.")
    ] = None,
    narrowed: Annotated[
        str | None, typer.Option("--narrowed", metavar="A:B", help="The layers that --width narrows (all).")
    ] = None,
    begin: Annotated[
        Path | None,
        typer.Option("--begin", metavar="FILE", help="Or a student to train further, such as on more answers."),
    ] = None,
    refit_texts: Annotated[int, typer.Option("--refit-texts", help="Answers that order and refit neurons.")] = 256,
    hidden_steps: Annotated[
        int, typer.Option("--hidden-steps", help="Steps by the hidden state behind the window, which are quick.")
    ] = 0,
    steps: Annotated[int, typer.Option("--steps", help="Steps by the KL divergence from full depth.")] = 0,
    minutes: Annotated[float | None, typer.Option("--minutes", help="Minutes of training at most.")] = None,
    texts: Annotated[int, typer.Option("--texts", help="Answers of a step.")] = 4,
    rows: Annotated[int, typer.Option("--rows", help="Positions of an answer that get logits.")] = 64,
    rank: Annotated[
        int | None, typer.Option("--rank", help="Train maps of this rank, added to each matrix, not whole matrices.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate",
            help="Adam's rate of the hidden steps; others have a tenth. As it stands 3e-4, and 3e-5 where whole "
            "matrices of narrowed layers are trained, to which more did harm.",
        ),
    ] = None,
    judge_every: Annotated[
        int, typer.Option("--judge-every", help="Steps from one point of the curve to the next.")
    ] = 100,
    answer_tokens: AnswerTokens = 192,
    held_out_texts: HeldOut = 32,
    curve_texts: Annotated[int, typer.Option("--curve-texts", help="Of them, those of the learning curve.")] = 8,
    seed: Annotated[int, typer.Option("--seed", help="Of the order of texts and positions.")] = 0,
    threads: Threads = AUTO,
    dtype: Dtype = AUTO,
    out: Annotated[
        Path | None, typer.Option("--out", help="The file to write (student.safetensors beside the weights).")
    ] = None,
    report: Annotated[Path | None, typer.Option("--report", help="Also write what was measured to this JSON.")] = None,
    as_json: AsJson = False,
) -> None:
    """Distil a student: other weights for generated tokens, trained towards full depth on the model's own answers.

    --window A:B puts one trained layer in the place of several, --width narrows MLPs in closed form; both may be given,
    and trained on. Memory and time are said first. A run that was cut off, or ended by --minutes, goes on where its
    saved state (OUT.begin, OUT.part) ends. d3engine calibrate --check "distilled ..." certifies what comes out, or does
    not.
    """
    from d3engine.model.students import STUDENT_FILE, read_student, write_student

    directory = model_directory(model)
    target = beside_weights(model, directory, out, STUDENT_FILE)
    check_output("--out", target)
    check_output("--report", report)
    if minutes is not None:
        require_number("--minutes", minutes, 0, 1e6, open_low=True)
    if rate is not None:
        require_number("--rate", rate, 0, 1, open_low=True)
    if rank is not None:
        require_integer("--rank", rank, 1)
    for flag, value, least in (("--hidden-steps", hidden_steps, 0), ("--steps", steps, 0), ("--texts", texts, 1)):
        require_integer(flag, value, least)
    for flag, value in (
        ("--rows", rows),
        ("--judge-every", judge_every),
        ("--refit-texts", refit_texts),
        ("--answer-tokens", answer_tokens),
        ("--curve-texts", curve_texts),
    ):
        require_integer(flag, value, 1)
    if begin is not None:
        for flag, given in (("--window", window), ("--width", width)):
            require(given is None, flag, given, "absent beside --begin, whose layers are trained further")
    else:
        require(window is not None or width is not None, "--window", NOTHING, "given, or --width, or both")
    require(width is not None or narrowed is None, "--narrowed", narrowed, "absent without --width")
    if width is not None:
        require_number("--width", width, 0, 1, open_low=True)

    from d3engine.research.bridges.fitting import text_hash
    from d3engine.research.distillation.training import Distillation, TrainingOptions, kept_shape, run_key, shape_of

    run, fingerprint = _open(directory, threads, dtype)
    own, held_out = _read(answers, fingerprint, held_out_texts)
    beginning = target.with_name(f"{target.name}.begin")
    if begin is None:
        texts_seen = text_hash([one.token_ids for one in own[:refit_texts]])
        begun = json.dumps([fingerprint, dtype, window, keep, width, narrowed, texts_seen])
        refit, part = own[:refit_texts], (beginning, f"{begun} refitting")
        shape = kept_shape(beginning, begun, lambda: _shape(run, window, keep, width, narrowed, refit, part))
    else:
        begun = sha256_of(begin, sys.maxsize)
        student = read_student(begin, run.config)
        require(student.fingerprint == fingerprint, "--begin", str(begin), "a student of these weights")
        shape = shape_of(student)
    if rate is None:
        rate = RATE if shape.skip_layers or rank is not None else GENTLE_RATE
    options = TrainingOptions(hidden_steps, steps, texts, rows, rate, seed, judge_every, answer_tokens, rank)
    training = Distillation(run, shape, options)
    _tell(training, own, held_out[:curve_texts])
    state = target.with_name(f"{target.name}.part")
    key = run_key(fingerprint, begun, shape, options, own)
    until = math.inf if minutes is None else time.monotonic() + 60 * minutes
    with progress_bar("train", "step", options.all_steps) as bar:

        def advance(taken: int, words: str) -> None:
            bar.set_postfix_str(words, refresh=False)
            bar.update(taken)
            curve = training.curve
            if bar.disable and words and curve.points[-1]["step"] == curve.num_steps:  # a log has no bar
                left = _in_words(curve.seconds / curve.num_steps * (options.all_steps - curve.num_steps))
                note(f"step {curve.num_steps} of {options.all_steps}: {words}; {left} left")

        training.train(own, held_out[:curve_texts], state, key, advance, until)
    with counting("held out", "text", len(held_out)) as count:
        student, told = training.judged(held_out, fingerprint, count)
    first, last = (f"{training.curve.points[place]['kl']:.3f}" for place in (0, -1))
    if float(last) > float(first):
        note(f"note: held out the student is worse than it began (KL {first}, then {last}): try a lower --rate")
    finished = training.curve.num_steps == options.all_steps
    found = {**told, "out": str(target), "options": vars(options), "finished": finished}
    with printing_last(partial(_show_trained, found, as_json)):
        with writing("--out", target):
            write_student(student, target)
        if report is not None:
            write_output("--report", report, json.dumps(found, indent=2) + "\n")
        if finished:
            state.unlink(missing_ok=True)
            beginning.unlink(missing_ok=True)
        skip = f" skip-layers={','.join(map(str, shape.skip_layers))}" if shape.skip_layers else ""
        note(f'student written to {target}: --depth "distilled{skip} student={target}"')


@app.command("measure")
def measure_command(
    answers: Answers,
    model: Model = "demo",
    policies: Annotated[
        list[str] | None,
        typer.Option("--depth", help='A policy with its options, "fixed skip-layers=5"; may be repeated.'),
    ] = None,
    alone: Annotated[
        list[int] | None,
        typer.Option("--windows", metavar="WIDTH", help="Also every window of WIDTH layers alone; may be repeated."),
    ] = None,
    answered: Annotated[
        list[Path] | None,
        typer.Option(
            "--answered",
            metavar="FILE",
            help="Also what depth answers --prompts-of ANSWERS --depth POLICY has written: what a policy answers "
            "itself; may be repeated.",
        ),
    ] = None,
    answer_tokens: AnswerTokens = 128,
    held_out_texts: HeldOut = 32,
    threads: Threads = AUTO,
    dtype: Dtype = AUTO,
    report: Annotated[Path | None, typer.Option("--report", help="Also write what was measured to this JSON.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what policies, bridges and students lose against full depth where a token was generated.

    On the held-out answers, all of which are read as they stand: KL divergence and the same likeliest token, with 95 %
    intervals over texts, by kind of text. Ctrl-C or SIGTERM shows the texts that are done.
    """
    check_output("--report", report)
    require_integer("--answer-tokens", answer_tokens, 1)
    directory = model_directory(model)
    run, fingerprint = _open(directory, threads, dtype)
    layers = run.config.num_layers

    from d3engine.research.bridges.judging import window_schedule
    from d3engine.research.distillation.judging import Judgeable, agreement_table, judge, judgeable_of, position_table

    wanted = [judgeable_of(run, directory, words, policy_of(words), fingerprint) for words in policies or []]
    for size in alone or []:
        require_integer("--windows", size, 1, layers - 1)
        windows = [(first, first + size) for first in range(layers - size + 1)]
        wanted += [Judgeable(f"[{first}, {stop})", window_schedule([(first, stop)], layers)) for first, stop in windows]
    require(len(wanted) > 0, "--depth", NOTHING, "given, or --windows")
    _, held_out = _read(answers, fingerprint, held_out_texts)
    own = None if answered is None else _own_answers(answered, fingerprint, held_out)
    with showing_what_is_done() as gather:
        with counting("held out", "text", len(held_out)) as advance:
            found = judge(run, held_out, wanted, answer_tokens, advance, gather)
        tables = [agreement_table(wanted, found, run.config, answer_tokens), position_table(wanted, found)]
        tables += [] if own is None else [own.table()]
        described: dict[str, Any] = {
            "model": Path(model).name,
            "texts": len(found[0].texts),
            "policies": [
                {"policy": one.name, "layers_saved": one.saved(run.config, answer_tokens), **agreement.as_dict()}
                | {"by_position": agreement.by_position()}
                for one, agreement in zip(wanted, found, strict=True)
            ],
            **({} if own is None else {"own_answers": own.as_dict()}),
        }
        with printing_last(partial(show_report, lambda: described, lambda: tables, as_json)):
            if report is not None:
                write_output("--report", report, json.dumps(described, indent=2) + "\n")


@app.command("inspect")
def inspect_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that d3engine depth train has written.")],
    model: Annotated[str, typer.Option("--model", help="The model that it is for.")] = "demo",
    as_json: AsJson = False,
) -> None:
    """Show what a student leaves out, what its own layers are, and how it did on held-out answers."""
    from d3engine.model.config import ModelConfig
    from d3engine.model.students import read_student

    config = ModelConfig.from_directory(model_directory(model))
    student = read_student(file, config)
    of_layers = sorted(student.layers.items())
    layers = {number: {name: list(t.shape) for name, t in own.items()} for number, own in of_layers}
    width = student.width(config)
    if as_json:
        found = {"skip_layers": list(student.skip_layers), "layers": layers, "bytes": student.num_bytes, "width": width}
        print_json({"fingerprint": student.fingerprint, **found, "about": student.about})
        return
    rows = [
        (f"{number}", ", ".join(f"{name} {shape}" for name, shape in own.items())) for number, own in layers.items()
    ]
    title = f"Student of {student.num_layers} layers, {student.num_bytes / 2**20:.1f} MiB, {student.fingerprint}"
    print_table(title, ("layer", "its own"), rows)
    typer.echo(f"skipped: {', '.join(map(str, student.skip_layers)) or 'no layer'}; width {width:.3f}")
    for kind, one in student.about.get("held_out", {}).items():
        typer.echo(f"{kind}: {one['agreement']:.1%} the same token, KL {one['kl']:.4f}, {one['positions']:,} positions")


# -- what is opened ------------------------------------------------------------------------------------------------


def _open(directory: Path, threads: str, dtype: str) -> tuple[AnswerPass, str]:
    """The model as passes run it, and its fingerprint."""
    import torch

    from d3engine.model.config import ModelConfig
    from d3engine.model.expected_tensors import fingerprint
    from d3engine.model.weights import load_weights
    from d3engine.research.distillation.passes import AnswerPass

    kinds = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    require(dtype in (AUTO, *kinds), "--dtype", dtype, f"one of {', '.join((AUTO, *kinds))}")
    config = ModelConfig.from_directory(directory)
    use_threads(threads, config)
    kind = kinds.get(dtype, torch.bfloat16 if config.hidden_size >= WIDE else torch.float32)
    weights = load_weights(directory, config, dtype=kind, device="cpu")
    return AnswerPass(config, weights), fingerprint(directory)


def _read(answers: Sequence[Path], fingerprint: str, held_out_texts: int) -> tuple[list[OwnAnswer], list[OwnAnswer]]:
    """What to train on, of all files, and what the first holds out: as many of each kind."""
    from d3engine.research.distillation.corpus import in_turns, read_parts

    require_integer("--held-out-texts", held_out_texts, 1)
    parts = [read_parts(path, fingerprint) for path in answers]
    return [one for own, _ in parts for one in own], in_turns(parts[0][1])[:held_out_texts]


def _own_answers(paths: Sequence[Path], fingerprint: str, held_out: Sequence[OwnAnswer]) -> OwnComparison:
    """What the policies of these files answer to the held-out prompts that all of them have."""
    from d3engine.research.bridges.own_answers import OwnAnswers, OwnComparison
    from d3engine.research.distillation.corpus import read_corpus

    found = {path: {tuple(one.prompt_ids): one.token_ids for one in read_corpus(path, fingerprint)} for path in paths}
    asked = [one for one in held_out if all(tuple(one.prompt_ids) in by_prompt for by_prompt in found.values())]
    require(len(asked) > 0, "--answered", [str(path) for path in paths], "files with answers to held-out prompts")
    own = [
        OwnAnswers(path.name, [by_prompt[tuple(one.prompt_ids)] for one in asked]) for path, by_prompt in found.items()
    ]
    return OwnComparison(OwnAnswers("full", [one.token_ids for one in asked]), own)


def _shape(
    run: AnswerPass,
    window: str | None,
    keep: str,
    width: float | None,
    narrowed: str | None,
    texts: Sequence[OwnAnswer],
    part: tuple[Path, str],
) -> Shape:
    """The student before it is trained."""
    from d3engine.research.distillation.corpus import in_turns
    from d3engine.research.distillation.training import (
        Shape,
        best_kept,
        best_window,
        estimate_widths,
        narrowed_shape,
        window_shape,
    )

    count = run.config.num_layers
    shape = Shape((), {})
    if window is not None:
        size = integer_in(window)
        if size is None:
            first, stop = window_of("--window", window, count)
        else:
            require_integer("--window", size, 2, count - 1)
            some = in_turns(texts)[:WINDOW_TEXTS]
            with counting("windows", "text", len(some)) as measured:
                first, stop = best_window(run, size, some, 128, measured)
            note(f"the window {first}:{stop}: of {size} layers, those without which answers suffer least")
        require(stop - first >= 2, "--window", window, "at least two layers, of which one stays")
        if keep == AUTO:
            kept = [best_kept(run, first, stop, texts[:4], 128)]
            note(f"layer {kept[0]} stands for the window: alone in its place it leaves least unexplained")
        else:
            allowed = f"layers of {first} to {stop - 1}, with commas, or auto"
            words = keep.split(",")
            numbers = [integer_in(word) for word in words]
            kept = [number for number in numbers if number is not None and first <= number < stop]
            require(len(kept) == len(words) < stop - first, "--keep", keep, allowed)
        shape = window_shape(run, first, stop, kept)
    if width is None:
        return shape
    among = range(*(window_of("--narrowed", narrowed, count) if narrowed else (0, count)))
    cost = _cost(estimate_widths(run, texts, len(among), width))
    note(f"{len(texts)} answers order the neurons of {len(among)} layers and refit their down matrices; {cost}")
    with progress_bar("widths", "text", 0) as bar:

        def advance(passes: int) -> None:
            bar.total = passes
            bar.update()

        return narrowed_shape(run, shape, among, width, texts, advance, part)


# -- what is said --------------------------------------------------------------------------------------------------


def _tell(training: Distillation, own: Sequence[OwnAnswer], held_out: Sequence[OwnAnswer]) -> None:
    """Memory and time, before any of it is taken."""
    from d3engine.research.distillation.training import estimate

    cost = _cost(estimate(training, own, held_out))
    what = "no steps: the student is judged as it is"
    if training.options.all_steps:
        answers = f"{len(own)} answers of {sum(one.positions for one in own):,} tokens"
        what = f"{answers} to train on; {training.num_trained / 1e6:.1f} million numbers trained"
    note(f"{what}; {cost}")


def _cost(found: Estimate) -> str:
    return (
        f"about {max(0.1, found.gigabytes):.1f} GiB of memory, and at least {_in_words(found.seconds)} at the "
        f"{found.gigaflops:.0f} GFLOP/s that this machine gives just now."
    )


def _in_words(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 3600:.1f} hours" if seconds >= 5400 else f"{seconds / 60:.0f} minutes"


def _show_trained(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    points = [
        (f"{one['step']}", f"{one['tokens']:,}", f"{one['seconds']:.0f}", f"{one['agreement']:.1%}", f"{one['kl']:.4f}")
        for one in found["curve"]
    ]
    print_table("Learning curve, on held-out answers", ("step", "tokens", "seconds", "same token", "KL"), points)
    every = {"student": found["held_out"], **found["controls"]}
    kinds = list(found["held_out"])
    rows = [(name, *(_cell(one[kind]) for kind in kinds)) for name, one in every.items()]
    print_table(f"Held out: same token, KL; the student saves {found['layers_saved']:.2f} layers", ("", *kinds), rows)


def _cell(one: dict[str, Any]) -> str:
    arm = "" if one["agreement_95"] is None else f" +- {100 * one['agreement_95']:.1f}"
    return f"{one['agreement']:.1%}{arm}, {one['kl']:.3f}"
