"""Reasoning and calls of functions, read from the text of an answer as it comes, and passed on letter by letter."""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from d3engine.server.requests import formats
from d3engine.server.requests.tools import Calling

LONGEST_HEAD = 300
"""Characters in which a bare call must have begun; otherwise the answer is text."""


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
        self._format = calling.format or formats.UNKNOWN_FORMAT
        self.num_calls = 0
        self._waiting = ""
        self._awaits_opening = self._may_be_bare = calling.kind == "auto"
        self._arguments: _Arguments | None = None

    @property
    def is_cut(self) -> bool:
        """Whether the arguments of the last call are incomplete, as a stop string may leave them."""
        return self._arguments is not None

    def read(self, text: str, *, is_last: bool) -> list[Piece]:
        if self._calling.format is None:
            begun = [] if self.num_calls else [self._begin(self._calling.names[0])]
            return [*begun, *([Piece(text, 0)] if text else [])]
        self._waiting += text
        found: list[Piece] = []
        while self._waiting and (new := self._next()) is not None:
            found.append(new)
        if is_last and self._is_plain:
            found.append(Piece(self._waiting))
        return [piece for piece in found if piece.text or piece.name]

    @property
    def _is_plain(self) -> bool:
        """Whether what waits at the end of an answer is text, and not the beginning of a call that was cut."""
        begins = any(opening[:6] in self._waiting for opening in self._format.openings)
        return self._awaits_opening and not begins

    def _next(self) -> Piece | None:
        """The next piece of what waits; None where more must come first."""
        if self._may_be_bare:
            is_bare = self._begins_bare()
            if not is_bare and self._may_become_bare():
                return None
            self._may_be_bare, self._awaits_opening = False, not is_bare
        if self._awaits_opening:
            return self._before_opening()
        if self._arguments is not None:
            piece, used = self._arguments.take(self._waiting)
            self._waiting = self._waiting[used:]
            if self._arguments.is_over:
                self._arguments = None
            return Piece(piece, self.num_calls - 1) if piece or used else None
        head = _head_pattern(self._format).match(self._waiting)
        if head is not None and head["name"] in self._calling.names:
            self._waiting = self._waiting[head.end() :]
            self._arguments = self._arguments_of(head["name"])
            return self._begin(head["name"])
        return None

    def _arguments_of(self, name: str) -> _Arguments:
        if isinstance(self._format, formats.XmlFormat):
            schemas = dict(zip(self._calling.names, self._calling.schemas, strict=False))
            return _XmlArguments(schemas.get(name, {}))
        return _PythonArguments() if isinstance(self._format, formats.PythonFormat) else _JsonArguments()

    def _begins_bare(self) -> bool:
        after = "" if isinstance(self._format, formats.PythonFormat) else rf"{formats.SPACE}\{{"
        return any(_bare_pattern(self._format, name, after).match(self._waiting) for name in self._calling.names)

    def _may_become_bare(self) -> bool:
        """Whether what waits can go on to be the beginning of a bare call."""
        ends: formats.Parts = [] if isinstance(self._format, formats.PythonFormat) else [["{"]]
        heads = self._format.bare_parts(self._calling.names)
        return len(self._waiting) < LONGEST_HEAD and any(_may_become(self._waiting, [*one, *ends]) for one in heads)

    def _before_opening(self) -> Piece | None:
        """The text before a call; what may belong to an opening waits."""
        places = [place for opening in self._format.openings if (place := self._waiting.find(opening)) >= 0]
        self._awaits_opening = not places
        begun = max((_num_begun(self._waiting, one) for one in self._format.openings), default=0)
        end = min(places) if places else len(self._waiting) - begun
        text = self._waiting[:end].rstrip() if self._format.openings else self._waiting
        self._waiting = self._waiting[end:] if places else self._waiting[len(text) :]
        return Piece(text) if text or places else None

    def _begin(self, name: str) -> Piece:
        self.num_calls += 1
        return Piece("", self.num_calls - 1, self._format.new_id(), name)


def _num_begun(text: str, mark: str) -> int:
    """How many characters at the end of a text are a beginning of a mark."""
    return next(size for size in reversed(range(len(mark))) if text.endswith(mark[:size]))


@lru_cache(64)
def _head_pattern(written: formats.ToolFormat) -> re.Pattern[str]:
    return written.head_pattern()


@lru_cache(1024)
def _bare_pattern(written: formats.ToolFormat, name: str, after: str) -> re.Pattern[str]:
    return re.compile(written.bare_pattern(name) + after if written.is_bare else "(?!)")


def _may_become(text: str, parts: formats.Parts) -> bool:
    """Whether a text can go on to be these parts with space between them; each is one of several."""
    for options in parts:
        text = text.lstrip()
        found = next((option for option in options if text.startswith(option)), None)
        if found is None:
            return any(option.startswith(text) for option in options)
        text = text.removeprefix(found)
    return False


