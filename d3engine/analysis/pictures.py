"""The pictures of the analyses. Matplotlib is imported where a picture is drawn.

The one idea: every axis has its unit, every line a marker or a style besides its colour, and a legend never covers
what it explains.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from d3engine.analysis.copying import Copying
from d3engine.analysis.flow import NAMES, PARTS, ROWS, Flow
from d3engine.analysis.perplexity import Perplexity
from d3engine.analysis.sample import Sample, SampleAnswer
from d3engine.analysis.saturation import Saturation
from d3engine.colours import BLACK, BLUE, GREY, ORANGE, VERMILION, depth_colours, ramp
from d3engine.plots import MARKERS, new_figure, save_figure

PART_STYLES = {"block": (BLACK, "o"), "attention": (BLUE, "s"), "mlp": (VERMILION, "^")}
ABOVE = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": 3, "frameon": False, "fontsize": "small"}


def plot_saturation(result: Saturation, path: str | Path, title: str) -> None:
    """By position in the answer, and the share of tokens settled after each layer."""
    figure = new_figure(width=11, height=4.2)
    left, right = figure.subplots(1, 2)
    groups = result.by_position()
    places = [(group.start + group.stop - 1) / 2 + 1 for group, _ in groups]
    means = [found.layers.mean() for _, found in groups]
    low, high = (
        [np.quantile(found.layers, share, method="inverted_cdf") for _, found in groups] for share in (0.1, 0.9)
    )
    left.fill_between(places, low, high, color=BLUE, alpha=0.25, linewidth=0, label="10 % to 90 % of tokens")
    left.plot(places, means, "o-", color=BLUE, label="mean")
    left.set_xscale("log")
    left.xaxis.set_major_formatter("{x:g}")
    left.set_ylim(0, result.num_layers * 1.03)
    left.set_xlabel("generated token (1 is the first), logarithmic")
    left.set_ylabel(f"layers until settled, of {result.num_layers}")
    left.legend(**ABOVE)
    share = 100 * result.settled_share()
    right.stairs(share[:-1], np.arange(result.num_layers + 1), baseline=None, color=BLUE, linewidth=2)
    right.plot(np.arange(result.num_layers + 1), share, "o", color=BLUE, markersize=4)
    right.set_ylim(-2, 103)
    right.set_xlim(0, result.num_layers + 0.3)
    right.set_xlabel("layers run")
    right.set_ylabel("tokens whose prediction is settled, %")
    for axis in (left.yaxis, right.xaxis):
        axis.get_major_locator().set_params(integer=True)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.suptitle(title, fontsize="medium")
    save_figure(figure, Path(path))


def plot_perplexity(result: Perplexity, path: str | Path, title: str) -> None:
    """The perplexity of every position, and how many answers reach it."""
    figure = new_figure(width=8, height=5)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    values, counts = result.by_position()
    # A model that is nearly certain of itself has a perplexity of 1.0000...; what is above 1 is the picture then.
    base = 1.0 if values.max() < 1.1 else 0.0
    positions = np.arange(1, len(values) + 1)
    upper.plot(positions, values - base, ".", color=GREY, label="one position")
    groups = result.table().rows[:-1]
    starts = [int(cells[0].split("-")[0]) for cells in groups]
    stops = [int(cells[0].split("-")[-1]) + 1 for cells in groups]
    means = [result.at(range(start, stop))[1] for start, stop in zip(starts, stops, strict=True)]
    edges = np.array([*starts, stops[-1]]) + 0.5
    upper.stairs(np.array(means) - base, edges, baseline=None, color=BLUE, linewidth=2, label="groups of positions")
    upper.set_yscale("log")
    upper.set_ylabel("perplexity - 1, logarithmic" if base else "perplexity, logarithmic")
    upper.legend(**ABOVE)
    lower.stairs(counts, np.arange(len(values) + 1) + 0.5, fill=True, color=ORANGE)
    lower.set_ylabel("answers")
    lower.set_ylim(bottom=0)
    lower.set_xlabel("generated token (1 is the first)")
    lower.set_xlim(0.5, len(values) + 0.5)
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    figure.align_ylabels()
    figure.suptitle(title, fontsize="medium")
    save_figure(figure, Path(path))


def plot_flow(result: Flow, path: str | Path, title: str) -> None:
    """Cosine similarity and distance by layer; answers' tokens solid, prompts' dashed."""
    figure = new_figure(width=11, height=4.4)
    for axes, values, label, scale in zip(
        figure.subplots(1, 2),
        (result.cosine, result.distance),
        ("cosine similarity, before and after", "Euclidean distance, logarithmic"),
        ("linear", "log"),
        strict=True,
    ):
        layers = np.arange(values.shape[2])
        for kind, style in enumerate(("-", "--")):
            for place, part in enumerate(PARTS):
                colour, marker = PART_STYLES[part]
                filled = {} if kind == 0 else {"markerfacecolor": "white"}
                name = f"{NAMES[place]}, {ROWS[kind]} tokens"
                axes.plot(layers, values[kind, place], style, marker=marker, color=colour, label=name, **filled)
        axes.set_xlabel("layer (0 is the first)")
        axes.set_ylabel(label)
        axes.set_yscale(scale)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, fontsize="small", frameon=False)
    figure.suptitle(title, fontsize="medium")
    save_figure(figure, Path(path))


def plot_copying(result: Copying, path: str | Path, title: str) -> None:
    """A line for each number of copied layers, over the step from which they are copied."""
    figure = new_figure(width=8, height=4.5)
    axes = figure.subplots()
    for place, (layers, scores) in enumerate(zip(result.layers, result.scores, strict=True)):
        colour = "#{:02x}{:02x}{:02x}".format(*ramp(place / max(len(result.layers) - 1, 1)))
        size = 11 - 1.5 * min(place, 4)  # a smaller marker is seen on a larger one where lines lie on each other
        line = {"marker": MARKERS[place % len(MARKERS)], "color": colour, "linewidth": 2, "markersize": size}
        axes.plot(result.steps, [100 * score for score in scores], label=f"{layers}", **line)
    axes.axhline(100 * result.full, color=BLACK, linestyle="--", linewidth=1, label="0 (full depth)")
    axes.set_xscale("log", base=2)
    axes.set_xticks(result.steps, [f"{step}" for step in result.steps])
    axes.minorticks_off()
    axes.set_ylim(-3, 103)
    axes.set_xlabel("generation step from which they are copied, logarithmic")
    axes.set_ylabel(f"{result.measure}, %")
    axes.grid(alpha=0.3)
    figure.legend(title="last layers copied", loc="outside right center", fontsize="small", frameon=False)
    figure.suptitle(title, fontsize="medium")
    save_figure(figure, Path(path))


COLUMNS = 96
"""Characters on a line of a drawn sample."""


def plot_sample(sample: Sample, path: str | Path, title: str, headings: list[str]) -> None:
    """The answers as text, every token on the colour of its depth; `headings` has one for each answer."""
    colours = depth_colours(sample.depths)
    # Matplotlib would read a dollar sign as mathematics.
    pieces = [_lines(answer) for answer in sample.answers]
    num_lines = sum(len(lines) + 2 for lines in pieces)
    figure = new_figure(width=0.4 + 0.082 * COLUMNS, height=0.9 + 0.26 * num_lines)
    axes = figure.subplots()
    axes.set_xlim(0, COLUMNS)
    axes.set_ylim(num_lines, 0)
    axes.axis("off")
    row = 0
    for heading, lines in zip(headings, pieces, strict=True):
        axes.text(0, row + 0.5, _plain(heading), va="center", fontsize=10, fontweight="bold")
        for number, line in enumerate(lines):
            _draw_line(axes, line, row + 1 + number, colours)
        row += len(lines) + 2
    _draw_legend(axes, colours, sample.num_layers)
    figure.suptitle(_plain(title), fontsize="medium")
    save_figure(figure, Path(path))


def _lines(answer: SampleAnswer) -> list[list[tuple[str, int]]]:
    """Lines of (text, depth): tokens broken at line feeds and, where one would not fit, before it."""
    lines: list[list[tuple[str, int]]] = [[]]
    used = 0
    for token in answer.tokens:
        for number, text in enumerate(token.text.expandtabs(4).split("\n")):
            if number or used + len(text) > COLUMNS:
                lines.append([])
                used = 0
            if not used:
                text = text.lstrip(" ")
            lines[-1].append((text, token.depth))
            used += len(text)
    return lines


def _draw_line(axes: Any, line: list[tuple[str, int]], row: int, colours: dict[int, tuple[str, str]]) -> None:
    from matplotlib.patches import Rectangle

    column = 0
    for text, depth in line:
        back, letters = colours[depth]
        axes.add_patch(Rectangle((column, row + 0.06), len(text), 0.88, facecolor=back, edgecolor="white"))
        for place, character in enumerate(text):  # one by one: no font's own widths, so that colours and letters agree
            axes.text(
                column + place + 0.5,
                row + 0.5,
                _plain(character),
                ha="center",
                va="center",
                family="monospace",
                fontsize=9,
                color=letters,
            )
        column += len(text)


def _draw_legend(axes: Any, colours: dict[int, tuple[str, str]], num_layers: int) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=back, label=f"{depth}") for depth, (back, _) in colours.items()]
    axes.legend(
        handles=patches,
        title=f"layers run for a token, of {num_layers}",
        title_fontsize="small",
        loc="upper center",
        bbox_to_anchor=(0.5, 0),
        ncols=min(len(patches), 12),
        frameon=False,
        fontsize="small",
        handlelength=1.2,
    )


def _plain(text: str) -> str:
    """Text that matplotlib draws as it is: no mathematics between dollar signs, no characters that cannot be seen."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text).replace("$", r"\$")
