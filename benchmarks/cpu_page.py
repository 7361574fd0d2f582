"""The tables that `benchmarks.cpu` prints: one for each of its parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from benchmarks.report import print_table, spread

PARTS = ("decode", "depth", "prompt")


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
    ours = {part: [(row, row.get("systems", {}).get("d3engine")) for row in report.get(part) or ()] for part in PARTS}
    tables = {
        ("weights", "batch", "ms a step", *over, "GB/s", "of reading", "of the call"): [
            (
                *(row["kind"], str(row["batch"]), spread(own["seconds_per_step"], 1e3), *_ratios(row, peers)),
                *(spread(own[one]) for one in ("gigabytes_per_second", "share_of_reading", "host_share")),
            )
            for row, own in ours["decode"]
        ],
        ("weights", "batch", "D3 over full depth", "layer bound", "realisation ratio", "off a line, at most"): [
            (
                *(row["kind"], str(row["batch"]), spread(row["d3_over_full_depth"]), f"{row['layer_bound']:.2f}"),
                *(spread(row["realisation_ratio"]), f"{100 * row['largest_distance_from_a_line']:.1f} %"),
            )
            for row, _ in ours["depth"]
        ],
        ("weights", "tokens", "ms", *over): [
            (row["kind"], str(row["tokens"]), spread(own["seconds"], 1e3), *_ratios(row, peers))
            for row, own in ours["prompt"]
        ],
    }
    for columns, rows in tables.items():
        if rows:
            print_table(console, columns, rows, left=("weights",), no_wrap=True)


def _ratios(row: dict[str, Any], peers: Sequence[str]) -> list[str]:
    """How many times as fast as each peer, as cells; a peer that was not there has none."""
    return [spread(row["over"][peer]) if peer in row["over"] else "-" for peer in peers]
