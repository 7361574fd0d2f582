"""The calibration in one picture: the grid of settings, and what each speed costs (the D3 paper's Figure 6).

The one idea: colour is exact match, on cividis, which reads the same with any colour vision; what the colour means is
also written in every cell.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from d3engine.calibration.search import Calibration, Fate, Trial, best_at_each_speed
from d3engine.colours import BLACK, BLUE, GREY, ORANGE, VERMILION, letters_on
from d3engine.evaluation.accuracy import wilson_interval
from d3engine.plots import new_figure, save_figure

CELL = {
    Fate.REFUTED: "",
    Fate.BEATEN: "",
    Fate.NOT_REACHED: "",
    Fate.FAILED: " x",
    Fate.CERTIFIED: " ✓",
    Fate.CHOSEN: " ★",
}
MARKS = {
    Fate.CHOSEN: ("*", VERMILION, 220, "chosen"),
    Fate.CERTIFIED: ("o", BLUE, 50, "certified"),
    Fate.FAILED: ("X", ORANGE, 60, "not certified"),
}


def plot_calibration(result: Calibration, title: str, path: str | Path) -> None:
    """Draw one grid for each tail, and the speed-quality curve, to a file (PNG by its suffix)."""
    tails = sorted({policy.tail for trial in result.trials for policy in trial.candidate.alike})
    figure = new_figure(width=6.4 * (len(tails) + 1), height=4.8)
    axes = figure.subplots(1, len(tails) + 1, squeeze=False)[0]
    image = None
    for place, tail in enumerate(tails):
        image = _draw_grid(axes[place], result, tail)
    figure.colorbar(image, ax=list(axes[: len(tails)]), label="exact match in screening, %", shrink=0.9)
    _draw_curve(axes[-1], result)
    figure.suptitle(title, fontsize="medium")
    save_figure(figure, Path(path))


def _draw_grid(axes: Any, result: Calibration, tail: int) -> Any:
    import numpy as np

    cells = {(p.alpha, float(p.start)): t for t in result.trials for p in t.candidate.alike if p.tail == tail}
    alphas = sorted({alpha for alpha, _ in cells}, reverse=True)
    starts = sorted({start for _, start in cells})
    values = np.full((len(alphas), len(starts)), np.nan)
    for (alpha, start), trial in cells.items():
        values[alphas.index(alpha), starts.index(start)] = 100 * trial.screened.exact_match
    image = axes.imshow(values, cmap="cividis", vmin=0, vmax=100, aspect="auto")
    for (alpha, start), trial in cells.items():
        _write_cell(axes, image, trial, starts.index(start), alphas.index(alpha))
    axes.set_xticks(range(len(starts)), [f"{start:g}" for start in starts])
    axes.set_yticks(range(len(alphas)), [f"{alpha:g}" for alpha in alphas])
    axes.set_xlabel("start")
    axes.set_ylabel("alpha")
    rows = "exact match, % (★ chosen, ✓ certified, x not certified)\nlayers a token"
    axes.set_title(rows + (f"; tail {tail}" if tail else ""), fontsize="small")
    return image


def _write_cell(axes: Any, image: Any, trial: Trial, x: int, y: int) -> None:
    exact_match = trial.screened.exact_match
    text = f"{100 * exact_match:.0f}{CELL[trial.fate]}\n{trial.screened.mean_layers:.1f}"
    colour = letters_on(*image.cmap(image.norm(100 * exact_match), bytes=True)[:3])
    axes.text(x, y, text, ha="center", va="center", fontsize="small", color=colour)


def _draw_curve(axes: Any, result: Calibration) -> None:
    seen = set()
    for trial in result.trials:
        marker, colour, size, label = MARKS.get(trial.fate, ("o", GREY, 18, "other settings"))
        at = (trial.screened.mean_layers, 100 * trial.screened.exact_match)
        marked = trial.fate in MARKS
        label = "_" if label in seen else label  # matplotlib leaves out what begins so
        axes.scatter(*at, marker=marker, color=colour, s=size, zorder=4 if marked else 2, label=label)
        seen.add(label)
        if marked:
            interval = wilson_interval(trial.screened.correct, len(trial.screened.right))
            reach = [[at[1] - 100 * interval.low], [100 * interval.high - at[1]]]
            axes.errorbar(*at, yerr=reach, color=colour, capsize=3, linewidth=1, zorder=3)
    best = best_at_each_speed(result.trials)
    line = {"color": GREY, "linewidth": 1, "label": "best at each speed", "zorder": 1}
    axes.plot([t.screened.mean_layers for t in best], [100 * t.screened.exact_match for t in best], **line)
    full = 100 * result.full.exact_match
    axes.scatter(result.full.mean_layers, full, marker="s", color=BLACK, s=40, label="full depth", zorder=3)
    points = 100 * result.tolerance
    axes.axhline(full - points, color=BLACK, linestyle="--", linewidth=1, label=f"full depth - {points:g} points")
    axes.set_xlabel(f"layers run for a token, of {result.num_layers}")
    axes.set_ylabel("exact match in screening, %")
    axes.set_ylim(-3, 103)
    axes.invert_xaxis()
    axes.grid(alpha=0.3)
    axes.set_title("quality against speed (faster to the right; bars: 95 % intervals)", fontsize="small")
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, frameon=False)
