"""The form that a request asks its answers to have, by OpenAI's field or by vLLM's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from d3engine.errors import InvalidValueError, must_be, require
from d3engine.request.structured import StructuredOutputsParams
from d3engine.server.errors import invalid
from d3engine.server.shapes.requests import Common

_FORMATS = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"name", "schema"}}'
_FIELDS = frozenset(StructuredOutputsParams.names())


def form_of(asked: Common) -> StructuredOutputsParams | None:
    """The form, None for any. Raises `RequestError` and `InvalidValueError` naming the field of the request."""
    form = None if asked.response_format is None else _by_response_format(asked.response_format)
    if asked.structured_outputs is None:
        return form
    if form is not None:
        raise invalid("structured_outputs", "structured_outputs must be absent beside response_format.")
    given = {name: value for name, value in asked.structured_outputs.items() if value is not None}
    for name in given:
        allowed = f"an object of the fields {', '.join(StructuredOutputsParams.names())}"
        require(name in _FIELDS, "structured_outputs", asked.structured_outputs, allowed)
    with named("structured_outputs"):
        return StructuredOutputsParams(**given)


def _by_response_format(given: Mapping[str, Any]) -> StructuredOutputsParams | None:
    kind = given.get("type")
    if kind == "json_schema":
        return _by_json_schema(given)
    if kind not in ("text", "json_object") or len(given) > 1:
        raise invalid("response_format", must_be("response_format", given, _FORMATS) + ".")
    return None if kind == "text" else StructuredOutputsParams(json_object=True)


def _by_json_schema(given: Mapping[str, Any]) -> StructuredOutputsParams:
    """`strict` makes no difference: every answer satisfies the schema."""
    asked = given.get("json_schema")
    fits = isinstance(asked, dict) and set(given) == {"type", "json_schema"}
    fits = fits and set(asked or ()) <= {"name", "description", "schema", "strict"}
    if not fits or not isinstance(asked, dict) or not isinstance(asked.get("name"), str):
        raise invalid("response_format", must_be("response_format", given, _FORMATS) + ".")
    if not isinstance(asked.get("schema"), dict) or not isinstance(asked.get("strict") or False, bool):
        allowed = 'with "schema", an object, and "strict", true or false'
        raise invalid("response_format", must_be("response_format.json_schema", asked, allowed) + ".")
    with named("response_format"):
        return StructuredOutputsParams(json=asked["schema"])


@contextmanager
def named(source: str) -> Iterator[None]:
    """Errors about a form name the field of the request that it came of."""
    try:
        yield
    except InvalidValueError as error:
        if error.field not in _FIELDS:
            raise
        raise InvalidValueError(source, error.value, error.allowed) from None
