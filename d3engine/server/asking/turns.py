"""Conversations as other interfaces have them become the messages of a chat.

The one idea: text is all that the model reads. A part of any other kind is refused by its place, and what stands beside
a text without changing it is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from d3engine.errors import require


@dataclass(frozen=True)
class TurnForm:
    """How an interface writes turns.

    Attributes:
        field: of the request that holds them.
        roles: its roles -> those of chat templates.
        kinds: of parts that are texts.
        beside: of a turn, the fields that are taken beside its role and content, with the values that they may have;
            None: any.
        beside_text: of a part, those that are taken beside its type and text.
    """

    field: str
    roles: Mapping[str, str]
    kinds: tuple[str, ...]
    beside: Mapping[str, tuple[object, ...] | None]
    beside_text: frozenset[str]


def read_turns(turns: Sequence[Any], form: TurnForm) -> list[dict[str, Any]]:
    """The messages of a chat. Raises `InvalidValueError` naming the place of what is none."""
    require(len(turns) > 0, form.field, turns, "a list of at least one message")
    return [_read_turn(f"{form.field}[{place}]", turn, form) for place, turn in enumerate(turns)]


def _read_turn(name: str, turn: Any, form: TurnForm) -> dict[str, Any]:
    require(isinstance(turn, dict), name, turn, "an object with role and content")
    for field, values in form.beside.items():
        given = turn.get(field)
        fits = values is None or given is None or given in values
        require(fits, f"{name}.{field}", given, " or ".join(map(repr, values or ())))
    role = turn.get("role")
    require(isinstance(role, str) and role in form.roles, f"{name}.role", role, " or ".join(map(repr, form.roles)))
    return {"role": form.roles[role], "content": read_content(f"{name}.content", turn.get("content"), form)}


def read_content(name: str, content: Any, form: TurnForm) -> str | list[dict[str, str]]:
    """A text, or the text parts of a chat's message. Raises `InvalidValueError`."""
    if isinstance(content, str):
        return content
    kinds = " or ".join(f'"{kind}"' for kind in form.kinds)
    require(isinstance(content, list) and content != [], name, content, "a string or a list of texts")
    for place, part in enumerate(content):
        is_text = isinstance(part, dict) and part.get("type") in form.kinds and isinstance(part.get("text"), str)
        allowed = f'{{"type": {kinds}, "text": a string}}, since the model reads nothing but text'
        require(is_text, f"{name}[{place}]", part, allowed)
    return [{"type": "text", "text": part["text"]} for part in content]


def unknown_in_turns(turns: object, form: TurnForm) -> list[str]:
    """The names of fields, in turns and their parts, that nobody knows; each once."""
    found: dict[str, None] = {}
    known = {"role", "content", *form.beside}
    for turn in turns if isinstance(turns, list) else []:
        if isinstance(turn, dict):
            found |= dict.fromkeys(f"{form.field}.{name}" for name in turn if name not in known)
            found |= dict.fromkeys(unknown_in_parts(f"{form.field}.content", turn.get("content"), form))
    return list(found)


def unknown_in_parts(name: str, content: object, form: TurnForm) -> list[str]:
    """The same for parts."""
    known = {"type", "text", *form.beside_text}
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    return [f"{name}.{field}" for part in parts for field in part if field not in known]


def merged(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation, in which no two turns of one role follow each other."""
    found: list[dict[str, Any]] = []
    for message in messages:
        if found and found[-1]["role"] == message["role"]:
            found[-1]["content"] = [*_parts(found[-1]["content"]), *_parts(message["content"])]
        else:
            found.append(dict(message))
    return found


def _parts(content: Any) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
