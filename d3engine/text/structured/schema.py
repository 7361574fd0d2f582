"""Rewrites a JSON schema for llguidance so that every text parses to a value that
satisfies it; it may allow less, never more."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from d3engine.errors import shown
from d3engine.text.structured.finite import schema_is_finite
from d3engine.text.structured.references import (
    TYPES,
    Schema,
    allowed_types,
    allowed_values,
    are_disjoint,
    resolved,
    type_of,
)

ANYTHING = r"^(.|\n)*$"
_IN_MAP = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_IN_LIST = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_DATA = ("const", "enum", "default", "examples")
_ANNOTATIONS = frozenset(
    {"$comment", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
)
_CLASS_OR_ESCAPE = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]", re.DOTALL)
_MOST_EXACT = 2**53
"""Up to which llguidance tells whole numbers from their neighbours: it holds them as floats."""
_LARGEST = 2**63 - 1024
"""The largest float among the integers of 64 bits, which its bounds are."""
_MOST_CHOICES = 64
"""Alternatives that one keyword may become."""

_LEAP = r"(?:0[48]|[2468][048]|[13579][26])"
_DATE = (
    r"(?:[0-9]{4}-(?:0[13-9]|1[0-2])-[0-9]{2}|[0-9]{4}-02-(?:[01][0-9]|2[0-8])"
    rf"|(?:[0-9]{{2}}{_LEAP}|{_LEAP}00)-02-29)"
)
_LABEL = r"(?:[^.]{1,3}|[^.]{2}(?:[^.-][^.]|-[^.-])[^.]*)"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_PATH = "(?:[A-Za-z0-9._~!$&'()*+,;=/-]|%[0-9A-Fa-f]{2})"
_QUERY = "(?:[A-Za-z0-9._~!$&'()*+,;=@/:?-]|%[0-9A-Fa-f]{2})"
# Regular expressions without nested groups and look-around, which mean the same to every engine.
_CLASS = r"\[\^?(?:[A-Za-z0-9_ .,:;@#%&=/]|a-z|A-Z|0-9|\\[dwsDWS.\\\[\]^-])+\]"
_TIMES = r"(?:[*+?]|\{[0-9]{1,3},?\})?"
_ATOM = rf"(?:(?:[^\\()\[\]{{}}*+?|^$]|\\[dwsDWSnrt.\\/()\[\]{{}}*+?|^$-]|{_CLASS}){_TIMES})"
_GROUP = rf"\((?:\?:)?{_ATOM}*(?:\|{_ATOM}*)*\){_TIMES}"
_OWN_FORMATS = ("json-pointer", "relative-json-pointer", "uri-reference", "regex")
_FORMATS: dict[str, tuple[dict[str, Any], ...]] = {
    "date": ({"pattern": f"^{_DATE}$"},),
    # No leap second: whether there is one depends on the time zone.
    "time": ({"pattern": "^.{6}[0-5]"},),
    "date-time": ({"pattern": rf"^{_DATE}.{{7}}[0-5]"},),
    # No label in Punycode, whose rules no regular expression has.
    "hostname": ({"pattern": rf"^{_LABEL}(?:\.{_LABEL})*$"}, {"maxLength": 253}),
    "json-pointer": ({"pattern": f"^{_POINTER}$"},),
    "relative-json-pointer": ({"pattern": f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$"},),
    "uri-reference": ({"pattern": f"^(?:[A-Za-z][A-Za-z0-9+.-]*:)?{_PATH}*(?:\\?{_QUERY}*)?(?:#{_QUERY}*)?$"},),
    "regex": ({"pattern": rf"^\^?(?:{_ATOM}|{_GROUP})*(?:\|(?:{_ATOM}|{_GROUP})*)*\$?$"},),
    **dict.fromkeys(("duration", "email", "ipv4", "ipv6", "uri", "uuid"), ()),
}
"""Formats that are enforced, llguidance's own with what they lack. Every other one is an annotation."""


class UnenforceableError(ValueError):
    """Names what of a schema cannot be enforced."""


def prepared(schema: Schema) -> Schema:
    """Return `schema` rewritten. Raises `UnenforceableError`, and RecursionError for one that is nested too deep."""
    try:
        if not schema_is_finite(schema):
            raise UnenforceableError("it allows no answer that ends")
        return _Rewriter(schema).rewrite(schema)
    except (AttributeError, TypeError):
        raise UnenforceableError("a keyword's value has the wrong type") from None


