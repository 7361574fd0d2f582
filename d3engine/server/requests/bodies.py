"""Bodies of requests: read as shapes; wrong types and too much work are refused."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, TypeVar, get_args

import msgspec
from msgspec import Struct
from starlette.requests import Request

from d3engine.errors import NOTHING, InvalidValueError, must_be
from d3engine.request.params import CHECKS, PRIORITIES, Biases, Several
from d3engine.server.errors import RequestError, invalid
from d3engine.server.requests.refused import check_refused, taken_names, with_own_names
from d3engine.server.schemas.requests import Common
from d3engine.server.settings import ServerSettings
from d3engine.server.state import AppState, served_by
from d3engine.utils.arguments import Integers

_AT = r"(?: - at `\$(?P<place>.*)`)?"
_EXPECTED = re.compile(r"Expected `(?P<kinds>[^`]+)`(?:, got `[^`]+`)?" + _AT)
_FIELD = re.compile(r"Object (?P<how>missing required|contains unknown) field `(?P<name>[^`]+)`" + _AT)
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
    if found := _FIELD.match(said):
        place = f"{found['place'] or ''}.{found['name']}".removeprefix(".")
        is_missing = found["how"] == "missing required"
        allowed, code = ("given", "missing_required_parameter") if is_missing else ("absent", "unsupported_parameter")
        return invalid(_field(place), f"{place} must be {allowed}.", code)
    found = _EXPECTED.match(said)
    if found is not None:
        allowed = " or ".join(_WORDS.get(kind, kind) for kind in found["kinds"].split(" | "))
    elif found := _NO_WORD.match(said):
        words = _words_at(shape, found["place"] or "")
        allowed = " or ".join(f'"{word}"' for word in words) or "another word"
    else:
        return invalid(None, f"The body does not fit: {said}.", "invalid_type")
    place = (found["place"] or "").removeprefix(".")
    value = content.get(place, NOTHING)
    return invalid(_field(place), must_be(place or "the body", value, allowed) + ".", "invalid_type")


def _field(place: str) -> str | None:
    """The field of the body that a place is in."""
    return re.split(r"[.\[]", place, maxsplit=1)[0] or None


def _words_at(shape: type[Struct], place: str) -> list[str]:
    """The words that may stand at a place, to which names lead, and "" for an item of a list."""
    steps = ["" if step.startswith("[") else step for step in re.findall(r"\[[^]]*\]|[^.\[]+", place)]
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


PER_ANSWER = tuple(name for name, check in CHECKS.items() if isinstance(check, Several | Biases))
"""Fields that are heeded in every answer."""


def check_work(request: Request, asked: Common, prompts: Sequence[Any] | None = None, n: int | None = None) -> None:
    """Refuse a request of more than `max_request_work` characters and list entries; `prompts` None: those of a chat.

    What concerns each answer is counted for each of them. Raises `InvalidValueError` naming the field that asks most.
    """
    if prompts is None:
        read = {"messages": len(request.scope["state"]["body"])}
    else:
        read = {"prompt": sum(map(len, prompts))}
    answers = (1 if prompts is None else len(prompts)) * (n or asked.n or 1)
    most = most_work(served_by(request))
    sizes = {name: _size(getattr(asked, name)) for name in PER_ANSWER}
    work = read | {name: size * answers for name, size in sizes.items()}
    if sum(work.values()) <= most:
        return
    field = max(work, key=lambda name: work[name])
    given = f"{sizes[field]} for each of {answers} answers" if field in sizes else f"{work[field]} characters or ids"
    allowed = f"part of a request of at most {most} characters and list entries in all (max_request_work)"
    raise InvalidValueError(field, given, allowed)


def most_work(served: AppState) -> int:
    guards = served.settings.guards
    return guards.max_body_bytes if guards.max_request_work is None else guards.max_request_work


def priority_bounds(settings: ServerSettings) -> Integers:
    return PRIORITIES if settings.allow_priority else Integers(0, PRIORITIES.high)


def check_priority(served: AppState, priority: int | None) -> None:
    """Refuse a priority that puts a request before others, unless it may. Raises `RequestError`."""
    if priority is not None and priority < 0 and not served.settings.allow_priority:
        message = f"priority must be 0 or more, since this server lets no request run before others; got {priority}."
        raise invalid("priority", message, "priority_not_allowed")


def _size(value: Any) -> int:
    """Characters of texts, or entries of a list or a mapping."""
    if value is None:
        return 0
    is_texts = isinstance(value, list) and value and isinstance(value[0], str)
    return sum(map(len, value)) if is_texts else len(value)


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
    content = with_own_names(json_object(body), shape)
    asked = read_as(content, shape)
    unknown = [name for name in content if name not in known_names(shape)]
    for name, inner in _structs_inside(shape).items():
        if isinstance(given := content.get(name), dict):
            unknown += [f"{name}.{field}" for field in given if field not in inner.__struct_fields__]
    if unknown_deeper is not None:
        unknown += unknown_deeper(asked)
    return asked, unknown


_HALF = re.compile(rb"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})(?!\\u)")
"""An escape of the first half of a character, such as an emoji's, without the second."""


def json_object(body: bytes) -> dict[str, Any]:
    """A body that is a JSON object. Raises `RequestError`."""
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError) as error:
        half = _HALF.search(body)  # behind which the decoder misses more of the body
        why = error if half is None else f"{half[1].decode()} is half of a character, without its other half"
        raise invalid(None, f"The body is no JSON: {why}.", "invalid_json") from None
    if not isinstance(content, dict):
        raise invalid(None, "The body must be a JSON object.", "invalid_json")
    return content


def read_as(content: dict[str, Any], shape: type[S]) -> S:
    """Fields as that shape, none of them one that it refuses. Raises `RequestError`."""
    check_refused(content, shape)
    return as_shape(content, shape)


def as_shape(content: dict[str, Any], shape: type[S]) -> S:
    try:
        return msgspec.convert(content, shape)
    except msgspec.ValidationError:
        content = {name: whole(value) for name, value in content.items()}
    try:
        return msgspec.convert(content, shape)
    except msgspec.ValidationError as error:
        raise wrong_type(content, shape, str(error)) from None


def whole(value: Any) -> Any:
    """3 for 3.0, as clients write it whose numbers are all floats; everything else as it is."""
    return int(value) if type(value) is float and value.is_integer() else value


@cache
def known_names(shape: type[Struct]) -> frozenset[str]:
    """The fields that are taken or refused by name; all others are ignored, and named in a header."""
    return frozenset(shape.__struct_fields__) | taken_names(shape)


@cache
def _structs_inside(shape: type[Struct]) -> dict[str, type[Struct]]:
    fields = msgspec.structs.fields(shape)
    kinds = ((field.name, kind) for field in fields for kind in (field.type, *get_args(field.type)))
    return {name: kind for name, kind in kinds if isinstance(kind, type) and issubclass(kind, Struct)}
