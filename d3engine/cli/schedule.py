"""`d3engine schedule`: what a depth policy does at each step. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from d3engine.cli.commands import AsJson, check_plot, new_app, print_json, print_table
from d3engine.cli.depth_options import AUTO, Depth, policies_help, takes_depth
from d3engine.cli.engine_options import MODEL, model_directory
from d3engine.depth import NEVER, DepthPolicy, Schedule
from d3engine.depth.labels import policy_in_words
from d3engine.depth.policy import policy_from_directory
from d3engine.depth.statistics import LLAMA2_BY_LAYERS, KVSaved, ModelShape, flops_ratio, kv_saved, mean_depth
from d3engine.errors import NOTHING, require

app = new_app()

MAX_TOKENS = 10_000_000
"""Far above any context; keeps what is computed for each step small."""

SHAPE_FLAGS = {
    "hidden_size": "--hidden-size",
    "intermediate_size": "--intermediate-size",
    "vocab_size": "--vocab-size",
    "num_heads": "--heads",
    "num_kv_heads": "--kv-heads",
    "head_dim": "--head-dim",
}


Dtype = StrEnum("Dtype", ["bfloat16", "float16", "float32"])
"""What a KV entry is made of."""


@dataclass(frozen=True)
class Report:
    """Everything the command says. `shape` is None where only the number of layers is known."""

    policy: DepthPolicy
    schedule: Schedule
    steps: int
    prompt_tokens: int
    dtype: Dtype
    shape: ModelShape | None

    @property
    def mean_layers(self) -> float:
        """Over the steps asked for, whether or not an answer gets that long."""
        return mean_depth(self.schedule, self.steps)

    @property
    def flops_ratio(self) -> float | None:
        """Full depth over this schedule, LM head included."""
        if self.shape is None:
            return None
        shape = self.shape
        return flops_ratio(self.mean_layers, shape.num_layers, shape.layer_parameters, shape.head_parameters)

    @property
    def kv_bytes_per_entry(self) -> int | None:
        """Key and value of one token at one layer."""
        size = 4 if self.dtype is Dtype.float32 else 2
        return None if self.shape is None else 2 * self.shape.kv_size * size

    @property
    def kv(self) -> KVSaved:
        """Of one sequence; `bytes_saved` means something only if the shape is known."""
        return kv_saved(self.schedule, self.prompt_tokens, self.steps, self.kv_bytes_per_entry or 1)


@app.command(epilog=policies_help())
@takes_depth
def schedule(
    depth: Depth,
    layers: Annotated[int | None, typer.Option("--layers", help="Layers of the model.", show_default=False)] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help=f"Whose layers and sizes to take. {MODEL}"),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", help="Generated tokens to look at.")] = 200,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", help="Tokens of the prompt, for the KV cache.")
    ] = 512,
    dtype: Annotated[
        Dtype | None, typer.Option("--dtype", help="Of the KV cache. Default: the model's, or bfloat16.")
    ] = None,
    hidden_size: Annotated[int | None, typer.Option(help="Default: Llama-2's at 32, 40 or 80 layers.")] = None,
    intermediate_size: Annotated[int | None, typer.Option(help="As --hidden-size.")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="As --hidden-size.")] = None,
    heads: Annotated[int | None, typer.Option("--heads", help="As --hidden-size.")] = None,
    kv_heads: Annotated[int | None, typer.Option("--kv-heads", help="Default: as many as --heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Default: hidden size over heads.")] = None,
    as_json: AsJson = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Also draw the schedule to this PNG file (needs matplotlib)."),
    ] = None,
) -> None:
    """Show what a depth policy does: layers run at each step, cutoffs, mean depth, FLOPs ratio, KV saved.

    Needs no weights and no GPU. All figures are nominal: over all --steps, though answers may end earlier.
    """
    sizes = dict(zip(SHAPE_FLAGS, (hidden_size, intermediate_size, vocab_size, heads, kv_heads, head_dim), strict=True))
    shape: ModelShape | None
    if model:
        num_layers, shape, model_dtype = _read_model(model, layers, sizes)
    else:
        num_layers, shape, model_dtype = *_shape_of_options(layers, sizes), None
    for flag, value in (("--steps", steps), ("--prompt-tokens", prompt_tokens)):
        require(1 <= value <= MAX_TOKENS, flag, value, f"an integer from 1 to {MAX_TOKENS}")
    policy = _policy(depth, model)
    known = policy.exit_rule(num_layers) is None
    require(known, "--depth", policy.name, "a policy of fixed depths (under this one each token decides as it runs)")
    kv_dtype = dtype or Dtype(model_dtype or "bfloat16")
    report = Report(policy, policy.schedule(num_layers), steps, prompt_tokens, kv_dtype, shape)
    check_plot("--plot", plot)
    if plot:
        from d3engine.research.plots import plot_schedule

        plot_schedule(report.schedule, steps, plot, title=_title(report))
    if as_json:
        print_json(as_dict(report))
    else:
        _show(report)


def _policy(depth: Depth, model: str | None) -> DepthPolicy:
    if depth != AUTO:
        return depth
    require(model is not None, "--depth", AUTO, "a policy by name where there is no --model, whose d3.json it reads")
    assert model is not None
    return policy_from_directory(model_directory(model))


def _read_model(model: str, layers: int | None, sizes: dict[str, int | None]) -> tuple[int, ModelShape, str | None]:
    """Layers, shape and dtype from config.json; options that say the same are refused."""
    for flag, value in (("--layers", layers), *((SHAPE_FLAGS[field], size) for field, size in sizes.items())):
        require(value is None, flag, value, "absent, since --model gives it")
    from d3engine.model.config import ModelConfig

    config = ModelConfig.from_directory(model_directory(model))
    shape = ModelShape(config.num_layers, **{field: getattr(config, field) for field in SHAPE_FLAGS})
    return config.num_layers, shape, config.dtype


def _shape_of_options(layers: int | None, sizes: dict[str, int | None]) -> tuple[int, ModelShape | None]:
    """The sizes given, the rest from the Llama-2 of that many layers; no shape if nothing is known of it."""
    require(layers is not None, "--layers", NOTHING, "given, or --model")
    assert layers is not None
    require(1 <= layers <= 10_000, "--layers", layers, "an integer from 1 to 10000")
    given = {field: size for field, size in sizes.items() if size is not None}
    for field, size in given.items():
        require(size >= 1, SHAPE_FLAGS[field], size, "an integer of at least 1")
    base = LLAMA2_BY_LAYERS.get(layers)
    if not given:
        return layers, base
    if base is None:
        missing = [SHAPE_FLAGS[field] for field in list(SHAPE_FLAGS)[:4] if field not in given]
        require(not missing, "--layers", layers, f"given with {', '.join(missing)}, since no Llama-2 has that many")
        hidden, intermediate, vocab, heads = (given[field] for field in list(SHAPE_FLAGS)[:4])
        base = ModelShape(layers, hidden, intermediate, vocab, heads, num_kv_heads=heads, head_dim=1)
    return layers, _with_sizes(base, given)


def _with_sizes(base: ModelShape, given: dict[str, int]) -> ModelShape:
    """`base` with the sizes given; what follows from them follows, unless it is given too."""
    shape = replace(base, **given)
    if "num_kv_heads" not in given and "num_heads" in given:
        shape = replace(shape, num_kv_heads=shape.num_heads)
    if "head_dim" not in given and ("num_heads" in given or "hidden_size" in given):
        divides = shape.hidden_size % shape.num_heads == 0
        require(
            divides,
            "--hidden-size",
            shape.hidden_size,
            f"a multiple of --heads {shape.num_heads} where --head-dim is not given",
        )
        shape = replace(shape, head_dim=shape.hidden_size // shape.num_heads)
    return shape


def as_dict(report: Report) -> dict[str, Any]:
    """The report for machines; a cutoff of null is never."""
    schedule = report.schedule
    kv = asdict(report.kv)
    kv["bytes_per_entry"] = report.kv_bytes_per_entry
    if report.shape is None:
        kv["bytes_saved"] = None
    return {
        "policy": report.policy.describe(),
        "num_layers": schedule.num_layers,
        "steps": report.steps,
        "prompt_tokens": report.prompt_tokens,
        "dtype": report.dtype.value,
        "shape": None if report.shape is None else asdict(report.shape),
        "is_nested": schedule.is_nested,
        "runs": [
            {
                "first_step": first,
                "last_step": end - 1,
                "depth": schedule.depth_at(first),
                "skipped_layers": _skipped(schedule, first),
                **({"student": schedule.student_at(first)} if schedule.students else {}),
            }
            for first, end in schedule.runs(report.steps)
        ],
        "cutoffs": [None if cutoff == NEVER else cutoff for cutoff in schedule.cutoffs.tolist()],
        "mean_layers": report.mean_layers,
        "flops_ratio": report.flops_ratio,
        "kv_saved": kv,
    }


def _skipped(schedule: Schedule, step: int) -> list[int]:
    return [layer for layer, runs in enumerate(schedule.active(step).tolist()) if not runs]


def _ranges(layers: Sequence[int]) -> str:
    """Ascending layer ids in short: "0-3, 7"."""
    parts = []
    for _, group in groupby(enumerate(layers), lambda pair: pair[1] - pair[0]):
        ids = [layer for _, layer in group]
        parts.append(_range(ids[0], ids[-1]))
    return ", ".join(parts) or "none"


def _range(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first}-{last}"


def _title(report: Report) -> str:
    return f"{policy_in_words(report.policy)}, {report.schedule.num_layers} layers"


def _show(report: Report) -> None:
    schedule = report.schedule
    header = ("steps", "layers run", "layers skipped", *(["student"] if schedule.students else []))
    depths = [
        (
            *(_range(first, end - 1), str(schedule.depth_at(first)), _ranges(_skipped(schedule, first))),
            *([schedule.student_at(first) or "none"] if schedule.students else []),
        )
        for first, end in schedule.runs(report.steps)
    ]
    typer.echo(_title(report))
    _print_table("Depth at each step", header, depths)
    if schedule.is_nested:
        _print_table("Cutoff of each layer", ("layers", "first step that skips it"), _cutoff_rows(schedule))
    _print_table("Worth", ("figure", "value"), _worth_rows(report))


def _cutoff_rows(schedule: Schedule) -> list[tuple[str, str]]:
    """Neighbouring layers with the same cutoff in one row."""
    rows = []
    for cutoff, group in groupby(enumerate(schedule.cutoffs.tolist()), lambda pair: pair[1]):
        ids = [layer for layer, _ in group]
        rows.append((_range(ids[0], ids[-1]), "never" if cutoff == NEVER else str(cutoff)))
    return rows


def _worth_rows(report: Report) -> list[tuple[str, str]]:
    ratio, kv = report.flops_ratio, report.kv
    rows = [
        (
            f"mean layers over {report.steps} steps",
            f"{report.mean_layers:.3f} of {report.schedule.num_layers}",
        ),
        (
            "FLOPs ratio, LM head included",
            "unknown: give the model's sizes, see --help" if ratio is None else f"{ratio:.3f}x",
        ),
        (f"KV cache saved at the end, prompt of {report.prompt_tokens}", f"{kv.fraction:.1%}"),
        ("KV cache saved on average", f"{kv.mean_fraction:.1%}"),
    ]
    if report.shape is not None:
        mebibyte_per_entry = (report.kv_bytes_per_entry or 0) / 2**20
        full = kv.entries_full * mebibyte_per_entry
        saved = full - kv.entries_held * mebibyte_per_entry
        rows.append((f"KV bytes saved per sequence, {report.dtype.value}", f"{saved:,.1f} of {full:,.1f} MiB"))
    return rows


def _print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table; an empty line above it sets it apart where it is plain text."""
    if not sys.stdout.isatty():
        typer.echo()
    print_table(title, header, rows)
