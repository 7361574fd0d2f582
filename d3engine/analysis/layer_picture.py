"""The heat map of `d3engine analyze layers`. Matplotlib is imported where it is drawn.

The one idea: light costs little, dark much, on a logarithmic scale that all panels share; the cheapest window of every
width has a ring.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from d3engine.analysis.layers import LayerLoss
from d3engine.pictures.colours import RAMP, VERMILION
from d3engine.pictures.plots import new_figure, save_figure

LEAST = 1e-3
"""Nats; what costs less is drawn as this."""


def plot_layers(result: LayerLoss, path: str | Path, title: str) -> None:
    """A panel for each step from which windows are skipped: KL divergence by first layer and layers skipped."""
    from matplotlib.colors import LinearSegmentedColormap, LogNorm

    steps = [step for step in result.from_steps if result.reaches(step)]
    grids = {step: np.maximum(result.means("kl", step), LEAST) for step in steps}
    least = min(float(np.nanmin(grid)) for grid in grids.values())
    most = max(float(np.nanmax(grid)) for grid in grids.values())
    norm = LogNorm(least, max(most, 10 * least))
    colours = LinearSegmentedColormap.from_list("depth", RAMP[::-1])
    figure = new_figure(width=10, height=1.2 + len(steps) * (0.9 + 0.32 * len(result.widths)))
    panels = figure.subplots(len(steps), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (step, grid) in zip(panels, grids.items(), strict=True):
        image = axes.imshow(grid, norm=norm, cmap=colours, aspect="auto", origin="lower", interpolation="nearest")
        for place, width in enumerate(result.widths):
            axes.plot(result.cheapest(step, width), place, "o", markerfacecolor="none", color=VERMILION, markersize=9)
        axes.set_yticks(range(len(result.widths)), [f"{width}" for width in result.widths])
        axes.set_ylabel("layers skipped")
        axes.set_title(f"skipped from generation step {step} on; ring: the cheapest of its row", fontsize="small")
    panels[-1].set_xlabel("first layer that is skipped (0 is the first)")
    figure.colorbar(image, ax=list(panels), label="KL divergence from full depth, nats")
    figure.suptitle(title, fontsize="medium")
    save_figure(figure, Path(path))
