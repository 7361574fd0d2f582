"""What a terminal that is narrow is shown: no word broken."""

from __future__ import annotations

import io
import logging
import sys

import pytest
from rich.cells import cell_len

from d3engine.cli import verbosity
from d3engine.cli.ending import say_error

NOTE = "no bridges beside the weights: --depth nested crosses nothing, and 日本語 takes two columns a character"


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        """It is."""
        return True


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Sets the width: `wide.setenv("COLUMNS", "60")`."""
    monkeypatch.setenv("TERM", "xterm")
    return monkeypatch


@pytest.mark.parametrize("say", [verbosity.note, logging.getLogger("d3engine").warning, say_error])
def test_what_is_told_breaks_at_spaces_on_a_terminal_and_nowhere_else(say: object, wide: pytest.MonkeyPatch) -> None:
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


def test_a_word_that_is_too_long_stands_alone_and_indents_and_columns_stay(wide: pytest.MonkeyPatch) -> None:
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