def sound_pattern(pattern: str) -> str:
    """Return a pattern whose classes llguidance quotes rightly.

    It lets a class that has control characters match a quotation mark and a backslash too, which JSON escapes alike. So
    a class without one of those two loses its control characters.
    """
    return _CLASS_OR_ESCAPE.sub(lambda found: _sound_class(found[0]), pattern)


def _sound_class(part: str) -> str:
    """A class as ECMAScript reads it: it has no classes within, and no operators on classes."""
    if not part.startswith("["):
        return part
    if part in ("[]", "[^]"):
        raise UnenforceableError(f"the class {part} of a pattern cannot be enforced")
    if "--" in part:
        raise UnenforceableError(f"two hyphens in the class {part} of a pattern cannot be enforced")
    part = part[0] + re.sub(r"(\\.)|\[", lambda found: found[1] or r"\[", part[1:], flags=re.DOTALL)
    part = part.replace("&&", r"&\&").replace("~~", r"~\~")
    try:
        found = re.compile(part)
    except re.error:
        return f"[{part}&&[^\\x00-\\x1f]]"
    is_right = bool(found.match('"')) and bool(found.match("\\"))
    has_control = any(found.match(chr(code)) for code in range(32))
    return f"[{part}&&[^\\x00-\\x1f]]" if has_control and not is_right else part


def others(names: Iterable[str]) -> str:
    """A regular expression of every text but these."""
    tree: dict[str, Any] = {}
    for name in names:
        place = tree
        for char in name:
            place = place.setdefault(char, {})
        place[""] = {}

    def behind(place: dict[str, Any]) -> str:
        chars = sorted(char for char in place if char)
        if not chars:
            return r"(.|\n)+"
        ways = [literal(char) + behind(place[char]) for char in chars]
        ways.append(rf"[^{''.join(map(literal, chars))}](.|\n)*")
        return f"(?:{'|'.join(ways)}){'' if '' in place else '?'}"

    return f"^{behind(tree) if tree else ANYTHING[1:-1]}$"


def literal(text: str) -> str:
    """A regular expression of this text alone, which may stand in a class of characters too."""
    return re.sub(r"[^0-9A-Za-z]", lambda char: f"\\x{{{ord(char[0]):x}}}", text)


