"""The README's chart: Qwen2.5-Coder-1.5B beside llama.cpp, from the committed figures of two other benchmarks.

    python -m benchmarks.headline --plot docs/images/headline.png

`python -m benchmarks.gguf_file` and `python -m benchmarks.speculation` make new figures on another machine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.report import plot_main
from d3engine.research.plots import BLUE, GREY, new_figure, save_figure

RESULTS = Path(__file__).parent / "results"
FILE, DRAFTS = "gguf-coder-1.5b-avx512.json", "speculation-qwen2.5-coder-1.5b-cpu.json"
OURS, PEER = "d3engine", "llama.cpp"


def figures() -> dict[str, dict[str, float]]:
    """Tokens per second of both systems, by what they do."""
    of_file = json.loads((RESULTS / FILE).read_text(encoding="utf-8"))["figures"]
    cells = json.loads((RESULTS / DRAFTS).read_text(encoding="utf-8"))["cells"]
    greedy = {cell["system"]: cell for cell in cells if cell["kind"] == "all" and cell["temperature"] == 0}

    def both(measure: Any) -> dict[str, float]:
        return {system: measure(of_file[system]) for system in (OURS, PEER)}

    return {
        "one answer": both(lambda found: found["rows 1"]["value"]),
        "one answer, with drafts": {
            OURS: greedy["auto"]["tokens_per_second"],
            PEER: greedy["llama.cpp, 3"]["tokens_per_second"],
        },
        "eight answers": both(lambda found: found["rows 8"]["value"]),
        "a prompt of 512 tokens": both(lambda found: 512 / found["prompt 512"]["value"]),
    }


def plot(path: Path) -> None:
    """Draw a pair of bars for each figure, with its number."""
    shown = figures()
    figure = new_figure(width=7.2, height=3.2)
    axes = figure.subplots()
    for place, (system, colour) in enumerate(((PEER, GREY), (OURS, BLUE))):
        values = [pair[system] for pair in shown.values()]
        heights = [-row + 0.36 * (place - 0.5) for row in range(len(shown))]
        bars = axes.barh(heights, values, height=0.34, color=colour, label=system)
        axes.bar_label(bars, fmt="%.0f", padding=3, fontsize="small")
    axes.set_yticks([-row for row in range(len(shown))], list(shown))
    axes.set_xlabel("tokens per second")
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], frameon=False, loc="upper right")
    save_figure(figure, path)


main = plot_main("headline", __doc__, plot)

if __name__ == "__main__":
    main()
