"""The README's chart, its caption and the figure of room have the committed figures, and no other."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import headline, room

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_what_a_page_says_of_the_chart_is_what_it_shows(page: str) -> None:
    (caption,) = re.findall(r"!\[(.*?)\]\([\w/]*headline\.png\)", (ROOT / page).read_text())
    rounded = [f"{pair[headline.OURS]:.0f} and {pair[headline.PEER]:.0f}" for pair in headline.figures().values()]
    assert re.findall(r"\d+ and \d+", caption) == rounded


def test_the_chart_is_drawn_without_a_model(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    headline.plot(tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("has_peers", [True, False])
def test_measured_chart_has_the_systems_that_are_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_peers: bool
) -> None:
    """Both benchmarks take the options, and transformers has a bar where it is installed."""
    pytest.importorskip("matplotlib")
    asked: list[Any] = []
    file, drafts = (json.loads(path.read_text()) for path in headline.COMMITTED)

    def gguf_file(settings: Any, systems: list[str]) -> dict[str, Any]:
        asked.append((settings.rows, settings.prompts, systems))
        return file | {"figures": dict.fromkeys(systems, file["figures"][headline.OURS])}

    def speculation(settings: Any) -> dict[str, Any]:
        asked.append((settings.systems, settings.limit, settings.peer_lengths))
        return drafts | {"cells": [cell for cell in drafts["cells"] if has_peers or cell["base"] != headline.PEER]}

    monkeypatch.setattr(headline, "find_spec", lambda name: object() if has_peers else None)
    monkeypatch.setattr(headline.gguf_file, "measure", gguf_file)
    monkeypatch.setattr(headline.speculation, "measure", speculation)
    chart, folder = tmp_path / "chart.png", tmp_path / "runs"
    headline.main(["--plot", str(chart), "--measure", str(folder), "--model", "demo", "--draft", "demo"])
    systems = [headline.OURS, headline.PEER, headline.TRANSFORMERS] if has_peers else [headline.OURS]
    assert asked == [((1, 8), (512,), systems), (("none", "auto"), 1, (3,) if has_peers else ())]
    shown = headline.figures((folder / "gguf_file.json", folder / "speculation.json"))
    assert [list(of) for of in shown.values()] == [systems, systems[:2], systems, systems]
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_room_is_drawn_for_every_run_of_layers(tmp_path: Path) -> None:
    """Each committed run has a line, and D3's window never keeps more tokens than the best one."""
    pytest.importorskip("matplotlib")
    assert set(room.MODELS) == {path.stem for path in room.RESULTS.glob("layers-*.json")}
    for run in room.MODELS:
        assert all(0 < usual <= best < 100 for best, usual in room.agreement(run).values())
    room.plot(tmp_path / "room.png")
    assert (tmp_path / "room.png").read_bytes().startswith(b"\x89PNG")