class _Rewriter:
    def __init__(self, root: Schema) -> None:
        self._root = root

    def rewrite(self, schema: Schema) -> Schema:
        if not isinstance(schema, dict):
            return schema
        found = dict(schema)
        more: list[Schema] = []
        self._rewrite_numbers(found)
        self._rewrite_format(found, more)
        self._rewrite_logic(found, more)
        self._rewrite_counts(found, more)
        for name, value in found.items():
            if name in _IN_MAP and isinstance(value, dict):
                found[name] = {key: self.rewrite(one) for key, one in value.items()}
            elif name in _IN_LIST and isinstance(value, list):
                found[name] = [self.rewrite(one) for one in value]
            elif name not in _DATA:  # a schema, or what a reference may lead into
                found[name] = self.rewrite(value)
        if isinstance(found.get("pattern"), str):
            found["pattern"] = sound_pattern(found["pattern"])
        if isinstance(found.get("patternProperties"), dict):
            found["patternProperties"] = {sound_pattern(key): one for key, one in found["patternProperties"].items()}
        self._close(found, is_extended=bool(more))
        if more:
            found["allOf"] = [*found.get("allOf", ()), *map(self.rewrite, more)]
        return found

    def _rewrite_numbers(self, schema: dict[str, Any]) -> None:
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            if isinstance(value := schema.get(name), int | float) and abs(value) > _MOST_EXACT:
                schema[name] = _rounded(name, value)
        if _inexact(schema.get("const")) is not None:
            raise UnenforceableError(f"const {shown(schema['const'])} cannot be enforced, since it is beyond 2**53")
        if isinstance(values := schema.get("enum"), list) and _inexact(values) is not None:
            schema["enum"] = [value for value in values if _inexact(value) is None]
            if not schema["enum"]:
                raise UnenforceableError(f"enum {shown(values)} cannot be enforced, since it is beyond 2**53")
        for name in _COUNTS:
            if isinstance(value := schema.get(name), float) and value.is_integer():
                schema[name] = int(value)
        has_one = isinstance(most := schema.get("maxItems"), int) and most <= 1
        if schema.get("uniqueItems") is False or has_one:
            schema.pop("uniqueItems", None)

    def _rewrite_format(self, schema: dict[str, Any], more: list[Schema]) -> None:
        kind = schema.get("format")
        if isinstance(kind, str) and kind not in _FORMATS:
            del schema["format"]
        elif isinstance(kind, str):
            more += _FORMATS[kind]
            if kind in _OWN_FORMATS:
                del schema["format"]

    def _rewrite_logic(self, schema: dict[str, Any], more: list[Schema]) -> None:
        for name in ("dependencies", "dependentRequired", "dependentSchemas"):
            for key, needed in (schema.pop(name, None) or {}).items():
                then = {"required": needed} if isinstance(needed, list) else needed
                more.append({"anyOf": [{"properties": {key: False}}, then]})
        condition, then, otherwise = (schema.get(name) for name in ("if", "then", "else"))
        if condition is None or (then is None and otherwise is None):
            _drop(schema, "if", "then", "else")
        elif (fails := self.negation(condition)) is not None:
            _drop(schema, "if", "then", "else")
            more += [] if then is None else [{"anyOf": [fails, then]}]
            more += [] if otherwise is None else [{"anyOf": [condition, otherwise]}]
        if "not" in schema and (fails := self.negation(schema["not"])) is not None:
            del schema["not"]
            more.append(fails)
        if isinstance(schema.get("oneOf"), list) and (ways := self._apart(schema, schema["oneOf"])) is not None:
            del schema["oneOf"]
            more.append({"anyOf": ways})

    def _rewrite_counts(self, schema: dict[str, Any], more: list[Schema]) -> None:
        least, most = schema.get("minProperties"), schema.get("maxProperties")
        properties = schema.get("properties") or {}
        needed = list(dict.fromkeys(schema.get("required") or ()))
        optional = [name for name in properties if name not in needed]
        is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
        if isinstance(most, int) and is_closed and len(properties) <= most:
            del schema["maxProperties"]
        if not isinstance(least, int) or isinstance(least, bool):
            return
        missing = least - len(needed)
        if missing <= 0:
            del schema["minProperties"]
        elif len(optional) >= missing:
            ways = list(combinations(optional, missing))
            if len(ways) > _MOST_CHOICES:
                raise UnenforceableError(f"minProperties {least} of {len(properties)} properties cannot be enforced")
            del schema["minProperties"]
            more.append({"anyOf": [{"required": list(way)} for way in ways]})
        elif missing > 1:
            # One key written twice is two properties to a grammar, and one to a parser.
            raise UnenforceableError("minProperties over additional properties cannot be enforced, but for one of them")

    def _close(self, schema: dict[str, Any], *, is_extended: bool) -> None:
        """Let no key pass as an additional one that is a known one spelled with an escape.

        llguidance takes any JSON string but the known spellings for an additional key; the keys of a pattern it takes
        without escapes of characters that need none.
        """
        properties, patterns = schema.get("properties") or {}, schema.get("patternProperties") or {}
        added = schema.get("additionalProperties", True)
        if added is False or not (properties or patterns or is_extended) or "object" not in allowed_types(schema):
            return
        schema["additionalProperties"] = False
        if patterns:  # no other pattern is sure to be disjoint from these, so the other keys are never written
            named = [name for name in schema.get("required") or () if name not in properties]
            if named and not all(any(re.search(one, name) for one in patterns) for name in named):
                raise UnenforceableError(f"the required {named[0]!r} among patternProperties cannot be enforced")
        else:
            is_free = added is True or added == {}
            schema["patternProperties"] = {ANYTHING: {}} if is_free else {sound_pattern(others(properties)): added}

    def _apart(self, schema: Mapping[str, Any], branches: Sequence[Schema]) -> list[Schema] | None:
        """The branches of a oneOf, each narrowed until the others allow none of it; None where that is not possible."""
        if len(branches) > _MOST_CHOICES:
            return None
        kinds = allowed_types(schema)
        found = []
        for nth, branch in enumerate(branches):
            rest = [*branches[:nth], *branches[nth + 1 :]]
            guards = [self._guard(branch, other, kinds) for other in rest]
            if any(guard is None for guard in guards):
                return None
            found.append({"allOf": [branch, *filter(None, guards)]} if any(guards) else branch)
        return found

    def _guard(self, branch: Schema, other: Schema, kinds: frozenset[str]) -> Schema | None:
        """What narrows `branch` so that `other` allows none of it: {} where it does so already; None if not known."""
        one, two = self._seen(branch), self._seen(other)
        if two is False or one is False:
            return {}
        if not isinstance(one, dict) or not isinstance(two, dict):
            return None
        if not (allowed_types(one) & allowed_types(two) & kinds):
            return {}
        if are_disjoint(allowed_values(one), allowed_values(two)):
            return {}
        if allowed_types(one) & allowed_types(two) & kinds == {"object"}:
            asked, asked_too = set(one.get("required") or ()), set(two.get("required") or ())
            known, known_too = one.get("properties") or {}, two.get("properties") or {}
            for name in sorted(asked | asked_too):
                value, value_too = self._seen(known.get(name, True)), self._seen(known_too.get(name, True))
                if isinstance(value, dict) and isinstance(value_too, dict) and self._differ(value, value_too):
                    return {}
            if (
                two.get("additionalProperties") is False
                and not two.get("patternProperties")
                and asked - known_too.keys()
            ):
                return {}
            if missing := sorted(asked_too - asked):
                return {"properties": {missing[0]: False}}
        return self.negation(other)

    def _differ(self, one: Mapping[str, Any], two: Mapping[str, Any]) -> bool:
        return not (allowed_types(one) & allowed_types(two)) or are_disjoint(allowed_values(one), allowed_values(two))

    def _seen(self, schema: Schema) -> Schema:
        """The schema behind references within the document."""
        for _ in range(32):
            if not isinstance(schema, dict) or set(schema) - _ANNOTATIONS != {"$ref"}:
                return schema
            schema = resolved(self._root, schema["$ref"])
        return None

    def negation(self, schema: Schema) -> Schema | None:
        """A schema that allows nothing that `schema` allows; None where no such is known."""
        schema = self._seen(schema)
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, dict):
            return None
        ways: list[Schema] = []
        if "type" in schema and (kinds := [kind for kind in TYPES if kind not in allowed_types(schema)]):
            ways.append({"type": kinds})
        ways += [{"type": "object", "properties": {name: False}} for name in schema.get("required") or ()]
        for name, value in (schema.get("properties") or {}).items():
            if (fails := self.negation(value)) is not None:
                ways.append({"type": "object", "required": [name], "properties": {name: fails}})
        ways += _other_values(schema)
        if "not" in schema:
            ways.append(schema["not"])
        ways += [fails for one in schema.get("allOf") or () if (fails := self.negation(one)) is not None]
        if isinstance(schema.get("anyOf"), list):
            each = [self.negation(one) for one in schema["anyOf"]]
            ways += [] if None in each else [{"allOf": each}]
        ways = [way for way in ways if way is not False]
        if not ways or len(ways) > _MOST_CHOICES:
            return None
        return ways[0] if len(ways) == 1 else {"anyOf": ways}


