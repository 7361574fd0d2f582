"""What bridges are worth, as a picture: for each start, what a window of a width costs, skipped and bridged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from d3engine.bridges.held_out import HeldOut, Judged
from d3engine.model.bridges import Window
from d3engine.pictures.colours import line_ramp
from d3engine.pictures.plots import MARKERS, new_figure, save_figure


def plot_held_out(result: HeldOut, path: str | Path, title: str = "") -> None:
    """Draw agreement with full depth, and the KL divergence from it, over the width of the window, to a file.

    Dashed lines are windows skipped as they are. Raises as `plot_schedule`.
    """
    figure = new_figure(width=9, height=4.5)
    agreement, divergence = figure.subplots(1, 2)
    _draw(agreement, result, lambda judged: 100 * judged.agreement)
    _draw(divergence, result, lambda judged: judged.kl)
    agreement.set_ylabel("same likeliest token as full depth, %")
    agreement.set_ylim(0, 102)
    divergence.set_ylabel("KL divergence from full depth, nats")
    divergence.set_yscale("log")
    agreement.legend(fontsize="small")
    figure.suptitle(title, fontsize="medium")
    save_figure(figure, Path(path))


def _draw(axes: Any, result: HeldOut, value: Any) -> None:
    starts = sorted({first for first, _ in result.bridged})
    for place, start in enumerate(starts):
        colour, marker = line_ramp(place / max(len(starts) - 1, 1)), MARKERS[place % len(MARKERS)]
        for judged, line, name in ((result.bridged, "-", "bridged"), (result.skipped, "--", "skipped")):
            widths, values = _curve(judged, start, value)
            axes.plot(widths, values, marker + line, color=colour, label=f"from layer {start}, {name}")
    axes.set_xlabel("layers in the window")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)


def _curve(judged: dict[Window, Judged], start: int, value: Any) -> tuple[list[int], list[float]]:
    stops = sorted(stop for first, stop in judged if first == start)
    return [stop - start for stop in stops], [value(judged[start, stop]) for stop in stops]
