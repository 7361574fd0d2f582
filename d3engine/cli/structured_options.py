"""The options that hold every answer to a form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from d3engine.errors import InvalidValueError, require
from d3engine.files import UnreadableFileError, read_text

STRUCTURED: dict[str, tuple[str, Any, str]] = {
    "json_schema": ("--json-schema", Path, "A file with a JSON schema that every answer satisfies."),
    "regex": ("--regex", str, "A regular expression that every answer matches from end to end."),
    "choice": ("--choice", list[str], "A text that an answer may be; may be repeated."),
    "grammar": ("--grammar", Path, "A file with a grammar in Lark's syntax that every answer follows."),
}
"""Option -> flag, type, help; `with_form` makes `structured_outputs` of those that are given."""


def with_form(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `SamplingParams`, the form among them. Raises `InvalidValueError` naming the flag."""
    from d3engine.request.structured import StructuredOutputsParams

    forms = [name for name in STRUCTURED if name in given]
    if not forms:
        return given
    flags = ", ".join(STRUCTURED[name][0] for name in forms)
    require(len(forms) == 1, flags, f"{len(forms)} of them", "one alone, since an answer has one form")
    (name,), rest = forms, {key: value for key, value in given.items() if key not in forms}
    flag, kind, _ = STRUCTURED[name]
    field = "json" if name == "json_schema" else name
    value: Any = _text(flag, given[name]) if kind is Path else given[name]
    asked: dict[str, Any] = {field: value}
    try:
        form = StructuredOutputsParams(**asked)
    except InvalidValueError as error:
        if error.field != field:
            raise
        raise InvalidValueError(flag, error.value, error.allowed) from None
    return {**rest, "structured_outputs": form}


def _text(flag: str, path: Path) -> str:
    try:
        return read_text(path)
    except UnreadableFileError as error:
        raise InvalidValueError(flag, str(path), f"a regular file of UTF-8 text ({error})") from error
