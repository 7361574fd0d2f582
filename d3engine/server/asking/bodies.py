"""A body becomes one of the shapes, or an error that names the field.

The one idea: no field is ignored in silence. One that is honoured has a place in the shape; one that asks for something
which is not done here is refused by name (`refused.py`); any other is taken, and the answer names it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, get_args

import msgspec
from msgspec import Struct
from starlette.requests import Request

from d3engine.server.asking.refused import check_refused, taken_names
from d3engine.server.asking.type_errors import wrong_type
from d3engine.server.errors import invalid
from d3engine.server.served import served_by

LONG = 2**16
"""Bytes from which on a body is read by a thread, so that everybody else has turns meanwhile."""

S = TypeVar("S", bound=Struct)


async def read_body(
    request: Request, shape: type[S], unknown_deeper: Callable[[S], list[str]] | None = None
) -> tuple[S, dict[str, str]]:
    """The body as that shape, and the header that names what of it was ignored, if anything.

    `unknown_deeper` finds names that are ignored inside of lists, which shapes do not describe. Raises `RequestError`
    (400) for what is no JSON object, has a field of the wrong type, lacks one, or asks for something that is refused.
    """
    body: bytes = request.scope["state"]["body"]
    if len(body) < LONG:
        asked, unknown = _read(body, shape, unknown_deeper)
    else:
        asked, unknown = await asyncio.to_thread(_read, body, shape, unknown_deeper)
    return asked, served_by(request).ignored.header(unknown)


def _read(body: bytes, shape: type[S], unknown_deeper: Callable[[S], list[str]] | None) -> tuple[S, list[str]]:
    """The body as that shape, and the names in it that are ignored."""
    content = _json_object(body)
    check_refused(content, shape)
    asked = _as_shape(content, shape)
    unknown = [name for name in content if name not in _known(shape)]
    unknown += _unknown_inside(content, shape)
    if unknown_deeper is not None:
        unknown += unknown_deeper(asked)
    return asked, unknown


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise invalid(None, f"The body is no JSON: {error}.", "invalid_json") from None
    if not isinstance(content, dict):
        raise invalid(None, "The body must be a JSON object.", "invalid_json")
    return content


def _as_shape(content: dict[str, Any], shape: type[S]) -> S:
    try:
        return msgspec.convert(content, shape)
    except msgspec.ValidationError as error:
        raise wrong_type(content, shape, str(error)) from None


@cache
def _known(shape: type[Struct]) -> frozenset[str]:
    return frozenset(shape.__struct_fields__) | taken_names(shape)


@cache
def _structs_inside(shape: type[Struct]) -> dict[str, type[Struct]]:
    """The fields of a shape that are shapes themselves."""
    found = {}
    for field in msgspec.structs.fields(shape):
        for kind in (field.type, *get_args(field.type)):
            if isinstance(kind, type) and issubclass(kind, Struct):
                found[field.name] = kind
    return found


def _unknown_inside(content: dict[str, Any], shape: type[Struct]) -> list[str]:
    unknown = []
    for name, inner in _structs_inside(shape).items():
        given = content.get(name)
        if isinstance(given, dict):
            unknown += [f"{name}.{field}" for field in given if field not in inner.__struct_fields__]
    return unknown
