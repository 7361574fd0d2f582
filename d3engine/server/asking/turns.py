"""Conversations as other interfaces have them become the messages of a chat.

The one idea: text is all that the model reads. A part of any other kind is refused by its place, and what stands beside
a text without changing it is taken.
"""

from __future__ import annotations

import dataclasses
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
        others: kinds of parts that are no texts and are read by whoever has them -> the fields that such a part has.
    """

    field: str
    roles: Mapping[str, str]
    kinds: tuple[str, ...]
    beside: Mapping[str, tuple[object, ...] | None]
    beside_text: frozenset[str]
    others: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)


def read_turns(turns: Sequence[Any], form: TurnForm) -> list[dict[str, Any]]:
    """The messages of a chat. Raises `InvalidValueError` naming the place of what is none."""
    require(len(turns) > 0, form.field, turns, "a list of at least one message")
    return [read_turn(f"{form.field}[{place}]", turn, form) for place, turn in enumerate(turns)]


def read_turn(name: str, turn: Any, form: TurnForm) -> dict[str, Any]:
    """The message of one turn."""
    role = read_role(name, turn, form)
    return {"role": role, "content": read_content(f"{name}.content", turn.get("content"), form)}


def read_role(name: str, turn: Any, form: TurnForm) -> str:
    """Whose turn it is, as a chat has it, where it is one."""
    require(isinstance(turn, dict), name, turn, "an object with role and content")
    for beside, values in form.beside.items():
        given = turn.get(beside)
        fits = values is None or given is None or given in values
        require(fits, f"{name}.{beside}", given, " or ".join(map(repr, values or ())))
    role = turn.get("role")
    require(isinstance(role, str) and role in form.roles, f"{name}.role", role, " or ".join(map(repr, form.roles)))
    return form.roles[role]


def read_content(name: str, content: Any, form: TurnForm) -> str | list[dict[str, str]]:
    """A text, or the text parts of a chat's message. Raises `InvalidValueError`."""
    if isinstance(content, str):
        return content
    require(isinstance(content, list) and content != [], name, content, "a string or a list of texts")
    return [read_text(f"{name}[{place}]", part, form) for place, part in enumerate(content)]


def read_text(name: str, part: Any, form: TurnForm) -> dict[str, str]:
    """The text part of a chat's message."""
    kinds = " or ".join(f'"{kind}"' for kind in form.kinds)
    is_text = isinstance(part, dict) and part.get("type") in form.kinds and isinstance(part.get("text"), str)
    require(is_text, name, part, f'{{"type": {kinds}, "text": a string}}, since the model reads nothing but text')
    return {"type": "text", "text": part["text"]}


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
    texts = frozenset({"type", "text", *form.beside_text})
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    known = [form.others.get(str(part.get("type")), texts) for part in parts]
    return [f"{name}.{one}" for part, names in zip(parts, known, strict=True) for one in part if one not in names]


def merged(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation, in which no two turns of one role follow each other, but for calls and their results."""
    found: list[dict[str, Any]] = []
    for message in messages:
        is_plain = message["role"] != "tool" and "tool_calls" not in message
        if found and found[-1]["role"] == message["role"] and is_plain and "tool_calls" not in found[-1]:
            found[-1]["content"] = [*_parts(found[-1]["content"]), *_parts(message["content"])]
        else:
            found.append(dict(message))
    return found


def _parts(content: Any) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
