"""What a grammar allows of a JSON schema satisfies that schema once it is parsed."""

import json
from typing import Any

import jsonschema
import pytest
from bad_values import assert_refused

from d3engine.errors import InvalidValueError
from d3engine.request.params import StructuredOutputsParams
from d3engine.text.structured.checker import MOST
from d3engine.text.structured.finite import grammar_is_finite
from d3engine.text.structured.source import grammar_of

llguidance = pytest.importorskip("llguidance")


class Allowed:
    """The texts that a schema's grammar allows, whatever tokens they are cut into."""

    def __init__(self, schema: Any) -> None:
        source = grammar_of(StructuredOutputsParams(json=schema, disable_any_whitespace=True))
        limits = llguidance._lib.LLParserLimits(**MOST)
        self._matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), source, log_level=0, limits=limits)
        assert not self._matcher.is_error(), self._matcher.get_error()

    def __contains__(self, text: str) -> bool:
        place, given = self._matcher.deep_copy(), list(text.encode())
        return place.try_consume_tokens(given) == len(given) and place.is_accepting()


A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CARD = {"properties": {"kind": {"const": "card"}, "number": {"type": "string"}}, "required": ["kind", "number"]}
CASH = {"properties": {"kind": {"const": "cash"}}, "required": ["kind"]}
INT64 = {"minimum": -(2**63), "maximum": 2**63 - 1}
CASES: list[tuple[Any, list[str], list[str]]] = [  # a schema, texts that are allowed, texts that are not
    ({"type": "integer", "minimum": 2**53 + 1}, [str(2**53 + 2)], [str(2**53), "-1"]),
    ({"type": "integer", "maximum": 2**53 + 1}, [str(2**53), "-1"], [str(2**53 + 2)]),
    ({"type": "integer", **INT64}, ["0", str(2**62), str(-(2**62))], [str(2**63), str(-(2**63) - 1)]),
    ({"type": "number", "minimum": -1e30, "maximum": 10**400}, ["0.5", "1000"], ["-1e31"]),
    ({"enum": [2**53 + 1, 3]}, ["3"], [str(2**53)]),
    ({"type": "number", "exclusiveMinimum": 0}, ["0.1", "1"], ["0", "0.0", "-0", "-0.0", "0e1", "-1"]),
    ({"type": "number", "exclusiveMaximum": 0, "minimum": -1}, ["-0.5", "-1"], ["0", "-0", "-0.0", "-1.5"]),
    ({"type": "string", "pattern": "^[a[b]]$"}, ['"a]"', '"[]"'], ['"a"', '"b"']),
    ({"type": "string", "pattern": "^[[:x:]]$"}, ['"x]"', '":]"'], ['"x"', '":"']),
    ({"type": "string", "pattern": "^[a&&b~~c]$"}, ['"a"', '"&"', '"~"'], ['""', '"d"']),
    ({"type": "string", "pattern": r"^[\[\w\]]+$"}, ['"[a]"'], ['"\\\\"']),
    (A, ['{"a":1}', '{"a":1,"b":"x"}'], ['{"a":1,"a":"x"}', r'{"a":1,"\u0061":"x"}', "{}"]),
    (
        {**A, "additionalProperties": {"type": "string"}},
        ['{"a":1,"b":"x"}', '{"a":1,"ab":"x"}', '{"a":1,"":"x"}'],
        ['{"a":1,"b":2}', r'{"a":1,"\u0061":"x"}'],
    ),
    (
        {"properties": {'a"b': {"type": "integer"}}, "additionalProperties": {"type": "string"}, "type": "object"},
        [r'{"a\"b":1}', r'{"a\"c":"x"}'],
        [r'{"a\"b":"x"}', r'{"a\u0022b":"x"}'],
    ),
    (
        {"type": "object", "patternProperties": {"^x": {"type": "integer"}}},
        ['{"x":1}'],
        ['{"x":"1"}', r'{"\u0078":"1"}'],
    ),
    ({"type": "object", "minProperties": 1, "properties": {"a": {}, "b": {}}}, ['{"a":1}', '{"b":1}'], ["{}"]),
    ({"type": "object", "minProperties": 1}, ['{"a":1}'], ["{}"]),
    (
        {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"a":1}', '{"b":1}'],
        ["{}", '{"a":1,"b":1}', '{"b":1,"a":1}', r'{"a":1,"\u0062":1}'],
    ),
    (
        {"type": "object", "oneOf": [CARD, CASH]},
        ['{"kind":"cash"}', '{"kind":"card","number":"1"}'],
        ['{"kind":"card"}', '{"kind":"x"}'],
    ),
    ({"oneOf": [True, True]}, [], ["1"]),
    ({"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 2}]}, [], ["3"]),
    ({"not": {"type": ["string", "number"]}}, ["true", "[]"], ['"a"', "1", "1.5"]),
    ({"type": "string", "not": {"enum": ["ab", "a"]}}, ['""', '"b"', '"abc"'], ['"a"', '"ab"']),
    ({"type": "object", "not": {"required": ["a"]}}, ['{"b":1}', "{}"], ['{"a":1}', r'{"\u0061":1}']),
    (
        {"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
        ['{"b":1}', '{"a":1,"b":1}', "{}"],
        ['{"a":1}'],
    ),
    (
        {
            "type": "object",
            "properties": {"land": {"enum": ["a", "b"]}, "zip": {"type": "string"}},
            "required": ["land"],
            "if": {"properties": {"land": {"const": "a"}}},
            "then": {"required": ["zip"]},
        },
        ['{"land":"b"}', '{"land":"a","zip":"1"}'],
        ['{"land":"a"}'],
    ),
    ({"type": "array", "items": {"const": 1}, "uniqueItems": False}, ["[1,1]"], ["[2]"]),
    ({"type": "string", "maxLength": 3.0}, ['"abc"'], ['"abcd"']),
    ({"type": "string", "pattern": '^[^"]*$'}, ['"ab"'], [r'"a\"b"']),
    ({"type": "string", "pattern": r"^[^\\]*$"}, ['"ab"'], [r'"a\\b"']),
    ({"type": "string", "pattern": "^[^,]*$"}, [r'"a\"\n"'], ['"a,b"']),
    ({"type": "string", "format": "no-such-format"}, ['"anything"'], ["1"]),
    ({"type": ["string", "null"], "format": "date"}, ['"2024-02-29"', "null"], ['"2023-02-29"', '"2100-02-29"']),
    ({"type": "string", "format": "date"}, ['"2021-12-31"', '"2000-02-29"'], ['"2021-04-31"', '"2021-13-01"', '"x"']),
    ({"type": "string", "format": "time"}, ['"23:59:59Z"', '"01:02:03.5+01:30"'], ['"23:58:60Z"', '"24:00:00Z"']),
    ({"type": "string", "format": "date-time"}, ['"2024-02-29T00:00:00Z"'], ['"2023-02-29T00:00:00Z"']),
    ({"type": "string", "format": "hostname"}, ['"a-b.example"', '"abcd"'], ['"xn--x"', '"a..b"', f'"{"a." * 130}a"']),
    ({"type": "string", "format": "json-pointer"}, ['""', '"/a~0b/0"'], ['"a"', '"/~2"']),
    ({"type": "string", "format": "relative-json-pointer"}, ['"0#"', '"1/a"'], ['"/a"', '"01"']),
    ({"type": "string", "format": "uri-reference"}, ['"/a?b#c"', '"http://a/b"'], ['"a b"', '"#a#b"']),
    ({"type": "string", "format": "regex"}, [r'"^(a|b)+[a-z\\d]{3}$"', '"a?"'], ['"*"', '"(a"', '"a**"', r'"\\"']),
    ({"$ref": "#/parts/a", "parts": {"a": A}}, ['{"a":1}'], [r'{"a":1,"\u0061":"x"}']),
    # References that a finite text need not follow.
    ({"type": "object", "properties": {"c": {"$ref": "#"}}}, ['{"c":{}}'], []),
    ({"type": ["object", "null"], "properties": {"c": {"$ref": "#"}}, "required": ["c"]}, ['{"c":null}'], []),
    ({"type": "array", "items": {"$ref": "#"}}, ["[[]]"], []),
    ({"type": "object", "minProperties": 1, "properties": {"a": {}, "x": {"$ref": "#"}}}, ['{"a":1}'], []),
    ({"$id": "https://e.org/s", "type": "object", "properties": {"x": {"$ref": "s"}}}, ['{"x":{}}'], []),
    (
        {"type": "object", "properties": {"c": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["c"]},
        ['{"c":null}'],
        [],
    ),
    ({"type": "object", "properties": {"p": {"const": {"format": "x", "oneOf": [3.0]}}}}, [], []),
]


@pytest.mark.parametrize(("schema", "allowed", "refused"), CASES, ids=lambda value: str(value)[:50])
def test_allowed_text_is_one_whose_value_fits_the_schema(schema: Any, allowed: list[str], refused: list[str]) -> None:
    """A text is allowed only if the value a parser reads satisfies the schema."""
    validator = jsonschema.Draft202012Validator(schema)
    try:
        texts = Allowed(schema)
    except (AssertionError, InvalidValueError):
        assert not allowed  # what cannot be enforced is refused
        return
    for text in allowed:
        assert text in texts
        assert validator.is_valid(json.loads(text))
    for text in refused:
        assert text not in texts


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 2},
        {"type": "object", "properties": {"c": {"$ref": "#"}}, "required": ["c"]},
        {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}},
        },
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "array", "prefixItems": [{"type": "null"}, {"$ref": "#"}], "minItems": 2},
        {"type": "object", "required": ["x"], "additionalProperties": {"$ref": "#"}},
        {"type": "object", "required": ["x"], "patternProperties": {"^x$": {"$ref": "#"}}},
        {"type": "object", "minProperties": 1, "additionalProperties": {"$ref": "#"}},
        {"type": "object", "minProperties": 1, "properties": {"x": {"$ref": "#"}}, "additionalProperties": False},
        {"$anchor": "a", "type": "object", "required": ["x"], "properties": {"x": {"$ref": "#a"}}},
        {"$id": "https://e.org/s", "type": "object", "required": ["x"], "properties": {"x": {"$ref": "s"}}},
        {"type": "object", "required": ["x"], "allOf": [{"properties": {"x": {"$ref": "#"}}}]},
        {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"properties": {"x": {"$ref": "#"}}}},
            "type": "object",
            "required": ["x"],
        },
        {"const": 2**53 + 1},
        {"enum": [[2**53 + 1]]},
        {"type": "integer", "minimum": 2**64},
        {"type": "string", "pattern": "^[]a]$"},
        {"type": "string", "pattern": "^[+--]$"},
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_cannot_be_enforced_or_never_ends_is_refused(schema: Any) -> None:
    with assert_refused("json", "cannot be enforced|no answer that ends"):
        grammar_of(StructuredOutputsParams(json=schema))


