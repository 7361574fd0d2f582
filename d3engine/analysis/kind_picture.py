"""The picture of `d3engine analyze kinds`. Matplotlib is imported where it is drawn.

The one idea: a kind is a row, and the two sides of a step stand beside each other in it, told apart by marker and
colour.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from d3engine.analysis.by_kind import ByKind
from d3engine.analysis.kinds import Kind
from d3engine.pictures.colours import BLUE, VERMILION
from d3engine.pictures.plots import new_figure, save_figure

STYLES = {"yielded": (BLUE, "o", "of the token that the step yields"), "fed": (VERMILION, "s", "it is fed with")}


def plot_kinds(result: ByKind, path: str | Path, title: str) -> None:
    """By kind: layers until the prediction is settled (mean, 10 % to 90 % of tokens), and the policy's divergence."""
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
    figure.suptitle(title, fontsize="medium")
    save_figure(figure, Path(path))
