"""Whether a schema or a grammar has a finite text: the least fixed point over its references or rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from d3engine.structured.references import Schema, allowed_types, allowed_values, resolved

_TERMINALS = re.compile(r'"(?:\\.|[^"\\])*"i?|/(?:\\.|[^/\\\n])+/[a-z]*|<[^>\n]*>|//[^\n]*|\#[^\n]*', re.DOTALL)
_RULE = re.compile(r"^[?!]?([a-z_]\w*)(?:\.-?\d+|\[[^\]\n]*\])*[ \t]*:", re.MULTILINE)
_WORD = re.compile(r"->\s*\w+|[A-Za-z_]\w*|\d+|\.\.|\S")


def schema_is_finite(root: Schema) -> bool:
    """Whether some finite JSON text satisfies the schema, as far as types and references say."""
    references = list(_references(root))
    known = _fixed_point(references, lambda name, known: _is_finite(resolved(root, name), known))
    return _is_finite(root, known)


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


def _is_finite(schema: Schema, known: Mapping[str, bool]) -> bool:
    if not isinstance(schema, dict):
        return schema is not False
    if allowed_values(schema) is not None:
        return True
    if not known.get(schema.get("$ref", ""), True):
        return False
    if not all(_is_finite(one, known) for one in schema.get("allOf") or ()):
        return False
    for name in ("anyOf", "oneOf"):
        if schema.get(name) and not any(_is_finite(one, known) for one in schema[name]):
            return False
    kinds = allowed_types(schema)
    if kinds - {"object", "array"}:
        return True
    properties, added = schema.get("properties") or {}, schema.get("additionalProperties", True)
    needed = [properties.get(name, added) for name in schema.get("required") or ()]
    if "object" in kinds and all(_is_finite(one, known) for one in needed):
        return True
    items, first = schema.get("items", True), schema.get("prefixItems") or []
    if isinstance(items, list):
        items, first = schema.get("additionalItems", True), items
    least = schema.get("minItems", 0)
    all_items = [*first, items][: int(least) if isinstance(least, int | float) else 0]
    return "array" in kinds and all(_is_finite(one, known) for one in all_items)


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
