"""Colours of terminal, pictures and pages, for any colour vision: depth on viridis without
its ends, all else from one small set."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from d3engine.depth import Schedule
from d3engine.errors import InvalidValueError, MissingExtraError, require, require_integer
from d3engine.utils.files import is_writable, write_whole

RAMP = ("#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962")
"""Viridis from deep to shallow: perceptually even, and told apart with any colour vision."""

BLUE, ORANGE, GREEN, VERMILION, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7"
GREY = "#999999"
"""Okabe and Ito's set: distinct with any colour vision; blue and orange in grey too."""

INK = "#767676"
"""Of text and lines in pictures without a ground of their own: its contrast to white is 4.5, to black 4.6 (WCAG 2)."""


def ramp(position: float) -> tuple[int, int, int]:
    """The sRGB colour, parts from 0 to 255, at `position` of the ramp: 0 is deep, 1 is shallow."""
    place = position * (len(RAMP) - 1)
    low = min(int(place), len(RAMP) - 2)
    first, second = (_parts(RAMP[i]) for i in (low, low + 1))
    red, green, blue = (round(a + (b - a) * (place - low)) for a, b in zip(first, second, strict=True))
    return red, green, blue


def line_ramp(position: float) -> str:
    """The ramp as "#rrggbb", without its darkest part, of which a thin line would be lost on a dark page."""
    return "#{:02x}{:02x}{:02x}".format(*ramp(0.3 + 0.7 * position))


def depth_position(depth: int, depths: Iterable[int]) -> float:
    """Where `depth` stands on the ramp when `depths` are all that occur; 0 where there is only one."""
    most, least = max(depths), min(depths)
    return 0.0 if most == least else min(max((most - depth) / (most - least), 0.0), 1.0)


def depth_colours(depths: Iterable[int]) -> dict[int, tuple[str, str]]:
    """For each depth, deepest first: the colour of its background, "#rrggbb", and of letters on it."""
    known = sorted(set(depths), reverse=True)
    found = {}
    for depth in known:
        parts = ramp(depth_position(depth, known))
        found[depth] = ("#{:02x}{:02x}{:02x}".format(*parts), letters_on(*parts))
    return found


def letters_on(red: int, green: int, blue: int) -> str:
    """Black or white: at a relative luminance of 0.179 both have the same contrast (WCAG 2)."""
    return "#000000" if _luminance(red, green, blue) > 0.179 else "#ffffff"