class _Arguments(ABC):
    """Of one call, on their way."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False
        self.is_over = False
        self._num_written = 0

    @abstractmethod
    def take(self, text: str) -> tuple[str, int]:
        """Go on with `text`: what of it is to be passed on, as JSON, and how many characters that takes."""

    def _member(self, name: str, value: str) -> str:
        """One more argument of an object, its value as JSON."""
        self._num_written += 1
        return ("{" if self._num_written == 1 else ", ") + f"{json.dumps(name)}: {value}"

    def _end(self) -> str:
        self.is_over = True
        return "}" if self._num_written else "{}"

    def _ends_part(self, char: str, ends: str) -> bool:
        """Go over one character; whether it is one of `ends`, outside of strings, lists and objects."""
        if self._in_string:
            self._in_string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
            return False
        self._in_string = char == '"'
        self._depth += (char in "{[") - (char in "}]")
        return not self._depth and char in ends


class _JsonArguments(_Arguments):
    """A JSON object, which is passed on as it is."""

    def take(self, text: str) -> tuple[str, int]:
        for size, char in enumerate(text, 1):
            if self._ends_part(char, "}]"):
                self.is_over = True
                return text[:size], size
        return text, len(text)


_LITERALS = {"True": "true", "False": "false", "None": "null"}


class _PythonArguments(_Arguments):
    """Named arguments up to a closing parenthesis, each passed on as JSON when it is whole."""

    def __init__(self) -> None:
        super().__init__()
        self._one = ""

    def take(self, text: str) -> tuple[str, int]:
        found: list[str] = []
        for size, char in enumerate(text, 1):
            if not self._ends_part(char, ",)"):
                self._one += char
                continue
            found.append(self._written())
            if char == ")":
                return "".join([*found, self._end()]), size
        return "".join(found), len(text)

    def _written(self) -> str:
        name, separator, value = self._one.partition("=")
        self._one = ""
        return self._member(name.strip(), _LITERALS.get(value.strip(), value.strip())) if separator else ""


_XML_ARGUMENT = re.compile(r"\s*<parameter=(?P<name>[^>\n]+)>\n(?P<value>.*?)\n</parameter>\n", re.DOTALL)
_XML_END = re.compile(r"\s*</function>")


class _XmlArguments(_Arguments):
    """An element for each argument, up to the end of the function's; each is passed on as JSON when it is whole."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        super().__init__()
        self._schema = schema
        self._waiting = ""

    def take(self, text: str) -> tuple[str, int]:
        self._waiting += text
        found: list[str] = []
        while (one := _XML_ARGUMENT.match(self._waiting)) is not None:
            self._waiting = self._waiting[one.end() :]
            found.append(self._written(one["name"], one["value"]))
        end = _XML_END.match(self._waiting)
        if end is None:
            return "".join(found), len(text)
        return "".join([*found, self._end()]), len(text) - (len(self._waiting) - end.end())

    def _written(self, name: str, value: str) -> str:
        properties = self._schema.get("properties")
        own = properties.get(name) if isinstance(properties, Mapping) else None
        shared = {key: self._schema[key] for key in ("$defs", "definitions") if key in self._schema}
        is_text = isinstance(own, Mapping) and formats.is_raw_text({**own, **shared})
        return self._member(name, json.dumps(value) if is_text else _as_json(_LITERALS.get(value, value)))


def _as_json(value: str) -> str:
    """A value that is JSON as it is, any other as a text."""
    try:
        json.loads(value)
        return value
    except (ValueError, RecursionError):
        return json.dumps(value)


class ReasoningReader:
    """Parts an answer into its reasoning, which the prompt has begun where it `is_open`, and what follows it."""

    def __init__(self, written: formats.ReasoningFormat, *, is_open: bool) -> None:
        self._format = written
        self._waiting = ""
        self._is_reasoning: bool | None = True if is_open else None
        self._drops_space = is_open
        self._num_characters = 0

    @property
    def end(self) -> float:
        """Where the reasoning ends in the answer's text, behind its mark; 0 without one, infinity before its end."""
        return math.inf if self._is_reasoning else self._num_characters

    @property
    def is_over(self) -> bool:
        """Whether nothing of reasoning comes any more."""
        return self._is_reasoning is False and not self._drops_space

    def read(self, text: str, *, is_last: bool) -> tuple[str, str]:
        """Take what is new of the answer: what is new of the reasoning, and of what follows it."""
        if self.is_over:
            return "", text
        self._waiting += text
        reasoning = ""
        if self._is_reasoning is None and not self._decide(is_last):
            return "", ""
        if self._is_reasoning:
            reasoning = self._read_reasoning(is_last)
        if self._is_reasoning:
            return reasoning, ""
        rest, self._waiting = self._waiting, ""
        if self._drops_space:
            rest = rest.lstrip()
            self._drops_space = not rest
        return reasoning, rest

    def _decide(self, is_last: bool) -> bool:
        """Find out whether the answer begins with reasoning; False where more must come first."""
        begins, opening = self._waiting.lstrip(), self._format.opening
        if begins.startswith(opening):
            self._num_characters = len(self._waiting) - len(begins) + len(opening)
            self._waiting = begins.removeprefix(opening)
            self._is_reasoning = self._drops_space = True
        elif is_last or not opening.startswith(begins):
            self._is_reasoning = False
        return self._is_reasoning is not None

    def _read_reasoning(self, is_last: bool) -> str:
        """What is new of the reasoning; what may belong to its end waits, and so does space before it."""
        if self._drops_space:
            self._num_characters += len(self._waiting) - len(self._waiting.lstrip())
            self._waiting = self._waiting.lstrip()
            self._drops_space = not self._waiting
        closing = self._format.closing
        place = self._waiting.find(closing)
        if place >= 0:
            text = self._waiting[:place].rstrip()
            self._num_characters += place + len(closing)
            self._waiting = self._waiting[place + len(closing) :]
            self._is_reasoning, self._drops_space = False, True
            return text
        end = len(self._waiting) - _num_begun(self._waiting, closing)
        text = self._waiting if is_last else self._waiting[:end].rstrip()
        self._num_characters += len(text)
        self._waiting = self._waiting[len(text) :]
        return text
