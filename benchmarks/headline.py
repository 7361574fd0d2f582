"""The README's chart: Qwen2.5-Coder-1.5B beside llama.cpp, from figures of two other benchmarks.

    python -m benchmarks.headline --plot docs/images/headline.png         # of the committed runs
    python -m benchmarks.headline --measure FOLDER --plot headline.png    # of this machine, in some ten quiet minutes

What is measured here is less than the committed runs have, beside llama.cpp and transformers where these are installed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import gguf_file, speculation
from benchmarks.gguf_file import EXACT, LLAMA_CPP, OURS, TRANSFORMERS
from d3engine.engine.model_directory import model_directory
from d3engine.research.plots import BLUE, GREY, ORANGE, new_figure, save_figure

RESULTS = Path(__file__).parent / "results"
COMMITTED = RESULTS / "gguf-coder-1.5b-avx512.json", RESULTS / "speculation-qwen2.5-coder-1.5b-cpu.json"
MODEL, DRAFT = "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"
PEER, PEER_LENGTH = LLAMA_CPP, 3
COLOURS = {TRANSFORMERS: ORANGE, PEER: GREY, OURS: BLUE}

Files = tuple[Path, Path]


def measure(folder: Path, model: str, draft: str) -> Files:
    """Run both benchmarks here, on two GGUF files or what names them; the files of their figures."""
    folder.mkdir(parents=True, exist_ok=True)
    target, drafter = (str(model_directory(one)) for one in (model, draft))
    has_peer = find_spec("llama_cpp") is not None
    file, drafts = folder / "gguf_file.json", folder / "speculation.json"
    few = ["--rounds", "1", "--rows", "1", "8", "--prompts", "512"]
    few += ["--with-transformers"] if find_spec("transformers") else []
    left_out = [EXACT] if has_peer else [EXACT, PEER]
    gguf_file.main(["--model", target, *few, "--without", *left_out, "--json", str(file)])
    few = ["--systems", "none", "auto", "--temperatures", "0", "--limit", "1", "--tokens", "128", "--checked", "0"]
    lengths = [str(PEER_LENGTH)] if has_peer else []
    given = ["--model", target, "--draft", drafter, *few, "--peer-lengths", *lengths, "--json", str(drafts)]
    speculation.main(given)
    return file, drafts


def figures(files: Files = COMMITTED) -> dict[str, dict[str, float]]:
    """Tokens per second of each system, by what it does."""
    file, drafts = (json.loads(path.read_text(encoding="utf-8")) for path in files)
    of_file = {system: found for system, found in file["figures"].items() if system in COLOURS}
    greedy = {cell["system"]: cell for cell in drafts["cells"] if cell["kind"] == "all" and cell["temperature"] == 0}

    def each(rate: Callable[[Mapping[str, Any]], float]) -> dict[str, float]:
        return {system: rate(found) for system, found in of_file.items()}

    drafting = {OURS: "auto", PEER: f"{PEER}, {PEER_LENGTH}"}
    return {
        "one answer": each(lambda found: found["rows 1"]["value"]),
        "one answer, with drafts": {
            system: greedy[name]["tokens_per_second"] for system, name in drafting.items() if name in greedy
        },
        "eight answers": each(lambda found: found["rows 8"]["value"]),
        "a prompt of 512 tokens": each(lambda found: 512 / found["prompt 512"]["value"]),
    }


def plot(path: Path, files: Files = COMMITTED) -> None:
    """Draw a bar for each system and figure, with its number."""
    shown = figures(files)
    systems = [system for system in COLOURS if system in shown["one answer"]]
    figure = new_figure(width=7.2, height=3.2)
    axes = figure.subplots()
    height = 0.72 / len(systems)
    for place, system in enumerate(systems):
        rates = {-row: of[system] for row, of in enumerate(shown.values()) if system in of}
        offset = height * (place - (len(systems) - 1) / 2)
        heights = [row + offset for row in rates]
        bars = axes.barh(heights, list(rates.values()), height=0.95 * height, color=COLOURS[system], label=system)
        axes.bar_label(bars, fmt="%.0f", padding=3, fontsize="small")
    axes.set_yticks([-row for row in range(len(shown))], list(shown))
    axes.set_xlabel("tokens per second")
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], frameon=False, loc="upper right")
    save_figure(figure, path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the chart, of new figures where these are asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.headline", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plot", metavar="FILE", type=Path, required=True, help="the PNG file to draw")
    parser.add_argument("--measure", metavar="FOLDER", type=Path, help="measure here, and keep the figures there")
    parser.add_argument("--model", default=MODEL, help="a GGUF file to measure [%(default)s]")
    parser.add_argument("--draft", default=DRAFT, help="a GGUF file that drafts for it [%(default)s]")
    given = parser.parse_args(arguments)
    plot(given.plot, measure(given.measure, given.model, given.draft) if given.measure else COMMITTED)


if __name__ == "__main__":
    main()
