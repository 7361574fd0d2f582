"""The pictures of `d3engine analyze`. Matplotlib is imported where they are drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from d3engine.research.analysis.copying import Copying, Perturbing
from d3engine.research.analysis.kinds import ByKind, Kind
from d3engine.research.analysis.layers import LayerLoss
from d3engine.research.analysis.report import step_groups, steps_in_words
from d3engine.research.analysis.sample import Sample, SampleAnswer
from d3engine.research.analysis.saturation import NAMES, PARTS, ROWS, Flow, Perplexity, Saturation
from d3engine.research.plots import (
    BLUE,
    GREY,
    INK,
    MARKERS,
    ORANGE,
    RAMP,
    STEPS,
    VERMILION,
    depth_colours,
    line_ramp,
    new_figure,
    save_figure,
)

STYLES = {"yielded": (BLUE, "o", "of the token that the step yields"), "fed": (VERMILION, "s", "it is fed with")}


def plot_kinds(result: ByKind, path: str | Path, title: str) -> None:
    """By kind: layers until the prediction is settled (mean, 10 % to 90 % of tokens), and the policy's divergence."""
    # A kind is a row; the two sides of a step stand next to each other in it, told apart by marker and colour.
    kinds = [kind for kind in Kind if any(kind in result.kinds(side) for side in STYLES)]
    figure = new_figure(width=11, height=1.6 + 0.42 * len(kinds))
    left, right = figure.subplots(1, 2, sharey=True)
    for aside, (side, (colour, marker, label)) in zip((-0.14, 0.14), STYLES.items(), strict=True):
        shown = result.kinds(side)
        places = np.array([kinds.index(kind) + aside for kind in shown])
        layers = [np.concatenate(result.values(side, kind, "layers")) for kind in shown]
        low, high = ([np.quantile(one, at, method="inverted_cdf") for one in layers] for at in (0.1, 0.9))
        left.hlines(places, low, high, color=colour, alpha=0.35, linewidth=5)
        left.plot([one.mean() for one in layers], places, marker, color=colour, label=f"kind {label}")
        means = [result.mean(side, kind, "kl") for kind in shown]
        values = np.array([max(mean.value, 0.0) for mean in means])
        arms = np.nan_to_num([mean.arm for mean in means])
        errors = [np.minimum(arms, values), arms]
        right.errorbar(values, places, xerr=errors, fmt=marker, color=colour, capsize=3, elinewidth=1)
    left.set_yticks(range(len(kinds)), [kind.value for kind in kinds])
    left.invert_yaxis()
    left.set_xlim(0, result.num_layers * 1.03)
    left.xaxis.get_major_locator().set_params(integer=True)
    left.set_xlabel(f"layers until settled, of {result.num_layers}\n(mean; bars: 10 % to 90 % of tokens)")
    right.set_xlim(left=0)
    right.set_xlabel(f"KL divergence from full depth, nats (bars: 95 %)\n{result.policy}")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    save_figure(figure, path, title)


LEAST = 1e-3
"""Nats; what costs less is drawn as this."""


def plot_layers(result: LayerLoss, path: str | Path, title: str) -> None:
    """A panel for each step from which windows are skipped: KL divergence by first layer and layers skipped."""
    from matplotlib.colors import LinearSegmentedColormap, LogNorm

    steps = result.from_steps
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
    save_figure(figure, path, title)


PART_STYLES = {"block": (INK, "o"), "attention": (BLUE, "s"), "mlp": (VERMILION, "^")}
BESIDE: dict[str, Any] = {"loc": "outside right center", "fontsize": "small", "frameon": False}
ABOVE = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": 3, "frameon": False, "fontsize": "small"}


def plot_saturation(result: Saturation, path: str | Path, title: str) -> None:
    """By generation step, and the share of tokens settled after each layer."""
    figure = new_figure(width=11, height=4.2)
    left, right = figure.subplots(1, 2)
    groups = result.by_step()
    places = np.arange(len(groups))
    means = [found.layers.mean() for _, found in groups]
    low, high = (
        [np.quantile(found.layers, share, method="inverted_cdf") for _, found in groups] for share in (0.1, 0.9)
    )
    left.fill_between(places, low, high, color=BLUE, alpha=0.25, linewidth=0, label="10 % to 90 % of tokens")
    left.plot(places, means, "o-", color=BLUE, label="mean")
    left.set_xticks(places, [steps_in_words(group) for group, _ in groups])
    left.set_ylim(0, result.num_layers * 1.03)
    left.set_xlabel(STEPS)
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
    save_figure(figure, path, title)


