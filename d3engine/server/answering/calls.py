"""Calls of functions, read from the text of an answer as it comes.

The one idea: arguments are passed on as the model writes them, letter by letter, so a stream of them is never behind;
only where one call ends and the next begins is found out here.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass

from d3engine.server.asking.tools import Calling

_HEAD = re.compile(
    r'[\s\[\],;}]*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([\w-]+)"\s*,'
    r'\s*"(?:parameters|arguments)"\s*:\s*(?=\{)'
)
"""What stands between two calls, and before the first."""

_LONGEST_HEAD = 300
"""Characters in which a call must have begun that a model makes by itself; otherwise the answer is text."""


@dataclass(frozen=True)
class Piece:
    """What is new: of the text, or of the call `index`; `name` comes once, with the `id` of the call."""

    text: str
    index: int | None = None
    id: str | None = None
    name: str | None = None


class CallReader:
    """Of one answer."""

    def __init__(self, calling: Calling) -> None:
        self._calling = calling
        self.num_calls = 0
        self._waiting = ""
        self._is_text = False
        self._arguments: _Arguments | None = None

    def read(self, text: str, *, is_last: bool) -> list[Piece]:
        """Take what is new of the answer."""
        if self._calling.kind == "named":
            begun = [self._begin(self._calling.names[0])] if not self.num_calls else []
            return [*begun, *([Piece(text, 0)] if text else [])]
        self._waiting += text
        found: list[Piece] = []
        while self._waiting and (new := self._next()) is not None:
            found.append(new)
        if is_last and self._waiting and not self.num_calls:
            found += self._all_as_text()
        return [piece for piece in found if piece.text or piece.name]

    def _next(self) -> Piece | None:
        """The next piece of what waits; None where more must come first."""
        if self._is_text:
            return self._all_as_text()[0]
        if self._arguments is not None:
            end = self._arguments.end(self._waiting)
            piece, self._waiting = self._waiting[:end], self._waiting[end:]
            if self._arguments.is_over:
                self._arguments = None
            return Piece(piece, self.num_calls - 1)
        head = _HEAD.match(self._waiting)
        if head is not None and head[1] in self._calling.names:
            self._waiting = self._waiting[head.end() :]
            self._arguments = _Arguments()
            return self._begin(head[1])
        return self._all_as_text()[0] if self._must_be_text(head is not None) else None

    def _must_be_text(self, is_other_call: bool) -> bool:
        """Whether an answer that might call a function does not."""
        if self._calling.kind != "auto" or self.num_calls:
            return False
        begins = self._waiting.lstrip()
        return is_other_call or len(begins) > _LONGEST_HEAD or (begins != "" and not begins.startswith("{"))

    def _all_as_text(self) -> list[Piece]:
        self._is_text = True
        text, self._waiting = self._waiting, ""
        return [Piece(text)]

    def _begin(self, name: str) -> Piece:
        self.num_calls += 1
        return Piece("", self.num_calls - 1, f"call_{uuid.uuid4().hex[:24]}", name)


class _Arguments:
    """A JSON object on its way: where it ends."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False
        self.is_over = False

    def end(self, text: str) -> int:
        """How many characters of `text`, which goes on from the last one, belong to it."""
        for place, char in enumerate(text):
            if self._in_string:
                self._in_string = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    self.is_over = True
                    return place + 1
        return len(text)
