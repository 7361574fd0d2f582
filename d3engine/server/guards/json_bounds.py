"""How deep a JSON text nests and how long its numbers are, found before any parser sees it.

The one idea: what a parser would recurse into or grow over is counted first, in passes that take time in proportion to
the text and nothing else, whatever stands in it.
"""

from __future__ import annotations

import re
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from d3engine.server.errors import RequestError, invalid

Bytes: TypeAlias = npt.NDArray[np.uint8]

MAX_DEPTH = 64
MAX_DIGITS = 64

LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (MAX_DIGITS + 1))
QUOTE = ord('"')
STEP_OF = np.zeros(256, np.int8)
STEP_OF[list(b"[{")] = 1
STEP_OF[list(b"]}")] = -1


def check_json_bounds(text: bytes) -> None:
    """Raise `RequestError` for a text that nests deeper than 64, or has a number of more than 64 digits in a row."""
    bare = _without_strings(text)
    if LONG_NUMBER.search(bare.tobytes()):
        raise _unfit(f"a number has more than {MAX_DIGITS} digits")
    if nesting(bare) > MAX_DEPTH:
        raise _unfit(f"it nests deeper than {MAX_DEPTH} objects and lists")


def _without_strings(text: bytes) -> Bytes:
    """What stands outside of strings, and the quotation marks that end them."""
    marks = text.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in text else text
    characters = np.frombuffer(marks, np.uint8)
    quotes_so_far = np.cumsum(characters == QUOTE, dtype=np.uint8)  # of which only the last bit is looked at
    bare: Bytes = characters[quotes_so_far & 1 == 0]
    return bare


def nesting(bare: Bytes) -> int:
    """How many brackets are open at most."""
    steps = STEP_OF[bare]
    return int(np.cumsum(steps[steps != 0], dtype=np.int32).max(initial=0))


def _unfit(why: str) -> RequestError:
    return invalid(None, f"The body is JSON that this server does not read: {why}.", "json_out_of_bounds")