def plot_perplexity(result: Perplexity, path: str | Path, title: str) -> None:
    """The logarithm of the perplexity at every step, the mean of -log p, and how many answers reach the step."""
    figure = new_figure(width=8, height=5)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    values, counts = result.by_step()
    upper.plot(np.arange(len(values)), values, ".", color=GREY, label="one step")
    groups = step_groups(result.longest)
    means = [result.at(group)[1] for group in groups]
    edges = np.array([*(group.start for group in groups), groups[-1].stop]) - 0.5
    upper.stairs(means, edges, baseline=None, color=BLUE, linewidth=2, label="groups of steps")
    positive = values[values > 0]
    # A step where the model is certain of every token has the value 0, which a plain logarithmic axis would drop: this
    # one is logarithmic down to the power of ten below the least value, and linear from there to 0.
    least = 10 ** np.floor(np.log10(positive.min())) if len(positive) else 1.0
    if len(positive):
        upper.set_yscale("symlog", linthresh=least, linscale=0.5)
    upper.set_ylim(-least / 5, 1.5 * values.max() if len(positive) else least)
    upper.set_ylabel("log of the perplexity, nats" + ("\n(logarithmic above 0)" if len(positive) else ""))
    upper.legend(**ABOVE)
    lower.stairs(counts, np.arange(len(values) + 1) - 0.5, fill=True, color=ORANGE)
    lower.set_ylabel("answers")
    lower.set_ylim(bottom=0)
    lower.set_xlabel(STEPS)
    lower.set_xlim(-0.5, len(values) - 0.5)
    for axis in (lower.xaxis, lower.yaxis):
        axis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    figure.align_ylabels()
    save_figure(figure, path, title)


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
                filled = {} if kind == 0 else {"markerfacecolor": "none"}
                name = f"{NAMES[place]}, {ROWS[kind]} tokens"
                axes.plot(layers, values[kind, place], style, marker=marker, color=colour, label=name, **filled)
        axes.set_xlabel("layer (0 is the first)")
        axes.set_ylabel(label)
        axes.set_yscale(scale)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    # Filled by columns: a column for each part, answers above prompts.
    order = [kind * len(PARTS) + place for place in range(len(PARTS)) for kind in range(len(ROWS))]
    figure.legend(
        [handles[place] for place in order],
        [labels[place] for place in order],
        loc="outside lower center",
        ncols=len(PARTS),
        fontsize="small",
        frameon=False,
    )
    save_figure(figure, path, title)


def plot_copying(result: Copying, path: str | Path, title: str) -> None:
    """A line for each number of copied layers, over the step from which they are copied; bars are 95 % intervals."""
    label = "generation step (from 0) from which they are copied; below it, the answers that reach it"
    most = max(outcome.cut_off for outcomes in result.outcomes for outcome in outcomes)
    cut_off = f"cut off at {result.max_tokens} tokens: {result.full.cut_off} at full depth, at most {most} when copied"
    _plot_grids({f"bars: 95 % intervals; {cut_off}": result}, 8, label, path, title)


def plot_perturbing(result: Perturbing, path: str | Path, title: str) -> None:
    """As `plot_copying`, over the one step at which layers are copied; a panel for each kind of entries."""
    label = "the generation step (from 0) that is perturbed; below it, the answers that reach it"
    panels = {f"entries {entries}; bars: 95 % intervals": grid for entries, grid in result.grids.items()}
    _plot_grids(panels, 12, label, path, title)


def _plot_grids(grids: dict[str, Copying], width: float, label: str, path: str | Path, title: str) -> None:
    figure = new_figure(width=width, height=4.8)
    panels = figure.subplots(1, len(grids), sharey=True, squeeze=False)[0]
    for axes, (heading, grid) in zip(panels, grids.items(), strict=True):
        _draw_grid(axes, grid)
        axes.set_xlabel(label)
        axes.set_title(heading, fontsize="small")
    figure.legend(*panels[0].get_legend_handles_labels(), title="last layers copied", **BESIDE)
    save_figure(figure, path, title)


