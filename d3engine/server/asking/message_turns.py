"""Anthropic's turns become the messages of a chat: calls of functions and their results stand in blocks there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from d3engine.errors import require
from d3engine.server.asking.turns import TurnForm, merged, read_content, read_role, read_text, read_turn

TURNS = TurnForm(
    field="messages",
    roles={"user": "user", "assistant": "assistant", "system": "system"},
    kinds=("text",),
    beside={},
    beside_text=frozenset({"cache_control", "citations"}),
    others={
        "tool_use": frozenset({"type", "id", "name", "input", "cache_control"}),
        "tool_result": frozenset({"type", "tool_use_id", "content", "is_error", "cache_control"}),
    },
)


def read_message_turns(turns: Sequence[Any]) -> list[dict[str, Any]]:
    """The messages of a chat. Raises `InvalidValueError` naming the place of what is none."""
    require(len(turns) > 0, "messages", turns, "a list of at least one message")
    found = [message for place, turn in enumerate(turns) for message in _read(f"messages[{place}]", turn)]
    return merged(found)


def _read(name: str, turn: Any) -> list[dict[str, Any]]:
    """One turn: results come first, since they answer the turn before."""
    content = turn.get("content") if isinstance(turn, dict) else None
    if not isinstance(content, list) or not any(_kind(part) in TURNS.others for part in content):
        return [read_turn(name, turn, TURNS)]
    role = read_role(name, turn, TURNS)
    texts, calls, results = [], [], []
    for place, part in enumerate(content):
        where, kind = f"{name}.content[{place}]", _kind(part)
        if kind == "tool_use":
            require(role == "assistant", f"{name}.role", role, "'assistant' for a block of type tool_use")
            calls.append(_call(where, part))
        elif kind == "tool_result":
            require(role == "user", f"{name}.role", role, "'user' for a block of type tool_result")
            results.append(_result(where, part))
        else:
            texts.append(read_text(where, part, TURNS))
    if calls:
        return [{"role": role, "content": texts or "", "tool_calls": calls}]
    return [*results, *([{"role": role, "content": texts}] if texts else [])]


def _kind(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if isinstance(kind, str) else None


def _call(name: str, part: dict[str, Any]) -> dict[str, Any]:
    fits = isinstance(part.get("id"), str) and isinstance(part.get("name"), str) and isinstance(part.get("input"), dict)
    require(fits, name, part, '{"type": "tool_use", "id": a string, "name": a string, "input": an object}')
    return {"id": part["id"], "type": "function", "function": {"name": part["name"], "arguments": part["input"]}}


def _result(name: str, part: dict[str, Any]) -> dict[str, Any]:
    """`is_error` tells the model nothing that the content does not say."""
    fits = isinstance(part.get("tool_use_id"), str)
    require(fits, name, part, '{"type": "tool_result", "tool_use_id": a string, "content": a text or texts}')
    given = part.get("content")
    content = "" if given in (None, []) else read_content(f"{name}.content", given, TURNS)
    return {"role": "tool", "tool_call_id": part["tool_use_id"], "content": content}
