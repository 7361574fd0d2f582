"""What commands write: model text made safe, depth as colour, tables."""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

import typer
from rich.cells import cell_len
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from d3engine.cli.streams import wrapped
from d3engine.research.plots import depth_position, letters_on, ramp

DECEPTIVE = frozenset("\u061c\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that reorder or break a line of text without being seen."""

_WORDS_AND_SPACES = re.compile(r" +|[^ ]+")
_FIGURE = re.compile(r"[-+]?\d.{,30}")  # longer ones are lists: the layers of a model, say


def safe_text(text: str) -> str:
    """`text` without what could steer a terminal or reorder its line; line feeds and tabs stay."""
    return "".join(character for character in text if character in "\n\t" or _is_harmless(character))


def _is_harmless(character: str) -> bool:
    return unicodedata.category(character) not in ("Cc", "Cs") and character not in DECEPTIVE


class DepthColours:
    """The style of each depth from `least` to `most` layers, on a console that has colours; plain elsewhere."""

    def __init__(self, depths: Iterable[int], console: Console, *, wanted: bool = True) -> None:
        self._depths = sorted(set(depths), reverse=True)
        self._console = console
        has_colours = console.is_terminal and console.color_system is not None and not console.no_color
        self.enabled = wanted and has_colours

    def style(self, depth: int) -> Style | None:
        """The colour of a token that ran `depth` layers; None without colours."""
        if not self.enabled:
            return None
        parts = ramp(depth_position(depth, self._depths))
        return Style(bgcolor=Color.from_rgb(*parts), color=Color.parse(letters_on(*parts)))

    def legend(self, num_layers: int) -> None:
        """One line: which colour is which depth."""
        if not self.enabled:
            return
        room = max(2, min(8, (self._console.width - 24) // 5))
        self._console.out("layers run:", end=" ", highlight=False)
        for depth in _spread(self._depths, room):
            self._console.out(f" {depth} ", style=self.style(depth), end="", highlight=False)
        self._console.out(f" of {num_layers}", highlight=False)


def _spread(values: Sequence[int], most: int) -> list[int]:
    """At most `most` of the values, evenly spread, the first and the last included."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


class Writer:
    """Text to stdout as it comes: safe on a terminal, as it is in a pipe.

    With `wrap` lines are indented, and on a terminal broken at spaces; otherwise the terminal breaks them. A word that
    has begun and grows beyond the edge moves to the next line. The space with which most answers begin is not shown,
    but where a pipe gets the text as it is.
    """

    def __init__(self, console: Console, *, wrap: bool = False, indent: str = "") -> None:
        self._console = console
        self._wrap = wrap
        self._indent = indent
        self._width = console.width if console.is_terminal else sys.maxsize
        self._column = 0
        self._word: list[tuple[str, Style | None]] = []  # as far as it stands at the end of the line
        self._is_new = True  # nothing stands here yet of the text that `end_line` will end

    def write(self, text: str, style: Style | None = None) -> None:
        """One piece of text, a token of an answer say, shown at once."""
        if not self._wrap and not self._console.is_terminal:
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        for number, line in enumerate(safe_text(text).split("\n")):
            if number:
                self._break_line()
            self._write_in_line(line, style)

    def write_words(self, text: str) -> None:
        """A whole text, broken between words."""
        for number, word in enumerate(text.split(" ")):
            self.write(f" {word}" if number else word)
        self.end_line()

    def end_line(self) -> None:
        """End a text and its last line."""
        self._break_line()
        self._is_new = True

    def _break_line(self) -> None:
        self._is_new = False
        self._console.out("", highlight=False)
        self._column = 0
        self._word = []

    def _write_in_line(self, text: str, style: Style | None) -> None:
        if not text:
            return
        if self._is_new:
            text = text.removeprefix(" ")
            self._is_new = False
        for part in _WORDS_AND_SPACES.findall(text) if self._wrap else [text]:
            self._write_part(part, style)

    def _write_part(self, part: str, style: Style | None) -> None:
        """Spaces, or a word or a part of one."""
        is_space = part[:1] == " "
        if self._wrap and self._column + cell_len(part) > self._width:
            if is_space:
                self._break_line()
                return
            word, self._word = self._word, []
            before = sum(cell_len(text) for text, _ in word)
            if before < self._column - len(self._indent):
                self._erase(before)
                self._break_line()
                for text, style_of_text in word:
                    self._put(text, style_of_text)
                self._word = word
        self._put(part, style)
        self._word = [] if is_space else [*self._word, (part, style)]

    def _put(self, text: str, style: Style | None) -> None:
        if self._wrap and not self._column:
            self._console.out(self._indent, end="", highlight=False)
            self._column = len(self._indent)
        self._column += cell_len(text)
        self._console.out(text, style=style, end="", highlight=False)

    def _erase(self, cells: int) -> None:
        """Take back what stands last in the line. At the edge the cursor is on the last cell, not behind it."""
        back = cells - (self._column == self._width)
        self._console.file.write((f"\x1b[{back}D" if back > 0 else "") + ("\x1b[K" if cells else ""))


class _Stdout(Console):
    def on_broken_pipe(self) -> None:
        """Raise as any other write does, so that every command ends with one code; rich would end with 1."""
        raise BrokenPipeError


def new_console() -> Console:
    """Stdout, as it is now."""
    return _Stdout(file=sys.stdout, highlight=False, soft_wrap=True)


def layers_by_token(depths: Iterable[int]) -> str:
    """A sentence with runs of equal depths: "16, 14, 12, 9 x 27"."""
    runs = [(depth, len(list(group))) for depth, group in groupby(depths)]
    words = ", ".join(f"{depth} x {count}" if count > 1 else f"{depth}" for depth, count in runs)
    return f"Layers run by each token: {words}."


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> None:
    """A table on a terminal, and its notes below; elsewhere columns that other programs can cut.

    Cells may hold any text. Words and figures are never cut: on a narrow terminal the rules between columns go first,
    and where it has no room for columns at all, each row becomes several lines, one cell on each.
    """
    rows = [[safe_text(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        console = Console()
        console.print(Text(title, style="table.title"), _table(header, rows, console.width), sep="\n")
    else:
        columns = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        typer.echo(title)
        for row in (header, *rows):
            typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, columns, strict=True)).rstrip())
    for said in notes:
        typer.echo(wrapped(said, sys.stdout))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Table:
    ruled = Table()
    bare = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for table, between in ((ruled, 3 * len(header) + 1), (bare, 2 * len(header) - 2)):
        widths = _column_widths(header, rows, width - between)
        if widths is not None:
            for name, column in zip(header, widths, strict=True):
                table.add_column(Text(name), width=column, overflow="fold")
            for row in rows:
                table.add_row(*map(Text, row))  # not markup: what looks like it came from a file
            return table
    return _stacked(header, rows, width)


def _column_widths(header: Sequence[str], rows: Sequence[Sequence[str]], room: int) -> list[int] | None:
    """How wide each column is, of `room` in all; None where a word of some cell would have to be cut.

    Each has its longest word or figure. What is left goes to the narrowest until its cells are on one line, then its
    name: so long texts are what wraps.
    """
    cells = list(zip(*rows, strict=True)) or [()] * len(header)
    columns = list(zip(header, cells, strict=True))
    widths = [max(_widths([name, *column], _unbroken), default=1) for name, column in columns]
    if sum(widths) > room:
        return None
    for wanted in (cells, [(name, *column) for name, column in columns]):
        most = [max(_widths(column, str.splitlines), default=1) for column in wanted]
        while sum(widths) < room and (narrow := [place for place, width in enumerate(widths) if width < most[place]]):
            widths[min(narrow, key=widths.__getitem__)] += 1
    return widths


def _unbroken(cell: str) -> list[str]:
    """The words of a cell; a figure is one with its unit and its interval, "+0.0 (-43.4 to +43.4)"."""
    return [cell] if _FIGURE.fullmatch(cell) else cell.split()


def _widths(cells: Iterable[str], parts: Callable[[str], list[str]]) -> list[int]:
    return [cell_len(part) for cell in cells for part in parts(cell)]


def _stacked(header: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Table:
    """Each row as lines "name  value", empty cells left out."""
    lines = []
    for row in rows:
        lines += [(name, cell) for name, cell in zip(header, row, strict=True) if cell]
        lines.append(("", ""))
    names, values = _column_widths(("", ""), lines, width - 2) or (None, None)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(style="table.header", width=names, overflow="fold")
    table.add_column(width=values, overflow="fold")
    for name, cell in lines:
        table.add_row(Text(name), Text(cell))
    return table
