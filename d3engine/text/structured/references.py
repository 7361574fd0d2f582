"""What can be read off a JSON schema by itself: references within its document, its types and its values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias
from urllib.parse import urldefrag, urljoin

from d3engine.errors import integer_in

Schema: TypeAlias = Any
"""A JSON schema: a mapping, or True or False."""

TYPES = ("null", "boolean", "string", "number", "array", "object")
"""JSON Schema's types, whole numbers being numbers."""


def resolved(root: Schema, reference: Any) -> Schema:
    """Return what a reference within the document leads to, by its place, an anchor or an id; None for any other."""
    if not isinstance(reference, str):
        return None
    base = root.get("$id", "") if isinstance(root, dict) and isinstance(root.get("$id"), str) else ""
    document, fragment = urldefrag(urljoin(base, reference))
    place = root if reference.startswith("#") or document == urldefrag(base)[0] else _named(root, "$id", document, base)
    if fragment and not fragment.startswith("/"):
        return _named(place, "$anchor", fragment)
    for step in fragment.split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(place, dict):
            place = place.get(key)
        elif isinstance(place, list) and (number := integer_in(key)) is not None and number < len(place):
            place = place[number]
        else:
            return None
    return place


def _named(schema: Any, keyword: str, name: str, base: str = "") -> Schema:
    """The schema at or below a place whose `$id` or `$anchor` has this value; None without one."""
    if isinstance(schema, dict):
        given = schema.get(keyword)
        if isinstance(given, str) and (given if keyword == "$anchor" else urldefrag(urljoin(base, given))[0]) == name:
            return schema
        schema = list(schema.values())
    if not isinstance(schema, list):
        return None
    return next((found for one in schema if (found := _named(one, keyword, name, base)) is not None), None)


def allowed_types(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that `type`, `const` and `enum` leave."""
    given = schema.get("type", TYPES)
    if not isinstance(given, list | tuple):
        given = [given]  # what is no type, the compiler names
    named = {"number" if kind == "integer" else kind for kind in given if isinstance(kind, str)}
    values = allowed_values(schema)
    return frozenset(named if values is None else named & {type_of(value) for value in values})


def allowed_values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that `const` or `enum` leaves; None without them."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def type_of(value: Any) -> str:
    for kind, name in ((bool, "boolean"), (str, "string"), ((int, float), "number"), (list, "array"), (dict, "object")):
        if isinstance(value, kind):
            return name
    return "null"


def are_disjoint(one: list[Any] | None, two: list[Any] | None) -> bool:
    """Whether two lists of values have none in common; None stands for all values."""
    if one is None or two is None:
        return False
    return not any(type_of(a) == type_of(b) and a == b for a in one for b in two)