def _inexact(value: Any) -> int | None:
    """A whole number in a value that the next ones cannot be told from; None without one."""
    if isinstance(value, int):
        return value if abs(value) > _MOST_EXACT else None
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((found for one in values if (found := _inexact(one)) is not None), None)


def _rounded(name: str, bound: float) -> int:
    """The nearest float to a bound among those that allow no more than it does, and that llguidance has."""
    is_least = name in ("minimum", "exclusiveMinimum")
    bound = max(bound, -_LARGEST) if is_least else min(bound, _LARGEST)
    if abs(bound) > _LARGEST:
        raise UnenforceableError(f"{name} {shown(bound)} cannot be enforced, since it is beyond 2**63")
    nearest = float(bound)
    if nearest < bound if is_least else nearest > bound:
        nearest = math.nextafter(nearest, math.inf if is_least else -math.inf)
    return int(nearest)


def _drop(schema: dict[str, Any], *names: str) -> None:
    for name in names:
        schema.pop(name, None)


def _other_values(schema: Mapping[str, Any]) -> list[Schema]:
    """What allows no value of `const` or `enum`: other types, other texts, the other of two booleans."""
    values = allowed_values(schema)
    if values is None:
        return []
    kinds = {type_of(value) for value in values}
    ways: list[Schema] = [{"type": left}] if (left := [kind for kind in TYPES if kind not in kinds]) else []
    if texts := [value for value in values if isinstance(value, str)]:
        ways.append({"type": "string", "pattern": others(texts)})
    if "boolean" in kinds:
        ways += [{"const": value} for value in (True, False) if not any(one is value for one in values)]
    return ways
