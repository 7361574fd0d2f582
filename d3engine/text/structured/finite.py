"""Whether a schema or a grammar has a finite text: the least fixed point over its references or rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from d3engine.text.structured.references import Schema, allowed_types, allowed_values, resolved

_TERMINALS = re.compile(r'"(?:\\.|[^"\\])*"i?|/(?:\\.|[^/\\\n])+/[a-z]*|<[^>\n]*>|//[^\n]*|\#[^\n]*', re.DOTALL)
_RULE = re.compile(r"^[?!]?([a-z_]\w*)(?:\.-?\d+|\[[^\]\n]*\])*[ \t]*:", re.MULTILINE)
_WORD = re.compile(r"->\s*\w+|[A-Za-z_]\w*|\d+|\.\.|\S")


def schema_is_finite(root: Schema) -> bool:
    """Whether some finite JSON text satisfies the schema, as far as types and references say."""
    references = list(_references(root))
    known = _fixed_point(references, lambda name, known: _Finite(root, known).allows(resolved(root, name)))
    return _Finite(root, known).allows(root)


def grammar_is_finite(grammar: str) -> bool:
    """Whether the rule `start` of a grammar in Lark's syntax derives a finite text; True where it cannot be read."""
    if "::" in grammar or re.search(r"%(?!ignore\b)", grammar):  # rules with parameters, and grammars within
        return True
    plain = _TERMINALS.sub(lambda found: " " if found[0].startswith(("//", "#")) else " T ", grammar)
    begins = list(_RULE.finditer(plain))
    if not begins:
        return True
    ends = [found.start() for found in begins[1:]] + [len(plain)]
    rules = {found[1]: plain[found.end() : end] for found, end in zip(begins, ends, strict=True)}
    try:
        known = _fixed_point(list(rules), lambda name, known: _Alternatives(rules[name], rules.keys(), known).read())
    except (_UnreadError, IndexError):
        return True
    return known.get("start", True)


def _fixed_point(names: list[str], is_finite: Callable[[str, Mapping[str, bool]], bool]) -> dict[str, bool]:
    known = dict.fromkeys(names, False)
    while True:
        found = [name for name in names if not known[name] and is_finite(name, known)]
        if not found:
            return known
        known.update(dict.fromkeys(found, True))


def _references(schema: Any) -> set[str]:
    """All references of a document, those that stand in data included."""
    if isinstance(schema, list):
        return set().union(*map(_references, schema))
    if not isinstance(schema, dict):
        return set()
    own = {schema["$ref"]} if isinstance(schema.get("$ref"), str) else set()
    return own.union(*map(_references, schema.values()))


class _Finite:
    """Whether schemas of a document allow finite texts, as far as it is known of its references."""

    def __init__(self, root: Schema, known: Mapping[str, bool]) -> None:
        self._root = root
        self._known = known

    def allows(self, schema: Schema) -> bool:
        if not isinstance(schema, dict):
            return schema is not False
        parts = self._parts(schema, frozenset())
        if any(allowed_values(part) is not None for part in parts):
            return True
        for part in parts:
            if not self._known.get(part.get("$ref", ""), True):
                return False
            for name in ("anyOf", "oneOf"):
                if part.get(name) and not any(map(self.allows, part[name])):
                    return False
        kinds = frozenset.intersection(*map(allowed_types, parts))
        if kinds - {"object", "array"} or not kinds:  # what has no type at all, the compiler refuses
            return True
        return ("object" in kinds and self._allows_object(parts)) or ("array" in kinds and self._allows_array(parts))

    def _parts(self, schema: Mapping[str, Any], seen: frozenset[str]) -> list[Mapping[str, Any]]:
        """The schema and all that its `allOf` and `$ref` add to it, each for itself."""
        found = [schema]
        for one in schema.get("allOf") or ():
            found += self._parts(one, seen) if isinstance(one, dict) else [{"type": []}] if one is False else []
        name = schema.get("$ref")
        is_alone = len(schema) == 1 and not seen  # then all is said by what is known of the reference
        if (
            not is_alone
            and isinstance(name, str)
            and name not in seen
            and isinstance(to := resolved(self._root, name), dict)
        ):
            found += self._parts(to, seen | {name})
        return found

    def _allows_object(self, parts: list[Mapping[str, Any]]) -> bool:
        needed = {name for part in parts for name in part.get("required") or ()}
        if not all(self._allows_key(parts, name) for name in needed):
            return False
        least = max((n for part in parts if isinstance(n := part.get("minProperties"), int | float)), default=0)
        others = {name for part in parts for name in _keys(part)} - needed
        num_others = sum(self._allows_key(parts, name) for name in others)
        return least <= len(needed) + num_others or self._allows_other_keys(parts)

    def _allows_key(self, parts: list[Mapping[str, Any]], name: str) -> bool:
        return all(self.allows(schema) for part in parts for schema in _schemas_of_key(part, name))

    def _allows_other_keys(self, parts: list[Mapping[str, Any]]) -> bool:
        patterns = [schema for part in parts for schema in (part.get("patternProperties") or {}).values()]
        return any(map(self.allows, patterns)) or all(
            self.allows(part.get("additionalProperties", True)) for part in parts
        )

    def _allows_array(self, parts: list[Mapping[str, Any]]) -> bool:
        least = max((n for part in parts if isinstance(n := part.get("minItems"), int | float)), default=0)
        return all(self.allows(one) for part in parts for one in _schemas_of_items(part, int(least)))


