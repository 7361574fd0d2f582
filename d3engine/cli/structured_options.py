"""The options that hold every answer to a form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from d3engine.errors import InvalidValueError, require
from d3engine.files import UnreadableFileError, as_json, read_text

STRUCTURED: dict[str, tuple[str, Any, str]] = {
    "json_schema": ("--json-schema", Path, "A file with a JSON schema that every answer satisfies."),
    "regex": ("--regex", str, "A regular expression that every answer matches from end to end."),
    "choice": ("--choice", list[str], "A text that an answer may be; may be repeated."),
    "grammar": ("--grammar", Path, "A file with a grammar in Lark's syntax that every answer follows."),
}
"""Option -> flag, type, help; `with_form` makes `structured_outputs` of those that are given."""

_FIELDS = {name: "json" if name == "json_schema" else name for name in STRUCTURED}
"""Option -> the field of `StructuredOutputsParams` that it is."""


def with_form(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `SamplingParams`, the form among them. Raises `InvalidValueError` naming the flag."""
    from d3engine.request.structured import StructuredOutputsParams

    forms = [name for name in STRUCTURED if name in given]
    if not forms:
        return given
    flags = ", ".join(STRUCTURED[name][0] for name in forms)
    require(len(forms) == 1, flags, f"{len(forms)} of them", "one alone, since an answer has one form")
    (name,), rest = forms, {key: value for key, value in given.items() if key not in forms}
    with naming_the_flag(given):
        return {**rest, "structured_outputs": StructuredOutputsParams(**{_FIELDS[name]: _form(name, given[name])})}


@contextmanager
def naming_the_flag(given: dict[str, Any]) -> Iterator[None]:
    """Where the form that is given is refused, say so of its flag, and of its file in place of what that holds."""
    try:
        yield
    except InvalidValueError as error:
        for name in STRUCTURED:
            if name in given and error.field == _FIELDS[name]:
                flag, kind, _ = STRUCTURED[name]
                if kind is Path:
                    raise InvalidValueError(flag, str(given[name]), f"a file with {error.allowed}") from None
                raise InvalidValueError(flag, error.value, error.allowed) from None
        raise


def _form(name: str, given: Any) -> Any:
    """What `StructuredOutputsParams` takes: the content of a file, of a JSON schema as an object."""
    flag, kind, _ = STRUCTURED[name]
    if kind is not Path:
        return given
    try:
        text = read_text(given)
    except UnreadableFileError as error:
        raise InvalidValueError(flag, str(given), f"a regular file of UTF-8 text ({error})") from error
    if name != "json_schema":
        return text
    allowed = "a file with a JSON schema, which is a JSON object"
    try:
        schema = as_json(text, given)
    except UnreadableFileError as error:
        reason = error.__context__  # a key that stands twice is of the file, which may be private
        said = f"valid JSON: {reason}" if isinstance(reason, json.JSONDecodeError) else "valid JSON"
        raise InvalidValueError(flag, str(given), f"{allowed} (this one is not {said})") from None
    require(isinstance(schema, dict), flag, str(given), f"{allowed} (this one holds {_kind_in_words(schema)})")
    return schema


def _kind_in_words(value: Any) -> str:
    kinds = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
