"""What a terminal that is narrow is shown: no figure cut, no word broken."""

import io
import logging
import sys

import pytest
from invoking import Terminal
from rich.cells import cell_len
from rich.text import Text

from d3engine.cli import commands as verbosity
from d3engine.cli.commands import say_error
from d3engine.cli.terminal import print_table

NOTE = "no bridges beside the weights: --depth nested crosses nothing, and 日本語 takes two columns a character"

HEADER = ("depth", "exact match", "95 % interval", "minus first, points", "tokens/s")
ROWS = (
    ("Full depth", "100.0% (5)", "56.6% to 100.0%", "", "2,202.5"),
    ("D3, alpha 0.8, start 0.6", "98.0% (4)", "53.1% to 99.9%", "+0.0 (-43.4 to +43.4)", "3,410.9"),
)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Sets the width: `wide.setenv("COLUMNS", "60")`."""
    monkeypatch.setenv("TERM", "xterm")
    return monkeypatch


def shown(width: int, wide: pytest.MonkeyPatch, rows: tuple[tuple[str, ...], ...] = ROWS) -> list[str]:
    terminal = Terminal()
    with wide.context() as patch:
        patch.setenv("COLUMNS", str(width))
        patch.setattr(sys, "stdout", terminal)
        print_table("word-problems: cost", HEADER, rows, ["Differences are of the same questions, asked twice."])
    return Text.from_ansi(terminal.getvalue()).plain.splitlines()


@pytest.mark.parametrize("width", [40, 50, 60, 70, 80, 90, 100, 120])
def test_a_table_keeps_every_figure_whole_at_any_width(width: int, wide: pytest.MonkeyPatch) -> None:
    lines = shown(width, wide)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for cell in (cell for row in ROWS for cell in row[1:]):
        assert cell in text
    for word in " ".join((*HEADER, ROWS[1][0])).split():
        assert word in text
    assert "…" not in text


def test_one_that_is_narrower_than_a_figure_breaks_it_at_spaces(wide: pytest.MonkeyPatch) -> None:
    words = " ".join(shown(24, wide)).split()
    for cell in (cell for row in ROWS for cell in row):
        assert set(cell.split()) <= set(words)


def test_print_table_drops_rules_then_stacks_cells_when_narrow(wide: pytest.MonkeyPatch) -> None:
    """A narrow table has no rules, and a narrower one has a line for each cell."""
    assert "┃" in "".join(shown(100, wide))
    bare = shown(70, wide)
    assert "┃" not in "".join(bare)
    assert any(line.split()[:1] == ["Full"] and line.endswith("2,202.5") for line in map(str.rstrip, bare))
    stacked = [line.rstrip() for line in shown(60, wide)]
    assert stacked == [
        "word-problems: cost",
        "depth                Full depth",
        "exact match          100.0% (5)",
        "95 % interval        56.6% to 100.0%",
        "tokens/s             2,202.5",
        "",
        "depth                D3, alpha 0.8, start 0.6",
        "exact match          98.0% (4)",
        "95 % interval        53.1% to 99.9%",
        "minus first, points  +0.0 (-43.4 to +43.4)",
        "tokens/s             3,410.9",
        "",
        "Differences are of the same questions, asked twice.",
    ]


def test_print_table_reads_no_markup_and_shows_empty_columns(wide: pytest.MonkeyPatch) -> None:
    """A table reads no markup, and one without rows shows its columns."""
    assert "[bold]" in "".join(shown(60, wide, (("[bold]", "1", "2", "3", "4"),)))
    assert "exact" in "".join(shown(60, wide, ()))


@pytest.mark.parametrize("say", [verbosity.note, logging.getLogger("d3engine").warning, say_error])
def test_messages_wrap_at_spaces_on_a_terminal_alone(say: object, wide: pytest.MonkeyPatch) -> None:
    """Messages wrap at spaces on a terminal, and nowhere else."""
    assert callable(say)
    terminal, pipe = Terminal(), io.StringIO()
    wide.setenv("COLUMNS", "40")
    verbosity.set_verbosity(0, False)
    for stream in (terminal, pipe):
        with wide.context() as patch:
            patch.setattr(sys, "stderr", stream)
            say(NOTE)
    (whole,) = pipe.getvalue().splitlines()
    assert whole.endswith(NOTE)
    lines = terminal.getvalue().splitlines()
    assert len(lines) > 1
    assert max(map(cell_len, lines)) <= 40
    assert " ".join(lines) == whole


def test_messages_keep_long_words_indents_and_columns(wide: pytest.MonkeyPatch) -> None:
    """A word that is too long stands alone in its line, and indents and columns stay."""
    terminal, path = Terminal(), "/" + "long" * 20
    wide.setenv("COLUMNS", "40")
    wide.setattr(sys, "stderr", terminal)
    verbosity.set_verbosity(0, False)
    verbosity.note(f"no file at {path} was found\n  page     http://localhost:8000/\n/help            this text")
    assert terminal.getvalue().splitlines() == [
        "no file at",
        path,
        "was found",
        "  page     http://localhost:8000/",
        "/help            this text",
    ]