def _schemas_of_key(schema: Mapping[str, Any], name: str) -> list[Schema]:
    patterns, properties = schema.get("patternProperties") or {}, schema.get("properties") or {}
    found = [one for pattern, one in patterns.items() if _matches(pattern, name)]
    if name in _keys(schema):
        found.append(properties[name])
    return found or [schema.get("additionalProperties", True)]


def _keys(schema: Mapping[str, Any]) -> list[str]:
    return [name for name, _ in (schema.get("properties") or {}).items()]  # what is no mapping, raises AttributeError


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return False  # the compiler names it, if it is not one of its own either


def _schemas_of_items(schema: Mapping[str, Any], least: int) -> list[Schema]:
    """The schemas of the first `least` items."""
    items, first = schema.get("items", True), schema.get("prefixItems") or []
    if isinstance(items, list):
        items, first = schema.get("additionalItems", True), items
    return [*first, items][:least]


class _UnreadError(Exception):
    """A grammar with syntax that is not known here."""


class _Alternatives:
    """The right side of a rule, read to find out whether it derives a finite text."""

    def __init__(self, text: str, rules: Any, known: Mapping[str, bool]) -> None:
        self._words = _WORD.findall(text)
        self._rules = rules
        self._known = known

    def read(self) -> bool:
        found = self._alternatives()
        if self._words and not self._words[0].startswith("%"):
            raise _UnreadError
        return found

    def _alternatives(self) -> bool:
        found = self._sequence()
        while self._words and self._words[0] == "|":
            self._words.pop(0)
            found |= self._sequence()
        return found

    def _sequence(self) -> bool:
        found = True
        while self._words and self._words[0] not in ("|", ")", "]") and not self._words[0].startswith("%"):
            found &= self._item()
        return found

    def _item(self) -> bool:
        word = self._words.pop(0)
        if word.startswith("->"):
            return True
        if word in ("(", "["):
            found = self._alternatives() or word == "["
            if not self._words or self._words.pop(0) != {"(": ")", "[": "]"}[word]:
                raise _UnreadError
        elif word.isidentifier():
            found = self._known.get(word, True)
        else:
            raise _UnreadError
        return self._repeated(found)

    def _repeated(self, found: bool) -> bool:
        if self._words and self._words[0] in ("?", "*", "+"):
            return self._words.pop(0) != "+" or found
        if self._words and self._words[0] in ("~", "{"):
            is_braced = self._words.pop(0) == "{"
            found |= bool(self._words) and self._words[0] in ("0", ",")
            while self._words and (self._words[0].isdigit() or self._words[0] in ("..", ",")):
                self._words.pop(0)
            if is_braced and (not self._words or self._words.pop(0) != "}"):
                raise _UnreadError
        return found
