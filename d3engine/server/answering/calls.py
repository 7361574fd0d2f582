"""Calls of functions, read from the text of an answer as it comes.

The one idea: arguments are passed on as the model writes them, letter by letter, so a stream of them is never behind;
only where one call ends and the next begins is found out here.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from d3engine.server.asking.tool_styles import CallStyle
from d3engine.server.asking.tools import SPACE, Calling, bare_head

_OPENING = "<tool_call>"
_HEAD = re.compile(
    r'(?:[\s\[\],;}]|</?tool_call>|```(?:json)?)*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([\w-]+)"\s*,'
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
        self._awaits_opening = self._may_be_bare = calling.kind == "auto" and calling.style is CallStyle.HERMES
        self._arguments: _Arguments | None = None

    @property
    def is_cut(self) -> bool:
        """Whether the arguments of the last call are incomplete, as a stop string may leave them."""
        return self._arguments is not None

    def read(self, text: str, *, is_last: bool) -> list[Piece]:
        """Take what is new of the answer."""
        if self._calling.kind == "named" and self._calling.style is None:
            begun = [self._begin(self._calling.names[0])] if not self.num_calls else []
            return [*begun, *([Piece(text, 0)] if text else [])]
        self._waiting += text
        found: list[Piece] = []
        while self._waiting and (new := self._next()) is not None:
            found.append(new)
        if is_last and self._calling.kind == "auto" and self._waiting and not self.num_calls:
            is_form = self._calling.style is CallStyle.HERMES and not self._awaits_opening
            found += [] if is_form or _OPENING[:6] in self._waiting else self._all_as_text()
        return [piece for piece in found if piece.text or piece.name]

    def _next(self) -> Piece | None:
        """The next piece of what waits; None where more must come first."""
        if self._is_text:
            return self._all_as_text()[0]
        if self._may_be_bare:
            is_bare = any(re.match(f"{bare_head(name)}{SPACE}\\{{", self._waiting) for name in self._calling.names)
            if not is_bare and _may_become_bare(self._waiting, self._calling.names):
                return None
            self._may_be_bare, self._awaits_opening = False, not is_bare
        if self._awaits_opening:
            return self._before_opening()
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

    def _before_opening(self) -> Piece | None:
        """The text before a call in Hermes' syntax; what may belong to the opening waits."""
        place = self._waiting.find(_OPENING)
        self._awaits_opening = place < 0
        end = len(self._waiting) - _overlap(self._waiting) if place < 0 else place
        text = self._waiting[:end].rstrip()
        self._waiting = self._waiting[len(text) if place < 0 else place :]
        return Piece(text) if text or place >= 0 else None

    def _must_be_text(self, is_other_call: bool) -> bool:
        """Whether an answer that might call a function does not."""
        if self._calling.style is not CallStyle.LLAMA3 or self._calling.kind != "auto" or self.num_calls:
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


def _may_become_bare(text: str, names: Sequence[str]) -> bool:
    """Whether a text can go on to be the head of a call without marks."""
    head = [["{"], ['"name"'], [":"], [f'"{name}"' for name in names], [","], ['"arguments"'], [":"], ["{"]]
    return len(text) < _LONGEST_HEAD and any(_may_become(text, [[fence], *head]) for fence in ("```json", "```", ""))


def _may_become(text: str, parts: Sequence[Sequence[str]]) -> bool:
    """Whether a text can go on to be these parts with space between them; each is one of several."""
    for options in parts:
        text = text.lstrip()
        found = next((option for option in options if text.startswith(option)), None)
        if found is None:
            return any(option.startswith(text) for option in options)
        text = text.removeprefix(found)
    return False


def _overlap(text: str) -> int:
    """How many characters at the end of a text are a beginning of the opening."""
    return next(size for size in reversed(range(len(_OPENING))) if text.endswith(_OPENING[:size]))


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
