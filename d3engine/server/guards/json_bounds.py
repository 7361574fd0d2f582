"""How deep a JSON text nests, how long its numbers are and how much it holds, found before any parser sees it.

The one idea: what a parser would recurse into or grow over is counted first, while the text comes, so that a hostile
one is refused at the piece that goes too far. The passes take time in proportion to the text and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from d3engine.server.errors import RequestError, invalid

Bytes: TypeAlias = npt.NDArray[np.uint8]

MAX_DEPTH = 64
MAX_DIGITS = 64
MAX_VALUES = 2**19
MAX_CONTAINERS = 2**16
MAX_MEMBERS = 2**16
"""A parser holds the interpreter while it works: so much of the dearest kind takes it a twentieth of a second."""

SHORT = 2**13
"""Bytes of a text of which it is worth while to count first what it could hold at most."""
SLICE_BYTES = 2**16
"""Looked at in one go, which takes one or two thousandths of a second."""

LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (MAX_DIGITS + 1))
LAST_DIGITS = re.compile(rb"[0-9]{0,%d}\Z" % MAX_DIGITS)
QUOTE = ord('"')
STEP_OF = np.zeros(256, np.int8)
STEP_OF[list(b"[{")] = 1
STEP_OF[list(b"]}")] = -1


class JsonBounds:
    """Goes through one text, in whatever pieces it comes."""

    def __init__(self) -> None:
        self._is_in_string = False
        self._backslash = b""
        self._digits = b""
        self._depth = 0
        self._values = self._containers = self._members = 0

    def read(self, piece: bytes) -> Iterator[None]:
        """Look at the next piece, and stop after each slice of it, where others may have their turn.

        Raises `RequestError` for a text that nests deeper than 64, has a number of more than 64 digits in a row, or
        holds more values, objects and lists, or members of objects than are allowed.
        """
        for start in range(0, len(piece), SLICE_BYTES):
            self._look_at(piece[start : start + SLICE_BYTES])
            yield

    def _look_at(self, text: bytes) -> None:
        steps_and_marks = self._outside_of_strings(text)
        bare = self._digits + steps_and_marks.tobytes()
        if LONG_NUMBER.search(bare):
            raise _unfit(f"a number has more than {MAX_DIGITS} digits")
        found = LAST_DIGITS.search(bare)
        bare, self._digits = bare[len(self._digits) :], found[0] if found else b""
        self._nest(STEP_OF[steps_and_marks])
        opened = bare.count(b"[") + bare.count(b"{")
        self._values += bare.count(b",") + opened
        self._containers += opened
        self._members += bare.count(b":")
        for number, most, kind in (
            (self._values, MAX_VALUES, "values"),
            (self._containers, MAX_CONTAINERS, "objects and lists"),
            (self._members, MAX_MEMBERS, "members of objects"),
        ):
            if number > most:
                raise _unfit(f"it holds more than {most} {kind}")

    def _outside_of_strings(self, text: bytes) -> Bytes:
        """What stands outside of strings, and the quotation marks that end them."""
        text = self._backslash + text
        self._backslash = b"\\" if (len(text) - len(text.rstrip(b"\\"))) % 2 else b""  # it escapes what is to come
        marks = text.removesuffix(self._backslash)
        if b"\\" in marks:
            marks = marks.replace(b"\\\\", b"").replace(b'\\"', b"")
        characters = np.frombuffer(marks, np.uint8)
        # Of a count of quotation marks only the last bit is looked at.
        is_inside = (np.cumsum(characters == QUOTE, dtype=np.uint8) + np.uint8(self._is_in_string)) & 1
        if len(is_inside):
            self._is_in_string = bool(is_inside[-1])
        bare: Bytes = characters[is_inside == 0]
        return bare

    def _nest(self, steps: npt.NDArray[np.int8]) -> None:
        depths = self._depth + np.cumsum(steps[steps != 0], dtype=np.int32)
        if not len(depths):
            return
        if depths.max() > MAX_DEPTH:
            raise _unfit(f"it nests deeper than {MAX_DEPTH} objects and lists")
        self._depth = int(depths[-1])


def is_within_bounds(text: bytes) -> bool:
    """Whether a whole text is so short and so plain that it keeps all bounds even if none of it stands in strings.

    Nearly every request is; that something is not says nothing yet.
    """
    is_flat = len(text) <= SHORT and text.count(b"[") + text.count(b"{") <= MAX_DEPTH
    return is_flat and LONG_NUMBER.search(text) is None


def check_json_bounds(text: bytes) -> None:
    """Look at a whole text. Raises `RequestError` as `JsonBounds.read` does."""
    for _ in JsonBounds().read(text):
        pass


def _unfit(why: str) -> RequestError:
    return invalid(None, f"The body is JSON that this server does not read: {why}.", "json_out_of_bounds")