@pytest.mark.parametrize(
    "name", ["required", "properties", "patternProperties", "enum", "anyOf", "oneOf", "prefixItems"]
)
@pytest.mark.parametrize("value", [5, "x", [3], {"a": 3}, None], ids=str)
def test_keyword_of_another_type_is_our_or_the_compilers_error(name: str, value: Any) -> None:
    """A keyword with a value of another type is an error of ours or the compiler's."""
    try:
        texts = Allowed({"type": "object", name: value})
    except (InvalidValueError, AssertionError):
        return
    assert "1" not in texts


@pytest.mark.parametrize(
    ("grammar", "is_finite"),
    [
        ('start: "a" start', False),
        ('start: "a" start | "b"', True),
        ('start: a\na: "x" b\nb: a | "y" a', False),
        ('start: a\na: "x" b\nb: a\n | "y"', True),
        ('start: "a" start?', True),
        ('start: "a" (start | "b")', True),
        ('start: "a" (start | start "b")', False),
        ('start: "a" [start]', True),
        ('start: "a" start~0..2', True),
        ('start: ("a" start)+', False),
        ('start: "x: start" /start|/ // start: start\n  | start', True),
    ],
)
def test_a_grammar_without_a_finite_text_is_told_from_others(grammar: str, is_finite: bool) -> None:
    assert grammar_is_finite(grammar) == is_finite
