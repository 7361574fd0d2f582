"""The tables that `benchmarks.cpu` prints: one for each of its parts."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def show(report: dict[str, Any], console: Console) -> None:
    """Print a table for each part."""
    settings, bandwidth = report["settings"], report["read_bytes_per_second"] / 1e9
    console.print(
        f"{settings['model']}: {settings['threads']} threads, {settings['repeats']} rounds, {settings['tokens']} tokens"
        f" after {settings['prompt_tokens']}; float32 is read at {bandwidth:.1f} GB/s. Medians, least and most of the"
        f" rounds. llama.cpp: {report['llama_cpp'] or 'not installed'}"
    )
    if report.get("decode"):
        table = _table(
            "weights", "batch", "ms a step", "llama.cpp, ms", "over llama.cpp", "GB/s", "of reading", "of the call"
        )
        for row in report["decode"]:
            ours, peer = row["systems"]["d3engine"], row["systems"].get("llama.cpp")
            rate = row["gigabytes_per_second"]
            table.add_row(
                row["kind"],
                str(row["batch"]),
                _span(ours["seconds_per_step"], 1e3),
                _span(peer["seconds_per_step"], 1e3) if peer else "-",
                _span(row["over_llama_cpp"]) if peer else "-",
                _span(rate),
                f"{rate['median'] / bandwidth:.2f}",
                _span(ours["host_share"]),
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
                _span(row["d3_over_full_depth"]),
                f"{row['layer_bound']:.2f}",
                _span(row["realisation_ratio"]),
                f"{100 * row['largest_distance_from_a_line']:.1f} %",
            )
        console.print(table)
    if report.get("prompt"):
        table = _table("weights", "tokens", "ms", "llama.cpp, ms", "over llama.cpp")
        for row in report["prompt"]:
            ours, peer = row["systems"]["d3engine"], row["systems"].get("llama.cpp")
            table.add_row(
                row["kind"],
                str(row["tokens"]),
                _span(ours["seconds"], 1e3),
                _span(peer["seconds"], 1e3) if peer else "-",
                _span(row["over_llama_cpp"]) if peer else "-",
            )
        console.print(table)


def _table(*titles: str) -> Table:
    table = Table()
    for title in titles:
        table.add_column(title, justify="left" if title == "weights" else "right", no_wrap=True)
    return table


def _span(figure: dict[str, Any], scale: float = 1.0) -> str:
    median, least, most = (figure[name] * scale for name in ("median", "min", "max"))
    return f"{median:.3g} ({least:.3g}-{most:.3g})"
