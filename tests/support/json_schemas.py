"""Random JSON schemas that a few dozen tokens can satisfy, and what it means to satisfy one."""

import random
import re
from typing import Any

NAMES = ["a", "unit", "größe", "two words", 'quoted "name"', "日本"]
TEXTS = ["pens", "a/b", "Größe", 'say "no"', "日本語", "x\ny", ""]


def closed(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A schema of an object that has all of these properties and no others."""
    kind = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return kind | more


def random_schema(numbers: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose values are short: every text, list and number in it has bounds."""
    kinds = [_integer, _constant, _text, _pattern, _plain]
    if depth:
        kinds += [_list, _object, _object, _either]
    return numbers.choice(kinds)(numbers, depth)


def _integer(numbers: random.Random, depth: int) -> dict[str, Any]:
    low = numbers.randrange(-50, 50)
    return {"type": "integer", "minimum": low, "maximum": low + numbers.randrange(200)}


def _constant(numbers: random.Random, depth: int) -> dict[str, Any]:
    if numbers.random() < 0.5:
        return {"const": numbers.choice([*TEXTS, None, True, 3, -1.5, [1, "x"], {"k": []}])}
    return {"enum": numbers.sample(TEXTS, 3)}


def _text(numbers: random.Random, depth: int) -> dict[str, Any]:
    least = numbers.randrange(3)
    return {"type": "string", "minLength": least, "maxLength": least + numbers.randrange(4)}


def _pattern(numbers: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "pattern": numbers.choice([r"^[a-f]{2}$", r"^(ja|nein)!?$", r"^\d{1,3}$"])}


def _plain(numbers: random.Random, depth: int) -> dict[str, Any]:
    return {"type": numbers.choice(["boolean", "null", ["boolean", "null"]])}


def _list(numbers: random.Random, depth: int) -> dict[str, Any]:
    least = numbers.randrange(2)
    most = least + numbers.randrange(3)
    return {"type": "array", "items": random_schema(numbers, depth - 1), "minItems": least, "maxItems": most}


def _object(numbers: random.Random, depth: int) -> dict[str, Any]:
    names = numbers.sample(NAMES, numbers.randrange(4))
    return {
        "type": "object",
        "properties": {name: random_schema(numbers, depth - 1) for name in names},
        "required": [name for name in names if numbers.random() < 0.6],
        "additionalProperties": False,
    }


def _either(numbers: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(numbers, depth - 1), random_schema(numbers, depth - 1)]}


def satisfies(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is one of those that a schema of `random_schema` allows, by the standard's words."""
    if "const" in schema:
        return _same(value, schema["const"])
    if "enum" in schema:
        return any(_same(value, one) for one in schema["enum"])
    if "anyOf" in schema:
        return any(satisfies(value, one) for one in schema["anyOf"])
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return any(_IS[kind](value, schema) for kind in kinds)


def _same(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _is_text(value: Any, schema: dict[str, Any]) -> bool:
    if not isinstance(value, str) or not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 9):
        return False
    return "pattern" not in schema or re.search(schema["pattern"], value) is not None


def _is_object(value: Any, schema: dict[str, Any]) -> bool:
    if not isinstance(value, dict) or not set(schema["required"]) <= set(value) <= set(schema["properties"]):
        return False
    return all(satisfies(one, schema["properties"][name]) for name, one in value.items())


_IS = {
    "integer": lambda value, schema: type(value) is int and schema["minimum"] <= value <= schema["maximum"],
    "string": _is_text,
    "boolean": lambda value, schema: isinstance(value, bool),
    "null": lambda value, schema: value is None,
    "array": lambda value, schema: (
        isinstance(value, list)
        and schema["minItems"] <= len(value) <= schema["maxItems"]
        and all(satisfies(one, schema["items"]) for one in value)
    ),
    "object": _is_object,
}
