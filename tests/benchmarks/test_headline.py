"""The README's chart, its caption and the figure of room have the committed figures, and no other."""

import re
from pathlib import Path

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


def test_room_is_drawn_for_every_run_of_layers(tmp_path: Path) -> None:
    """Each committed run has a line, and D3's window never keeps more tokens than the best one."""
    pytest.importorskip("matplotlib")
    assert set(room.MODELS) == {path.stem for path in room.RESULTS.glob("layers-*.json")}
    for run in room.MODELS:
        assert all(0 < usual <= best < 100 for best, usual in room.agreement(run).values())
    room.plot(tmp_path / "room.png")
    assert (tmp_path / "room.png").read_bytes().startswith(b"\x89PNG")
