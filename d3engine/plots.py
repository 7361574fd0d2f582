"""Pictures of schedules. Matplotlib is imported where a picture is drawn, and no global figure is ever made.

The one idea: a schedule has few runs of equal steps, so the picture has one column a run, however many steps
there are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from d3engine.depth import Schedule
from d3engine.errors import InvalidValueError, MissingExtraError, require_integer

# Two colours of the Okabe-Ito set: told apart with any colour vision, and in grey.
RUNS, SKIPPED = "#0072B2", "#E69F00"

# Above the axes, where no layer can be hidden.
LEGEND = {
    "loc": "lower right",
    "bbox_to_anchor": (1, 1),
    "ncols": 2,
    "frameon": False,
    "fontsize": "small",
    "borderaxespad": 0.1,
}


def plot_schedule(schedule: Schedule, num_steps: int, path: str | Path, title: str = "") -> None:
    """Draw depth over the generation step, and below it which layers run, to a file (PNG by its suffix).

    Raises `MissingExtraError` without matplotlib and `InvalidValueError` for a file that cannot be written.
    """
    require_integer("num_steps", num_steps, 1)
    figure = _new_figure(width=8, height=6)
    depth_axes, layer_axes = figure.subplots(2, 1, sharex=True, height_ratios=[2, 3])
    edges = [0, *(end for _, end in schedule.runs(num_steps))]
    _draw_depth(depth_axes, schedule, edges)
    _draw_layers(layer_axes, schedule, edges)
    layer_axes.set_xlim(-0.5, num_steps - 0.5)
    figure.align_ylabels()
    figure.suptitle(title, fontsize="medium")
    _save(figure, Path(path))


def _draw_depth(axes: Any, schedule: Schedule, edges: list[int]) -> None:
    depths = [schedule.depth_at(step) for step in edges[:-1]]
    mean = float(np.average(depths, weights=np.diff(edges)))
    axes.stairs(depths, np.array(edges) - 0.5, baseline=None, color=RUNS, linewidth=2, label="layers run")
    axes.axhline(mean, color="black", linestyle="--", linewidth=1, label=f"mean {mean:.3f}")
    axes.set_ylim(0, schedule.num_layers * 1.05)
    axes.set_ylabel("layers run")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.legend(**LEGEND)
    axes.grid(alpha=0.3)


def _draw_layers(axes: Any, schedule: Schedule, edges: list[int]) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    runs = np.stack([schedule.active(step) for step in edges[:-1]], axis=1)
    layer_edges = np.arange(schedule.num_layers + 1) - 0.5
    colours = ListedColormap([SKIPPED, RUNS])
    axes.pcolormesh(np.array(edges) - 0.5, layer_edges, runs, cmap=colours, vmin=0, vmax=1)
    axes.set_ylabel("layer")
    axes.set_xlabel("generation step (token)")
    for locator in (axes.xaxis.get_major_locator(), axes.yaxis.get_major_locator()):
        locator.set_params(integer=True)
    patches = [Patch(color=RUNS, label="runs"), Patch(color=SKIPPED, label="skipped")]
    axes.legend(handles=patches, **LEGEND)


def _new_figure(width: float, height: float) -> Any:
    """An empty figure, sizes in inches, that belongs to nobody but the caller (no pyplot)."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plots") from error
    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:  # no such folder; a suffix that matplotlib cannot write
        raise InvalidValueError("plot", str(path), f"a file to write a picture to ({error})") from error
