"""What `benchmarks.gpu_model` has found, as a table and as a picture, beside what others have measured."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from benchmarks.report import print_table

PUBLISHED = {
    "bf16": (
        (0.78, "Llama-1B on an H100, one kernel for all layers (Hazy Research, megakernel)"),
        (0.75, "Llama-3-8B on an H100, 6.4 ms a step (SGLang, torch.compile)"),
        (0.65, "Llama-3-8B on an H100, 7.4 ms a step (SGLang, CUDA graphs)"),
        (0.82, "Llama-2-7B on an A100, 105 tokens/s (gpt-fast)"),
        (0.57, "Llama-3-8B on an H100, 127 tokens/s (torchao)"),
    ),
    "int8": ((0.45, "Llama-3-8B on an H100, 199 tokens/s (torchao)"),),
    "int4": ((0.30, "Llama-3-8B on an H100, 241 tokens/s (torchao)"),),
}
"""What others have measured at batch 1: shares of the bandwidth that the maker names, by the bytes of the weights."""


def published_shares(weights: str, batch: int) -> tuple[float, float] | None:
    """The lowest and the highest share of others; None where no figure is known."""
    shares = [share for share, _ in PUBLISHED.get(weights, ())]
    return (min(shares), max(shares)) if shares and batch == 1 else None


def show(report: dict[str, Any], console: Console) -> None:
    """The table; its title says that it is a model."""
    what = "a prompt of {batch}" if report["is_prompt"] else "batch {batch}, context {context}"
    words = f"{{shape}}, {{weights}}, {what}".format(**report) + (", sampled" if report["is_sampled"] else "")
    words += ", batch-invariant" if report["batch_invariant"] else ""
    title = f"By a model, not measured, an upper bound: {words}"
    others = published_shares(report["weights"], 0 if report["is_prompt"] else report["batch"])
    beside = "none known" if others is None else " to ".join(f"{share:.2f}" for share in dict.fromkeys(others))
    columns = ("device", "layers", "ms a step", "tokens/s", "of the bandwidth", "others, measured", "bound by")
    rows = [
        (
            *(row["device"], str(row["layers"]), f"{row['step_us'] / 1000:.2f}", f"{row['tokens_per_second']:.0f}"),
            *(f"{row['share_of_bandwidth']:.2f}", beside, row["bound_by"]),
        )
        for row in report["rows"]
    ]
    print_table(console, columns, rows, title, left=("device", "bound by"))
    if others is not None:
        lines = (f"{share:.2f}: {figure}" for share, figure in PUBLISHED[report["weights"]])
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
