"""What `benchmarks.gpu_model` has found, as a table and as a picture; both say that it is a model."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gpu.published import PUBLISHED, published_shares


def show(report: dict[str, Any], console: Console) -> None:
    """The table; its title says that it is a model."""
    rows = "a prompt of {batch}" if report["is_prompt"] else "batch {batch}, context {context}"
    words = f"{{shape}}, {{weights}}, {rows}".format(**report) + (", sampled" if report["is_sampled"] else "")
    words += ", batch-invariant" if report["batch_invariant"] else ""
    table = Table(title=f"By a model, not measured, an upper bound: {words}", title_justify="left")
    others = published_shares(report["weights"], 0 if report["is_prompt"] else report["batch"])
    beside = "none known" if others is None else " to ".join(f"{share:.2f}" for share in dict.fromkeys(others))
    for name in ("device", "layers", "ms a step", "tokens/s", "of the bandwidth", "others, measured", "bound by"):
        table.add_column(name, justify="left" if name in ("device", "bound by") else "right")
    for row in report["rows"]:
        time = f"{row['step_us'] / 1000:.2f}"
        share = f"{row['share_of_bandwidth']:.2f}"
        table.add_row(
            row["device"], str(row["layers"]), time, f"{row['tokens_per_second']:.0f}", share, beside, row["bound_by"]
        )
    console.print(table)
    if others is not None:
        known = [one for one in PUBLISHED if one.weights == report["weights"]]
        lines = (f"{one.share:.2f}: {one.figure} ({one.source})" for one in known)
        console.print("Others, of the bandwidth that the maker names:", *lines, sep="\n  ")
    if report["is_sampled"]:
        times = {row["device"]: row["sampling_us"] for row in report["rows"]}
        words = ", ".join(f"{device} {time:.0f}" for device, time in times.items())
        console.print(f"of it, choosing under top-p after the logits, in microseconds: {words}")


def plot(reports: list[dict[str, Any]], path: str) -> None:
    """Draw milliseconds of a step over its layers, a line a device and a panel a report, to a PNG file."""
    from d3engine.research.plots import BLUE, INK, ORANGE, new_figure, save_figure

    figure = new_figure(width=3.1 * len(reports), height=3.6)
    panels = figure.subplots(1, len(reports), squeeze=False)[0]
    for axes, report in zip(panels, reports, strict=True):
        for device, colour in zip(report["devices"], (BLUE, ORANGE, INK), strict=True):
            rows = [row for row in report["rows"] if row["device"] == device["name"]]
            layers = [row["layers"] for row in rows]
            axes.plot(layers, [row["step_us"] / 1e3 for row in rows], color=colour, marker="o", label=device["name"])
            limits = [row["step_us"] / 1e3 * row["share_of_limit"] for row in rows]
            axes.plot(layers, limits, color=colour, linestyle=":")
        axes.set_title("{weights}, batch {batch}".format(**report), fontsize="medium")
        axes.set_xlabel("layers of the step")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("milliseconds a step")
    panels[0].legend(frameon=False, fontsize="small")
    words = "{shape}, context {context}".format(**reports[0])
    save_figure(figure, path, f"By a model, not measured: {words}; dotted: at the copy rate")
