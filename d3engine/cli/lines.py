"""Sentences to somebody at a terminal, broken at spaces; whole where a program or a file gets them.

The one idea: a terminal breaks a long line wherever it ends, in mid-word too, and only the writer knows its words.
"""

from __future__ import annotations

import os
import re
from typing import TextIO


def wrapped(text: str, stream: TextIO) -> str:
    """`text` as `stream` is to get it: on a terminal no line is longer than that is wide, but for a word that is."""
    if not stream.isatty():
        return text
    width = _width(stream)
    return "\n".join(_broken_at_spaces(line, width) for line in text.split("\n"))


def _width(stream: TextIO) -> int:
    """Columns of a terminal; COLUMNS counts more, as for the tables."""
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given):
        return int(given)
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
