"""Stdin, stdout and stderr in UTF-8, usable whatever the process was started with."""

from __future__ import annotations

import os
import re
import sys
from typing import Any, TextIO

from d3engine.errors import integer_in


def prepare_streams() -> None:
    """Make stdin, stdout and stderr safe to use; imports nothing slow."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller: its number must not go to the next file opened
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115
    is_ascii = str(sys.stdin.encoding).lower() in ("ascii", "us-ascii", "ansi_x3.4-1968")
    _reconfigure(sys.stdin, **({"encoding": "utf-8"} if is_ascii else {}), errors="surrogateescape")
    for stream in (sys.stdout, sys.stderr):
        _reconfigure(stream, errors="backslashreplace")


def _reconfigure(stream: Any, **settings: str) -> None:
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(**settings)


def discard_stdout() -> None:
    """Let what is still to be written to stdout go nowhere, so that the interpreter does not fail on it at its end."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):  # no real file, as under a test
        pass


def given_text(text: str) -> str:
    """A text of the command line as UTF-8, also where the locale took its bytes for something else."""
    return text if is_unicode(text) else os.fsencode(text).decode("utf-8", "surrogateescape")


def is_unicode(text: str) -> bool:
    """Whether a text holds no byte that is no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def wrapped(text: str, stream: TextIO) -> str:
    """`text` as `stream` is to get it: on a terminal no line is longer than that is wide, but for a word that is."""
    if not stream.isatty():
        return text
    width = _width(stream)
    return "\n".join(_broken_at_spaces(line, width) for line in text.split("\n"))


def _width(stream: TextIO) -> int:
    """Columns of a terminal; COLUMNS counts more, as for the tables."""
    if given := integer_in(os.environ.get("COLUMNS", "")):
        return given
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):  # no real file, as under a test
        return 80


def _broken_at_spaces(line: str, width: int) -> str:
    from rich.cells import cell_len  # slow to import, and most commands have nothing to say

    lines = [""]
    for word in re.findall(" *[^ ]+", line):  # with the spaces before it, which keep columns and indents
        if lines[-1].strip() and cell_len(lines[-1] + word) > width:
            lines.append(word.lstrip(" "))
        else:
            lines[-1] += word
    return "\n".join(lines)