def _luminance(*parts: int) -> float:
    """Relative luminance of an sRGB colour, from 0 to 1 (WCAG 2)."""
    linear = [part / 255 / 12.92 if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _parts(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


RUNS, SKIPPED = BLUE, ORANGE  # told apart in grey too

MARKERS = "osD^vP"

STEPS = "generation step (0 yields the first token)"
"""The label of an axis of steps, which count from 0 everywhere."""

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
    figure = new_figure(width=8, height=6)
    depth_axes, layer_axes = figure.subplots(2, 1, sharex=True, height_ratios=[2, 3])
    edges = [0, *(end for _, end in schedule.runs(num_steps))]
    _draw_depth(depth_axes, schedule, edges)
    _draw_layers(layer_axes, schedule, edges)
    layer_axes.set_xlim(-0.5, num_steps - 0.5)
    figure.align_ylabels()
    save_figure(figure, path, title)


def plot_decay(schedules: Mapping[str, Schedule], num_steps: int, path: str | Path, title: str = "") -> None:
    """Draw the depth of several schedules, by their labels, over the generation step, to a file.

    Raises as `plot_schedule`.
    """
    require_integer("num_steps", num_steps, 1)
    figure = new_figure(width=8, height=4.5)
    axes = figure.subplots()
    for place, (label, schedule) in enumerate(schedules.items()):
        steps = np.array([0, *(end for _, end in schedule.runs(num_steps))])
        depths = [schedule.depth_at(int(step)) for step in steps[:-1]]
        colour = line_ramp(place / max(len(schedules) - 1, 1))
        axes.stairs(depths, steps, baseline=None, color=colour, linewidth=2.2)
        # A marker of its own, half way by the eye, tells curves apart that lie on each other.
        middle = np.where(steps[:-1] > 0, np.sqrt(np.maximum(steps[:-1], 1.0) * steps[1:]), np.minimum(steps[1:], 0.5))
        axes.plot(middle, depths, MARKERS[place % len(MARKERS)], color=colour, label=label)
    most = max(schedule.num_layers for schedule in schedules.values())
    axes.set_ylim(0, most * 1.05)
    axes.set_xscale("symlog", linthresh=1, linscale=0.4)  # a plain logarithmic axis has no place for step 0
    axes.set_xlim(0, num_steps)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(f"{STEPS}, logarithmic from 1 on")
    axes.set_ylabel("layers run")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="lower left")
    save_figure(figure, path, title)


def _draw_depth(axes: Any, schedule: Schedule, edges: list[int]) -> None:
    depths = [schedule.depth_at(step) for step in edges[:-1]]
    mean = float(np.average(depths, weights=np.diff(edges)))
    axes.stairs(depths, np.array(edges) - 0.5, baseline=None, color=RUNS, linewidth=2, label="layers run")
    saved = 1 - mean / schedule.num_layers
    label = f"mean {mean:.1f} of {schedule.num_layers}" + (f": {saved:.0%} fewer" if saved else "")
    axes.axhline(mean, color=INK, linestyle="--", linewidth=1.5, label=label)
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
    axes.set_xlabel(STEPS)
    for locator in (axes.xaxis.get_major_locator(), axes.yaxis.get_major_locator()):
        locator.set_params(integer=True)
    patches = [Patch(color=RUNS, label="runs"), Patch(color=SKIPPED, label="skipped")]
    axes.legend(handles=patches, **LEGEND)


def new_figure(width: float, height: float) -> Any:
    """An empty figure, sizes in inches, that belongs to the caller alone (no pyplot)."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plots") from error
    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def check_picture(option: str, path: Path) -> None:
    """Refuse, before the work whose picture it will be, a file that no picture could be written to.

    Raises `MissingExtraError` without matplotlib, and `InvalidValueError` that names `option` for a directory that is
    not there or cannot be written, and for a suffix that matplotlib does not know.
    """
    kinds = new_figure(1, 1).canvas.get_supported_filetypes()
    # Matplotlib adds ".png" to a name that has no suffix, and would then write to another file than was asked for.
    suffix = path.suffix.lower().removeprefix(".")
    require(suffix in kinds, option, str(path), f"a file name that ends in one of {', '.join(sorted(kinds))}")
    require(path.parent.is_dir(), option, str(path), "a file in a directory that exists")
    require(is_writable(path), option, str(path), "a file that can be written")


def save_figure(figure: Any, path: str | Path, title: str | None = None) -> None:
    """Write a figure, under its title, without a ground: to be read on a light page and on a dark one.

    Raises `InvalidValueError` for a file that cannot be written.
    """
    path = Path(path)
    if title is not None:
        figure.suptitle(title, fontsize="medium")
    _ink(figure)
    try:
        picture = io.BytesIO()
        figure.savefig(picture, format=path.suffix.removeprefix(".") or "png")
        write_whole(path if path.suffix else path.with_name(f"{path.name}.png"), picture.getvalue())
    except (OSError, ValueError) as error:  # no such folder; a suffix that matplotlib cannot write
        raise InvalidValueError("plot", str(path), f"a file to write a picture to ({error})") from error


def _ink(figure: Any) -> None:
    """Take every white ground away, and draw in `INK` what has no colour yet: text, frames, ticks."""
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase
    from matplotlib.legend import Legend
    from matplotlib.text import Text

    for part in figure.findobj(FigureBase):
        part.patch.set_alpha(0)
    for axes in figure.findobj(Axes):
        axes.patch.set_alpha(0)
        axes.tick_params(which="both", color=INK)
        for spine in axes.spines.values():
            spine.set_edgecolor(INK)
    for legend in figure.findobj(Legend):
        legend.get_frame().set_alpha(0)
    for text in figure.findobj(Text):
        if text.get_color() == "black":  # what matplotlib takes by itself; a colour of our own is "#rrggbb"
            text.set_color(INK)
