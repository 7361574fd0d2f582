"""The messages of a conversation, checked, as the plain JSON that a template reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from d3engine.errors import require

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names that clients and templates give an assistant's reasoning; one field here."""


@dataclass(frozen=True)
class MessageFormat:
    """How a template reads messages."""

    walks_parts: bool = False
    """It iterates over the parts of a content, which may therefore be a list."""
    only_walks: bool = False
    """It only iterates: it would go through a string character by character."""
    reasoning_fields: tuple[str, ...] = ()
    """Those of `REASONING_FIELDS` that it reads."""


def check_messages(messages: object, form: MessageFormat) -> list[dict[str, Any]]:
    """Return a copy for a template that reads `form`. Raises `InvalidValueError` naming the malformed field."""
    require(isinstance(messages, list | tuple), "messages", messages, "a list of messages")
    assert isinstance(messages, list | tuple)
    return [_check_message(f"messages[{i}]", message, form) for i, message in enumerate(messages)]


def plain(name: str, value: Any, depth: int = 0) -> Any:
    """Return a copy of JSON-like `value`, so that a template sees no custom object."""
    require(depth < 64, name, value, "nested less than 64 deep")
    if type(value) is int:
        require(value.bit_length() <= 4096, name, f"{value.bit_length()} bits", "an integer of at most 4096 bits")
        return value
    if value is None or type(value) in (bool, float, str):
        return value
    if isinstance(value, Mapping):
        require(all(isinstance(key, str) for key in value), name, value, "an object whose keys are strings")
        return {key: plain(f"{name}.{key}", item, depth + 1) for key, item in value.items()}
    require(isinstance(value, list | tuple), name, value, "JSON: null, boolean, number, string, list or object")
    return [plain(f"{name}[{i}]", item, depth + 1) for i, item in enumerate(value)]


def _check_message(name: str, message: object, form: MessageFormat) -> dict[str, Any]:
    require(isinstance(message, Mapping), name, message, "an object with role and content")
    assert isinstance(message, Mapping)
    role = message.get("role")
    require(isinstance(role, str), f"{name}.role", role, "a string")
    # Keys with the value None are left out, as in transformers: a template asks `is defined` and would write "None".
    given: dict[str, Any] = {key: value for key, value in plain(name, message).items() if value is not None}
    given_fields = [field for field in REASONING_FIELDS if field in given]
    # An assistant's message with only tool calls or reasoning has no content.
    if "content" in given or not (given.get("tool_calls") or given_fields):
        nothing = "" if role == "assistant" else None  # an empty answer, as servers give and clients send back
        given["content"] = _content(f"{name}.content", given.get("content", nothing), form)
    if given_fields and form.reasoning_fields:  # it gets the names that the template reads
        text = given[given_fields[0]]
        for field in given_fields:
            value = given.pop(field)
            require(value == text, f"{name}.{field}", value, f"the same as {given_fields[0]} beside it")
        given |= dict.fromkeys(form.reasoning_fields, text)
    return given


def _content(name: str, content: object, form: MessageFormat) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if form.only_walks else content
    require(isinstance(content, list), name, content, "a string or a list of text parts")
    assert isinstance(content, list)
    for i, part in enumerate(content):
        is_text = isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        require(is_text, f"{name}[{i}]", part, '{"type": "text", "text": a string}')
    return content if form.walks_parts else "\n".join(part["text"] for part in content)
