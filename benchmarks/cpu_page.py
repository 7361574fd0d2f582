"""The tables that `benchmarks.cpu` prints: one for each of its parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import spread


def show(report: dict[str, Any], console: Console) -> None:
    """Print a table for each part."""
    settings = report["settings"]
    clock = "processor" if settings["processor_time"] else "wall"
    console.print(
        f"{settings['model']}: {settings['threads']} threads, {settings['repeats']} rounds, {settings['tokens']} tokens"
        f" after {settings['prompt_tokens']}, {clock} time. Medians, least and most of the rounds."
        f" llama.cpp: {report['llama_cpp'] or 'not installed'}"
    )
    peers = settings["peers"]
    over = [f"over {peer}" for peer in peers]
    if report.get("decode"):
        table = _table("weights", "batch", "ms a step", *over, "GB/s", "of reading", "of the call")
        for row in report["decode"]:
            ours = row["systems"]["d3engine"]
            table.add_row(
                row["kind"],
                str(row["batch"]),
                spread(ours["seconds_per_step"], 1e3),
                *_ratios(row, peers),
                spread(ours["gigabytes_per_second"]),
                spread(ours["share_of_reading"]),
                spread(ours["host_share"]),
            )
        console.print(table)
    if report.get("depth"):
        table = _table(
            "weights", "batch", "D3 over full depth", "layer bound", "realisation ratio", "off a line, at most"
        )
        for row in report["depth"]:
            table.add_row(
                row["kind"],
                str(row["batch"]),
                spread(row["d3_over_full_depth"]),
                f"{row['layer_bound']:.2f}",
                spread(row["realisation_ratio"]),
                f"{100 * row['largest_distance_from_a_line']:.1f} %",
            )
        console.print(table)
    if report.get("prompt"):
        table = _table("weights", "tokens", "ms", *over)
        for row in report["prompt"]:
            seconds = row["systems"]["d3engine"]["seconds"]
            table.add_row(row["kind"], str(row["tokens"]), spread(seconds, 1e3), *_ratios(row, peers))
        console.print(table)


def _ratios(row: dict[str, Any], peers: Sequence[str]) -> list[str]:
    """How many times as fast as each peer, as cells; a peer that was not there has none."""
    return [spread(row["over"][peer]) if peer in row["over"] else "-" for peer in peers]


def _table(*titles: str) -> Table:
    table = Table()
    for title in titles:
        table.add_column(title, justify="left" if title == "weights" else "right", no_wrap=True)
    return table
