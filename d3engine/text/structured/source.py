"""A form as one grammar in llguidance's Lark, without forcing: where only one text can
follow, the model still chooses among all tokens that begin it."""

from __future__ import annotations

import json
import re
from contextlib import suppress

from d3engine.errors import InvalidValueError, cut, require
from d3engine.request.params import StructuredOutputsParams
from d3engine.text.structured.finite import grammar_is_finite
from d3engine.text.structured.schema import UnenforceableError, literal, prepared

WHITESPACE = r"( |\n( {0,16}|\t{0,8}))?"
"""Between the parts of JSON: nothing, a space, or a line break and an indentation."""

_OPTIONS = '%llguidance {"no_forcing": true}'
_OWN_SETTINGS = "x-guidance"
_TOKEN = re.compile(r"""//[^\n]*|"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/|(?P<json>%json\s*)""", re.DOTALL)
"""What of a grammar in Lark's syntax may hold `%json`: comments, strings and regular expressions, and schemas."""
_START = re.compile(r"\bstart\b")
_ASCII_CLASSES = "dw"
r"""\d and \w are of ASCII alone, as in the patterns of JSON Schema."""


def grammar_of(params: StructuredOutputsParams) -> str:
    """The form as a grammar. Raises `InvalidValueError` for what would undo the way it is compiled."""
    source = _grammar_of_form(params)
    return source if params.reasoning is None else _behind_reasoning(source, *params.reasoning)


def _behind_reasoning(source: str, opening: str, closing: str) -> str:
    """The same behind a free text that `closing` ends: it must come first, or may with an `opening`."""
    begin = rf"\s{{0,8}}{literal(opening)}" if opening else ""
    reasoning = _regex(rf"{begin}(?s:.*){literal(closing)}")
    way = "(d3_reasoning D3_SPACE)?" if opening else "d3_reasoning D3_SPACE"
    own = [f"start: {way} d3_answer", f"d3_reasoning[lazy]: {reasoning}", r"D3_SPACE: /\s{0,8}/"]
    return "\n".join([_with_start_named(source, "d3_answer"), *own, ""])


def _with_start_named(source: str, name: str) -> str:
    """A grammar whose rule `start` has another name."""
    written, end = [], 0
    while (token := _TOKEN.search(source, end)) is not None:
        after = token.end()
        if token["json"] is not None:
            with suppress(ValueError):
                after = json.JSONDecoder().raw_decode(source, after)[1]
        written += [_START.sub(name, source[end : token.start()]), source[token.start() : after]]
        end = after
    return "".join([*written, _START.sub(name, source[end:])])


def _grammar_of_form(params: StructuredOutputsParams) -> str:
    if params.grammar is not None:
        require("%llguidance" not in params.grammar, "grammar", params.grammar, "a grammar without %llguidance")
        if not grammar_is_finite(params.grammar):
            raise _refused(params, "a grammar to answer by (it allows no answer that ends)")
        return f"{_with_schemas(params)}\n{_OPTIONS}\n"
    if params.regex is not None:
        return _with_start(_regex(params.regex))
    if params.choice is not None:
        return _with_start(_regex("|".join(map(literal, params.choice))))
    schema = json.loads(str(params.json)) if params.json is not None else {"type": "object"}
    return _with_start(_json(schema, params))


def _json(schema: dict[str, object], params: StructuredOutputsParams) -> str:
    """A JSON schema as an expression of the grammar."""
    if _OWN_SETTINGS in schema:
        raise _refused(params, f"a schema without {_OWN_SETTINGS}")
    try:
        enforceable = prepared(schema)
    except UnenforceableError as error:
        raise _refused(params, f"a JSON schema to answer by ({cut(str(error))})") from None
    except RecursionError:
        raise _refused(params, "a schema that is nested less deep") from None
    return f"%json {json.dumps({_OWN_SETTINGS: _settings(params), **enforceable})}"


def _refused(params: StructuredOutputsParams, allowed: str) -> InvalidValueError:
    return InvalidValueError(params.form, getattr(params, params.form), allowed)


def _with_schemas(params: StructuredOutputsParams) -> str:
    """A request's grammar with each of its `%json` schemas compiled as `StructuredOutputsParams.json` is."""
    grammar = str(params.grammar)
    written, end = [], 0
    while (token := _TOKEN.search(grammar, end)) is not None:
        begin, end = end, token.end()
        written.append(grammar[begin:end])
        if token["json"] is None:
            continue
        try:
            schema, after = json.JSONDecoder().raw_decode(grammar, end)
        except (ValueError, RecursionError):
            continue  # the compiler names the fault and its place
        if isinstance(schema, dict):
            written[-1], end = grammar[begin : token.start()] + _json(schema, params), after
    return "".join([*written, grammar[end:]])


def _with_start(rule: str) -> str:
    return f"start: {rule}\n{_OPTIONS}\n"


def _settings(params: StructuredOutputsParams) -> dict[str, object]:
    if params.disable_any_whitespace:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": params.whitespace_pattern or WHITESPACE}


def _regex(pattern: str) -> str:
    """A regular expression as a terminal; its slashes and line breaks do not end it."""
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(pattern, _ASCII_CLASSES)}/"
