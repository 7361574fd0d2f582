"""How much of itself a model can leave out: tokens that stay the same over the layers skipped, by the model's size.

    python -m benchmarks.room --plot docs/images/room.png

The figures are the committed ones of `d3engine analyze layers`, of the cheapest window of each width.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.pages import run
from d3engine.research.plots import BLUE, GREEN, MARKERS, ORANGE, new_figure, save_figure

MODELS = {"smollm2": "135 M", "qwen2.5-coder-0.5b": "0.5 B", "qwen2.5-coder-1.5b": "1.5 B"}
"""Whose runs are drawn, and their parameters."""


def room(model: str) -> dict[float, float]:
    """Share of the layers left out -> share of tokens whose likeliest one stays, of the window that keeps most."""
    found = run(f"layers-{model}")
    windows: dict[float, float] = {0.0: 1.0}
    for one in found["windows"]:
        share = one["layers_skipped"] / found["num_layers"]
        windows[share] = max(windows.get(share, 0.0), one["same_first_choice"])
    return windows


def plot(path: Path) -> None:
    """Draw a line for each model."""
    figure = new_figure(width=6.4, height=3.2)
    axes = figure.subplots()
    for (model, size), colour, marker in zip(MODELS.items(), (ORANGE, GREEN, BLUE), MARKERS, strict=False):
        shares = room(model)
        axes.plot(
            [100 * share for share in shares],
            [100 * same for same in shares.values()],
            color=colour,
            marker=marker,
            label=f"{model}, {size}",
        )
    axes.set_xlabel("layers left out of generated tokens, % of all")
    axes.set_ylabel("same likeliest token, %")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    save_figure(figure, path)


def main() -> None:
    """Draw the figure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.room", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plot", metavar="FILE", type=Path, required=True, help="the PNG file to draw")
    plot(parser.parse_args().plot)


if __name__ == "__main__":
    main()
