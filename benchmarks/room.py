"""The figure of room against size: what skipped layers cost models of several sizes, from the committed runs.

    python -m benchmarks.room --plot docs/images/room.png

`d3engine analyze layers MODEL ... --json` makes the figures of another model; docs/explanation/results.md has it whole.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.report import plot_main
from d3engine.depth import D3
from d3engine.research.plots import BLUE, GREEN, ORANGE, new_figure, save_figure

RESULTS = Path(__file__).parent / "results"
MODELS = {
    "layers-smollm2": ("SmolLM2-135M", ORANGE, "o"),
    "layers-qwen2.5-coder-0.5b": ("Qwen2.5-Coder-0.5B", GREEN, "s"),
    "layers-qwen2.5-coder-1.5b": ("Qwen2.5-Coder-1.5B", BLUE, "D"),
}
"""For each run the model's name, its colour and its marker."""


def agreement(run: str) -> dict[int, tuple[float, float]]:
    """By layers skipped: the percentage of tokens whose likeliest stays, by the best window and by D3's.

    Skipped from generation step 1 on. The best window was found on the texts that it was measured on; D3's begins at
    0.8 of the layers, as in the paper for 7B.
    """
    found = json.loads((RESULTS / f"{run}.json").read_text(encoding="utf-8"))
    windows = [one for one in found["windows"] if one["from_step"] == 1]
    by_width: dict[int, tuple[float, float]] = {}
    for width in sorted({one["layers_skipped"] for one in windows}):
        same = {one["first_layer"]: 100 * one["same_first_choice"] for one in windows if one["layers_skipped"] == width}
        by_width[width] = max(same.values()), same[D3(0.9, 0.8).first_layer(found["num_layers"])]
    return by_width


def plot(path: Path) -> None:
    """Draw two lines for each model: the best window of a width, and D3's."""
    figure = new_figure(width=6.4, height=3.6)
    axes = figure.subplots()
    for run, (model, colour, marker) in MODELS.items():
        found = agreement(run)
        best, usual = zip(*found.values(), strict=True)
        axes.plot(list(found), best, color=colour, marker=marker, label=model)
        axes.plot(list(found), usual, color=colour, marker=marker, linestyle=":", fillstyle="none")
    axes.plot([], [], color="grey", label="the best window")
    axes.plot([], [], color="grey", linestyle=":", label="D3's, start 0.8")
    axes.set_xticks(list(agreement(next(iter(MODELS)))))
    axes.set_xlabel("layers skipped from the second token on")
    axes.set_ylabel("same likeliest token, %")
    axes.set_ylim(0, 100)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small", loc="lower left")
    save_figure(figure, path)


main = plot_main("room", __doc__, plot)

if __name__ == "__main__":
    main()
