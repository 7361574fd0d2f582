"""The page on speculative decoding quotes the committed figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COLUMNS = ("auto", "draft", "lookup", "llama.cpp, 3")


@pytest.mark.parametrize(("temperature", "how"), [(0.0, "greedy"), (0.7, "temperature 0.7")])
def test_page_has_the_ratios_of_the_committed_run(temperature: float, how: str) -> None:
    report = json.loads((ROOT / "benchmarks/results/speculation-qwen2.5-coder-1.5b-cpu.json").read_text())
    ratios = {
        (cell["system"], cell["kind"]): "{median:.2f} ({low:.2f}-{high:.2f})".format(**cell["ratio"])
        for cell in report["cells"]
        if cell["temperature"] == temperature
    }
    page = (ROOT / "docs/how-to/speculative.md").read_text()
    for kind in ("code", "problems", "edits", "chats"):
        cells = " | ".join(ratios.get((system, kind), "-") for system in COLUMNS)
        assert f"| {kind}, {how} | {cells} |" in page


def test_page_has_the_gains_of_a_batch() -> None:
    report = json.loads((ROOT / "benchmarks/results/speculation-qwen2.5-coder-1.5b-batch4-cpu.json").read_text())
    of_kinds = [cell for cell in report["cells"] if cell["system"] == "auto" and cell["kind"] != "all"]
    gains = sorted(cell["ratio"]["median"] for cell in of_kinds)
    said = f"open lengths gained {gains[0]:.2f} to {gains[-1]:.2f} times"
    assert said in " ".join((ROOT / "docs/how-to/speculative.md").read_text().split())