def _draw_grid(axes: Any, result: Copying) -> None:
    places = np.arange(len(result.steps))
    aside = min(0.08, 0.6 / len(result.layers))  # beside each other, so that no bar or marker hides another
    for number, (layers, outcomes) in enumerate(zip(result.layers, result.outcomes, strict=True)):
        shares = np.array([outcome.share for outcome in outcomes])
        low, high = ([getattr(outcome.interval, end) for outcome in outcomes] for end in ("low", "high"))
        at = places + aside * (number - (len(result.layers) - 1) / 2)
        colour = line_ramp(number / max(len(result.layers) - 1, 1))
        style = {"color": colour, "linewidth": 1.5, "markersize": 6, "capsize": 3, "elinewidth": 1}
        errors = [100 * (shares - low), 100 * (high - shares)]
        axes.errorbar(at, 100 * shares, errors, marker=MARKERS[number % len(MARKERS)], label=f"{layers}", **style)
    axes.axhline(100 * result.full.share, color=INK, linestyle="--", linewidth=1, label="0 (full depth)")
    axes.set_xticks(places, [f"{step}\n{result.reaching(step)}" for step in result.steps])
    axes.set_xlim(-0.5, len(places) - 0.5)
    axes.set_ylim(-3, 103)
    axes.set_ylabel(f"{result.measure}, %")
    axes.grid(alpha=0.3)


COLUMNS = 96
"""Characters on a line of a drawn sample."""


def plot_sample(sample: Sample, path: str | Path, title: str, headings: list[str]) -> None:
    """The answers as text under the end of their prompt, every token on the colour of its depth.

    `headings` has one for each answer. The depth is also written below a token where it differs from the one before,
    because neighbouring depths have neighbouring colours.
    """
    colours = depth_colours(sample.depths)
    pieces = [_lines(answer) for answer in sample.answers]
    is_new = [not place or one.prompt != sample.answers[place - 1].prompt for place, one in enumerate(sample.answers)]
    height = sum(1.1 * new + 1.5 + LINE * len(lines) for new, lines in zip(is_new, pieces, strict=True))
    figure = new_figure(width=0.4 + 0.082 * COLUMNS, height=0.9 + 0.26 * height)
    axes = figure.subplots()
    axes.set_xlim(0, COLUMNS)
    axes.set_ylim(height, 0)
    axes.axis("off")
    row = 0.0
    for new, answer, heading, lines in zip(is_new, sample.answers, headings, pieces, strict=True):
        if new:
            axes.text(0, row + 0.5, _plain(_prompt_end(answer.prompt)), va="center", family="monospace", fontsize=9)
            row += 1.1
        axes.text(0, row + 0.5, _plain(heading), va="center", fontsize=10, fontweight="bold")
        row += 1
        for line in lines:
            _draw_line(axes, line, row, colours)
            row += LINE
        row += 0.5
    _draw_legend(axes, colours, sample.num_layers)
    save_figure(figure, path, _plain(title))


LINE = 1.6
"""Height of a line of tokens and of the depths below them, in lines of text."""


def _prompt_end(prompt: str) -> str:
    """The last characters of a prompt, as one line that fits: prompts of one kind often begin alike."""
    text = "Prompt: " + prompt.replace("\n", "\u21b5")
    return text if len(text) <= COLUMNS else "Prompt: \u2026" + text[-(COLUMNS - 9) :]


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


def _draw_line(axes: Any, line: list[tuple[str, int]], row: float, colours: dict[int, tuple[str, str]]) -> None:
    from matplotlib.patches import Rectangle

    column, before = 0, None
    for text, depth in line:
        if not text:
            continue
        back, letters = colours[depth]
        axes.add_patch(Rectangle((column, row + 0.06), len(text), 0.88, facecolor=back, linewidth=0))
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
        if depth != before:
            axes.text(column + 0.1, row + 1.2, f"{depth}", ha="left", va="center", fontsize=6.5)
        column, before = column + len(text), depth


def _draw_legend(axes: Any, colours: dict[int, tuple[str, str]], num_layers: int) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=back, label=f"{depth}") for depth, (back, _) in colours.items()]
    axes.legend(
        handles=patches,
        title=f"layers run for a token, of {num_layers}; written below it where they change",
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
