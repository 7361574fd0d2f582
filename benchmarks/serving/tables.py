"""The tables that `benchmarks.serving` prints, for a terminal or as Markdown for a page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

TIMES = {"first token": "first_token", "between tokens": "between_tokens", "whole answer": "whole"}
RATIOS = {
    "of_engine": "of the engine alone",
    "of_lockstep": "of lockstep",
    "over_peer": "over llama.cpp",
    "over_full": "over full depth",
    "over_immediate": "over immediate admission",
    "over_thread": "over a thread",
}
TITLES = (
    *("server", "depth", "tokens/s", "CPU µs per token", "tokens a step"),
    *(f"{name}, ms: p50 / p99" for name in TIMES),
    *RATIOS.values(),
)


def show(report: dict[str, Any], console: Console) -> None:
    """Print a table for each model and kind of load."""
    settings = report["settings"]
    console.print(
        f"{settings['threads']} threads, {settings['repeats']} rounds of at least {settings['seconds']:g} s, medians;"
        " behind a ratio its median's 95 % interval (of fewer than six rounds their range), in brackets the ratio by"
        " processor time. The client runs on the same machine. Left out: "
        + (", ".join(report["left_out"]) or "nothing")
    )
    for title, columns, rows in _tables(report):
        table = Table(*columns, title=title)
        for row in rows:
            table.add_row(*row)
        console.print(table)


def markdown(report: dict[str, Any]) -> str:
    """The same for a page."""
    parts = []
    for title, columns, rows in _tables(report):
        lines = [f"| {' | '.join(cells)} |" for cells in (columns, ("---",) * len(columns), *rows)]
        parts.append("\n".join((f"{title}:", "", *lines)))
    return "\n\n".join(parts)


def _tables(report: dict[str, Any]) -> Iterator[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    for model in report["models"]:
        rate = model["arrivals"][0]["requests_per_second"] if model["arrivals"] else 0.0
        for part, column, field, title in (
            ("streams", "streams", "streams", "streams"),
            ("arrivals", "arrivals", "pattern", f"{rate:.3g} requests a second"),
            ("vllm_client", "streams", "streams", "by vllm bench serve"),
        ):
            if found := model.get(part):
                rows = [(str(row[field]), *_cells(row)) for row in found]
                yield f"{model['model']}, {title}", (column, *TITLES), rows


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    times = [(_ms(row, f"{name}_p50"), _ms(row, f"{name}_p99")) for name in TIMES.values()]
    return (
        row["system"],
        row["depth"],
        f"{row['tokens_per_second']['median']:.0f}",
        f"{row['cpu_per_token']['median'] * 1e6:.0f}" if "cpu_per_token" in row else "-",
        f"{row['tokens_per_step']['median']:.1f}" if "tokens_per_step" in row else "-",
        *(f"{p50} / {p99}" for p50, p99 in times),
        *(_ratio(row, name) for name in RATIOS),
    )


def _ms(row: dict[str, Any], name: str) -> str:
    return f"{row[name]['median'] * 1e3:.3g}" if name in row else "-"


def _ratio(row: dict[str, Any], name: str) -> str:
    """By the clock, with the interval of its median, and by processor time in brackets."""
    if name not in row:
        return "-"
    interval, by_cpu = row.get(f"{name}_interval"), row.get(f"{name}_cpu")
    within = "" if interval is None else f", {interval[0]:.2f} to {interval[1]:.2f}"
    return f"{row[name]:.2f}{within}" + ("" if by_cpu is None else f" ({by_cpu:.2f})")
