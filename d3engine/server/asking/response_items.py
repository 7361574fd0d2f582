"""The items of a response's input become the messages of a chat; calls and their results are items of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from d3engine.errors import require
from d3engine.server.asking.turns import TurnForm, read_content, read_turn, unknown_in_turns

TURNS = TurnForm(
    field="input",
    roles={"user": "user", "assistant": "assistant", "system": "system", "developer": "system"},
    kinds=("input_text", "output_text"),
    beside={"type": ("message",), "id": None, "status": None, "phase": None},
    beside_text=frozenset({"annotations", "logprobs"}),
)
CALL, RESULT = "function_call", "function_call_output"
FIELDS = {
    CALL: frozenset({"type", "id", "status", "call_id", "name", "arguments"}),
    RESULT: frozenset({"type", "id", "status", "call_id", "output"}),
}


def read_items(items: Sequence[Any]) -> list[dict[str, Any]]:
    """The messages of a chat; calls that follow each other are one message. Raises `InvalidValueError`."""
    require(len(items) > 0, "input", items, "a list of at least one item")
    found: list[dict[str, Any]] = []
    for place, item in enumerate(items):
        name, kind = f"input[{place}]", _kind(item)
        if kind == CALL:
            if not (found and found[-1]["role"] == "assistant"):
                found.append({"role": "assistant", "content": ""})
            found[-1].setdefault("tool_calls", []).append(_call(name, item))
        elif kind == RESULT:
            found.append(_result(name, item))
        else:
            found.append(read_turn(name, item, TURNS))
    return found


def unknown_in_items(items: object) -> list[str]:
    """The names of fields that nobody knows; each once."""
    given = items if isinstance(items, list) else []
    turns = [item for item in given if _kind(item) not in FIELDS]
    others = [item for item in given if _kind(item) in FIELDS]
    unknown = [f"input.{field}" for item in others for field in item if field not in FIELDS[item["type"]]]
    return list(dict.fromkeys([*unknown_in_turns(turns, TURNS), *unknown]))


def _kind(item: Any) -> str | None:
    kind = item.get("type") if isinstance(item, dict) else None
    return kind if isinstance(kind, str) else None


def _call(name: str, item: dict[str, Any]) -> dict[str, Any]:
    fits = all(isinstance(item.get(field), str) for field in ("call_id", "name", "arguments"))
    require(fits, name, item, f'{{"type": "{CALL}", "call_id", "name", "arguments"}}, all of them strings')
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _result(name: str, item: dict[str, Any]) -> dict[str, Any]:
    require(isinstance(item.get("call_id"), str), f"{name}.call_id", item.get("call_id"), "a string")
    content = read_content(f"{name}.output", item.get("output"), TURNS)
    return {"role": "tool", "tool_call_id": item["call_id"], "content": content}
