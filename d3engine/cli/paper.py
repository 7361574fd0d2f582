"""`d3engine paper`: our numbers next to the paper's, and the commands that reproduce the rest."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from d3engine.cli.commands import AsJson, new_app, print_json, print_tables
from d3engine.cli.streams import wrapped
from d3engine.errors import NOTHING, require
from d3engine.research.analysis.report import Table
from d3engine.research.evaluation.paper import (
    Compared,
    PaperReport,
    Reference,
    further_notes,
    reference,
    report,
    setup_tables,
)
from d3engine.research.evaluation.paper_tables import BENCHMARKS

app = new_app()


@app.command()
def paper(
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder with gsm8k/ and bbh/: count their answers again.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="Directory with the tokenizer that counts (with --data).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Set our mean layers, FLOPs ratios, layer bounds and averages beside the tables of the D3 paper.

    Needs no weights. Llama-2 7B, 13B and 70B have 32, 40 and 80 layers.
    """
    require(data is None or tokenizer is not None, "--tokenizer", NOTHING, "given with --data, whose tokens it counts")
    require(tokenizer is None or data is not None, "--data", NOTHING, "given with --tokenizer")
    counted = None if data is None or tokenizer is None else _count(data, tokenizer)
    found, setup, notes = report(), setup_tables(counted), further_notes()
    if as_json:
        tables = [asdict(table) for table in setup]
        print_json({**as_dict(found), "setup": tables, "further_notes": notes})
    else:
        _show(found, setup, notes)


def _count(data: Path, tokenizer: Path) -> dict[str, Reference]:
    """The reference answers in tokens of the tokenizer in a directory."""
    from d3engine.research.evaluation.catalogue import reference_answers
    from d3engine.text.tokenizer import load_tokenizer

    encode = load_tokenizer(tokenizer).encode
    return {
        name: reference(name, [len(encode(text, add_special_tokens=False)) for text in reference_answers(name, data)])
        for name in BENCHMARKS
    }


def as_dict(found: PaperReport) -> dict[str, Any]:
    """The report for machines: every field, and what follows from the fields."""
    described = asdict(found)
    for name, derived in {
        "mean_layers": ("difference", "agrees"),
        "flops_ratios": ("difference", "agrees"),
        "wall_clock": ("speedup",),
        "averages": ("agrees",),
        "gains": ("in_standard_errors",),
    }.items():
        for entry, value in zip(described[name], getattr(found, name), strict=True):
            entry.update({field: getattr(value, field) for field in derived})
    return described


def _show(found: PaperReport, setup: list[Table], notes: list[str]) -> None:
    print_tables((*setup, *_tables(found)), apart=True)
    typer.echo()
    weights = "With the weights of Llama-2 and the data sets in a folder DATA (DATA/gsm8k, DATA/bbh):"
    typer.echo(wrapped("\n".join(("Also:", *notes, "", weights)), sys.stdout))
    typer.echo("13B takes start 0.5 on BBH and 0.7 on GSM8K.")
    for reproduction in found.reproduce:
        typer.echo(wrapped(f"\n# {reproduction.shows}", sys.stdout))
        typer.echo(reproduction.command)


def _tables(found: PaperReport) -> Iterator[Table]:
    """Our figures beside the paper's."""
    agreeing = sum(average.agrees for average in found.averages)
    yield _table(
        "Table 6, mean layers of D3 over the maximum length",
        "benchmark | Llama-2 | setting | paper | ours | difference",
        "{0.benchmark} | {0.size} | {0.setting} | {0.papers:.2f} | {0.ours:.6f} | {0.difference:+.4f}",
        found.mean_layers,
        _agreement(found.mean_layers),
        "The paper names no start for 70B on GSM8K; with any up to 0.9 the mean is the same.",
    )
    yield _table(
        "Table 6, FLOPs ratio with the LM head",
        "benchmark | Llama-2 | method | paper | ours | difference",
        "{0.benchmark} | {0.size} | {0.setting} | {0.papers:.2f}x | {0.ours:.3f}x | {0.difference:+.3f}",
        [replace(one, setting=one.setting.removeprefix("Ours: ")) for one in found.flops_ratios],
        _agreement(found.flops_ratios),
        "D3 from our schedules, the other methods from their printed mean layers.",
    )
    yield _table(
        "Table 7, wall clock of GSM8K, beside the most that the skipped layers allow",
        "Llama-2 | full depth | D3 | printed | their ratio | layer bound",
        "{0.size} | {0.full_depth:.0f} | {0.d3:.0f} | {0.printed_speedup:.2f}x | {0.speedup:.3f}x | "
        "{0.layer_bound:.3f}x",
        found.wall_clock,
        "The bound counts the weights moved if every answer had all 1024 tokens; shorter ones skip less.",
        "The printed speed-ups are above it, so they are not of the skipped layers alone.",
    )
    yield _table(
        "Table 8, average of the 27 tasks of BBH",
        "Llama-2 | depth | paper | weighted by items | unweighted",
        "{0.size} | {0.method} | {0.papers:.2f} | {0.by_items:.3f} | {0.unweighted:.3f}",
        [replace(one, method="D3" if one.method == "d3" else "full") for one in found.averages],
        f"The paper's average is the one weighted by items: {agreeing} of {len(found.averages)} agree as printed.",
        *(
            f"Misprint: {m.task}, {m.size}: {m.full:.2f} to {m.d3:.2f} is printed as a change of {m.printed_change:g}."
            for m in found.misprints
        ),
    )
    yield _table(
        "Table 6, exact match of D3 minus full depth",
        "benchmark | Llama-2 | points | standard error | in standard errors",
        "{0.benchmark} | {0.size} | {0.points:+.2f} | {0.standard_error:.2f} | {0.in_standard_errors:+.2f}",
        found.gains,
        "The standard error is of two separate samples: the paper prints no answers, so they cannot be paired.",
    )
    yield _table(
        "Table 9, the setting whose test score Table 6 reports for GSM8K",
        "Llama-2 | alpha | start | validation | test | best on validation | its start",
        "{0.size} | {0.alpha} | {0.start} | {0.validation:.2f} | {0.test:.2f} | {0.best_validation:.2f} | "
        "{0.best_start}",
        found.grid,
        "Each size has its own setting, and 7B's is not the one that its validation split would choose,",
        "but the two are far closer there (11.63 and 11.36) than their standard errors.",
    )


def _table(title: str, header: str, row: str, entries: Sequence[Any], *notes: str) -> Table:
    """A row for each entry, as the format `row` has its fields; columns stand between bars."""
    return Table(title, header.split(" | "), [row.format(one).split(" | ") for one in entries], notes)


def _agreement(compared: list[Compared]) -> str:
    agreeing = sum(c.agrees for c in compared)
    return f"{agreeing} of {len(compared)} agree to within {compared[0].tolerance:.3f}."
