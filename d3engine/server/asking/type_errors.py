"""What is wrong with the types in a body: msgspec's finding, in the words of all other errors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from msgspec import Struct

from d3engine.errors import NOTHING, must_be
from d3engine.server.errors import RequestError, invalid

_AT = r"(?: - at `\$(?P<place>.*)`)?"
_EXPECTED = re.compile(r"Expected `(?P<kinds>[^`]+)`(?:, got `[^`]+`)?" + _AT)
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]+)`" + _AT)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]+)`" + _AT)
_NO_WORD = re.compile(r"Invalid enum value .*?" + _AT + r"\Z", re.DOTALL)
_WORDS = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


def wrong_type(content: dict[str, Any], shape: type[Struct], said: str) -> RequestError:
    """The error for a body that msgspec does not take as this shape."""
    if found := _MISSING.match(said):
        place = _joined(found["place"], found["name"])
        return invalid(_field(place), f"{place} must be given.", "missing_required_parameter")
    if found := _UNKNOWN.match(said):
        place = _joined(found["place"], found["name"])
        return invalid(_field(place), f"{place} must be absent.", "unsupported_parameter")
    found = _EXPECTED.match(said)
    if found is not None:
        allowed = " or ".join(_WORDS.get(kind, kind) for kind in found["kinds"].split(" | "))
    elif found := _NO_WORD.match(said):
        words = _words_at(shape, _steps(found["place"] or ""))
        allowed = " or ".join(f'"{word}"' for word in words) or "another word"
    else:
        return invalid(None, f"The body does not fit: {said}.", "invalid_type")
    place = (found["place"] or "").removeprefix(".")
    value = content.get(place, NOTHING)
    return invalid(_field(place), must_be(place or "the body", value, allowed) + ".", "invalid_type")


def _joined(place: str | None, name: str) -> str:
    return f"{place or ''}.{name}".removeprefix(".")


def _field(place: str) -> str | None:
    """The field of the body that a place is in."""
    return re.split(r"[.\[]", place, maxsplit=1)[0] or None


def _steps(place: str) -> list[str]:
    """The names on the way to a place, "" for an item of a list."""
    return ["" if step.startswith("[") else step for step in re.findall(r"\[[^]]*\]|[^.\[]+", place)]


def _words_at(shape: type[Struct], steps: Iterable[str]) -> list[str]:
    """The words that may stand at a place."""
    kinds = list(_parts(msgspec.inspect.type_info(shape)))
    for step in steps:
        kinds = [part for kind in kinds for inner in _inside(kind, step) for part in _parts(inner)]
    return [str(word) for kind in kinds if isinstance(kind, msgspec.inspect.LiteralType) for word in kind.values]


def _parts(kind: msgspec.inspect.Type) -> Iterator[msgspec.inspect.Type]:
    """The kinds that a union is of, or this one."""
    if isinstance(kind, msgspec.inspect.Metadata):
        yield from _parts(kind.type)
    elif isinstance(kind, msgspec.inspect.UnionType):
        for one in kind.types:
            yield from _parts(one)
    else:
        yield kind


def _inside(kind: msgspec.inspect.Type, step: str) -> Iterator[msgspec.inspect.Type]:
    if isinstance(kind, msgspec.inspect.StructType):
        yield from (field.type for field in kind.fields if field.encode_name == step)
    elif isinstance(kind, msgspec.inspect.ListType) and step == "":
        yield kind.item_type
