"""The calibration in one picture: the grid of settings, and what each speed costs (the D3 paper's Figure 6).

The one idea: colour is exact match, on cividis, which reads the same with any colour vision; what the colour means is
also written in every cell. The loss that matters is a point or two, so the curve is drawn twice: near full depth, and
whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from d3engine.calibration.outcome import outcome
from d3engine.calibration.scoring import Answers
from d3engine.calibration.search import Calibration, Fate, Trial, best_at_each_speed, grids
from d3engine.depth import D3
from d3engine.errors import require
from d3engine.evaluation.accuracy import wilson_interval
from d3engine.pictures.colours import BLUE, GREY, INK, ORANGE, VERMILION, letters_on
from d3engine.pictures.plots import new_figure, save_figure

CELL = {Fate.FAILED: "x", Fate.CERTIFIED: "✓", Fate.CHOSEN: "★"}
MARKS = {
    Fate.CHOSEN: ("*", VERMILION, 19, "chosen"),
    Fate.CERTIFIED: ("o", BLUE, 9, "certified"),
    Fate.FAILED: ("X", ORANGE, 9, "not certified"),
}
OTHERS = ("o", GREY, 4, "other settings")
GRIDS_IN_A_ROW = 2
NEAR = 3
"""The panel near full depth shows losses of up to so many tolerances."""


def plot_calibration(result: Calibration, title: str, path: str | Path) -> None:
    """Draw one grid for each tail and choice of bridges, and below them the speed-quality curve, to a file (PNG by its
    suffix).

    Raises `InvalidValueError` for a calibration that tried nothing.
    """
    require(result.full is not None, "calibration", outcome(result).value, "one that has tried settings")
    assert result.full is not None
    places = grids(result)
    columns = min(len(places), GRIDS_IN_A_ROW)
    rows = -(-len(places) // columns)
    figure = new_figure(width=11, height=0.6 + 3.2 * rows + 4)
    upper, lower = figure.subfigures(2, 1, height_ratios=[3.2 * rows + 0.3, 4])
    _draw_grids(upper, result, places, rows, columns)
    _draw_curves(lower, result, result.full)
    figure.suptitle(title, fontsize="medium")
    save_figure(figure, Path(path))


def _draw_grids(
    figure: Any, result: Calibration, places: list[tuple[int, str | None]], rows: int, columns: int
) -> None:
    axes = figure.subplots(rows, columns, squeeze=False)
    image = None
    for nth, (tail, bridges) in enumerate(places):
        image = _draw_grid(axes.flat[nth], result, tail, bridges)
        if len(places) > 1:
            crossed = f", {Path(bridges).name}" if bridges else ""
            axes.flat[nth].set_title(f"tail {tail}{crossed}", fontsize="small")
    for unused in axes.flat[len(places) :]:
        unused.axis("off")
    figure.colorbar(image, ax=axes, label="exact match in screening, %", fraction=0.04, pad=0.01)
    meaning = "exact match, %, and layers run for a token; ★ chosen, ✓ certified, x not certified"
    tried = {trial.policy for trial in result.trials}
    if any(policy not in tried for trial in result.trials for policy in trial.candidate.alike):
        meaning += ", = runs the same layers as a setting that was tried"
    figure.suptitle(meaning, fontsize="small")


def _draw_grid(axes: Any, result: Calibration, tail: int, bridges: str | None) -> Any:
    import numpy as np

    cells = {
        (p.alpha, float(p.start)): (p, t)
        for t in result.trials
        for p in t.candidate.alike
        if (p.tail, p.bridges) == (tail, bridges)
    }
    alphas = sorted({alpha for alpha, _ in cells})  # from the top, as in the printed grid
    starts = sorted({start for _, start in cells})
    values = np.full((len(alphas), len(starts)), np.nan)
    for (alpha, start), (_, trial) in cells.items():
        values[alphas.index(alpha), starts.index(start)] = 100 * trial.screened.exact_match
    image = axes.imshow(values, cmap="cividis", vmin=0, vmax=100, aspect="auto")
    for (alpha, start), (policy, trial) in cells.items():
        _write_cell(axes, image, policy, trial, starts.index(start), alphas.index(alpha))
    axes.set_xticks(range(len(starts)), [f"{start:g}" for start in starts])
    axes.set_yticks(range(len(alphas)), [f"{alpha:g}" for alpha in alphas])
    axes.set_xlabel("start")
    axes.set_ylabel("alpha")
    return image


def _write_cell(axes: Any, image: Any, policy: D3, trial: Trial, x: int, y: int) -> None:
    mark = CELL.get(trial.fate, "") if policy == trial.policy else "="
    text = f"{100 * trial.screened.exact_match:.1f} {mark}".rstrip() + f"\n{trial.screened.mean_layers:.1f}"
    colour = letters_on(*image.cmap(image.norm(100 * trial.screened.exact_match), bytes=True)[:3])
    axes.text(x, y, text, ha="center", va="center", fontsize="small", color=colour)


def _draw_curves(figure: Any, result: Calibration, full: Answers) -> None:
    whole, near = figure.subplots(1, 2)
    for axes in (whole, near):
        _draw_curve(axes, result, full)
        axes.set_xlabel(f"layers run for a token, of {result.num_layers}")
        axes.set_ylabel("exact match in screening, %")
        axes.grid(alpha=0.3)
    whole.set_ylim(-3, 103)
    whole.set_title("quality against speed, faster to the right; bars: 95 % intervals", fontsize="small")
    _look_near_full_depth(near, result, full)
    for axes in (whole, near):
        axes.invert_xaxis()
    handles, labels = whole.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small", frameon=False)


def _look_near_full_depth(axes: Any, result: Calibration, answered: Answers) -> None:
    full, points = 100 * answered.exact_match, 100 * result.tolerance.of(answered.exact_match)
    bottom = max(full - NEAR * points, -3)
    inside = [trial.screened for trial in result.trials if 100 * trial.screened.exact_match >= bottom]
    best = max([full, *(100 * answers.exact_match for answers in inside)])
    axes.set_ylim(bottom, min(best + points, 100 + 0.3 * points))
    speeds = [answered.mean_layers, *(answers.mean_layers for answers in inside)]
    margin = 0.05 * (max(speeds) - min(speeds)) + 0.1
    axes.set_xlim(min(speeds) - margin, max(speeds) + margin)
    below = len(result.trials) - len(inside)
    axes.set_title(f"the same near full depth; {below} of {len(result.trials)} settings are below", fontsize="small")


def _draw_curve(axes: Any, result: Calibration, answered: Answers) -> None:
    seen = set()
    for trial in sorted(result.trials, key=lambda trial: trial.fate in MARKS):  # the marked ones last, on top
        marker, colour, size, label = MARKS.get(trial.fate, OTHERS)
        _draw_answers(axes, trial.screened, marker, colour, size, "_" if label in seen else label)
        seen.add(label)
    # Only those of the last round answered the same problems, and can be compared.
    last = max(trial.rounds for trial in result.trials)
    best = [trial.screened for trial in best_at_each_speed([trial for trial in result.trials if trial.rounds == last])]
    line = {"color": GREY, "linewidth": 1, "label": "best at each speed, last round", "zorder": 1}
    axes.plot([answers.mean_layers for answers in best], [100 * answers.exact_match for answers in best], **line)
    _draw_answers(axes, answered, "s", INK, 6, "full depth")
    full, points = 100 * answered.exact_match, 100 * result.tolerance.of(answered.exact_match)
    axes.axhline(full - points, color=INK, linestyle="--", linewidth=1, label=f"full depth - {points:g} points")


def _draw_answers(axes: Any, answers: Answers, marker: str, colour: str, size: float, label: str) -> None:
    """A marker and its 95 % interval; hollow, so that it hides neither the bar nor a neighbour.

    A label that begins with "_" stays out of the legend.
    """
    share = 100 * answers.exact_match
    interval = wilson_interval(answers.correct, len(answers.right))
    errors = [[share - 100 * interval.low], [100 * interval.high - share]]
    style = {"color": colour, "markersize": size, "markerfacecolor": "none", "markeredgewidth": 1.5}
    axes.errorbar(answers.mean_layers, share, errors, fmt=marker, capsize=2.5, elinewidth=1, label=label, **style)
