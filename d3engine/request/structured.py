"""What form an answer must have: StructuredOutputsParams, as vLLM names it.

Here it is only written down, bounded and brought into one form; whether it can be compiled is found out where the
tokenizer is known (`structured`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from d3engine.errors import InvalidValueError, require

MAX_CHARACTERS = 2**16
MAX_CHOICES = 1024
FORMS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What every answer must be, from its first character to its last; exactly one of the first five is given.

    Args:
        json: a JSON schema, as an object or as its text, which it is kept as; the answer is JSON that satisfies it.
        regex: a regular expression that the whole answer matches (Rust's syntax: no look-around, no back references;
            \\d and \\w are of ASCII alone, as in JSON Schema).
        choice: the answer is one of these texts.
        grammar: a context-free grammar in Lark's syntax, whose rule `start` is the answer.
        json_object: the answer is any JSON object.
        whitespace_pattern: of JSON: what may stand between two of its parts; None: nothing, a space, or a line break
            with an indentation, so that no answer can go on with spaces for ever.
        disable_any_whitespace: of JSON: nothing may.

    Raises:
        InvalidValueError: for any value that is not allowed.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace"):
            value = getattr(self, name)
            require(isinstance(value, bool) or (value is None and name in FORMS), name, value, "True or False")
        given = [name for name in FORMS if getattr(self, name) not in (None, False)]
        allowed = f"given with exactly one of {', '.join(FORMS)}"
        require(len(given) == 1, "structured_outputs", " and ".join(given) or None, allowed)
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar", "whitespace_pattern"):
            if getattr(self, name) is not None:
                _require_text(name, getattr(self, name))
        is_json = self.form in ("json", "json_object")
        for name in ("whitespace_pattern", "disable_any_whitespace"):
            require(is_json or not getattr(self, name), name, getattr(self, name), "absent where the answer is no JSON")
        both = self.whitespace_pattern is not None and self.disable_any_whitespace
        require(not both, "whitespace_pattern", self.whitespace_pattern, "None where disable_any_whitespace is True")

    @property
    def form(self) -> str:
        """The name of the field that says what the answer is."""
        return next(name for name in FORMS if getattr(self, name) not in (None, False))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The fields, for those who read them from elsewhere."""
        return tuple(field.name for field in fields(cls))


def _schema_text(schema: object) -> str:
    """A JSON schema as compact JSON; the order of its keys is that of the answer's properties."""
    allowed = f"a JSON schema: an object, or the text of one, of {MAX_CHARACTERS} characters at most"
    if isinstance(schema, str):
        _require_text("json", schema)
    elif not isinstance(schema, Mapping):
        raise InvalidValueError("json", schema, allowed)
    try:
        found = json.loads(schema) if isinstance(schema, str) else dict(schema)
        text = json.dumps(found, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
        text.encode("utf-8")
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidValueError("json", schema, f"{allowed} ({type(error).__name__}: {error})") from None
    require(isinstance(found, dict) and len(text) <= MAX_CHARACTERS, "json", schema, allowed)
    return text


def _choices(choice: Sequence[str]) -> tuple[str, ...]:
    allowed = f"a list of 1 to {MAX_CHOICES} different texts, of {MAX_CHARACTERS} characters together at most"
    is_list = isinstance(choice, Sequence) and not isinstance(choice, str | bytes)
    require(is_list and 0 < len(choice) <= MAX_CHOICES, "choice", choice, allowed)
    for text in choice:
        _require_text("choice", text)
    fits = len(set(choice)) == len(choice) and sum(map(len, choice)) <= MAX_CHARACTERS
    require(fits, "choice", choice, allowed)
    return tuple(choice)


def _require_text(name: str, value: object) -> None:
    fits = isinstance(value, str) and 0 < len(value) <= MAX_CHARACTERS and _is_unicode(value)
    require(fits, name, value, f"text of 1 to {MAX_CHARACTERS} characters")


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)
