"""The functions that a chat may call: whether the answer must call one, and what form that gives it.

The one idea: a call that must come is a form. "required" is a list of {"name", "parameters"}, each as the function's
own schema has it, and a named function's answer is its arguments alone. Whether to call at all ("auto") is the model's
to say, in the words that it was trained on; of those we read Llama 3's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from d3engine.errors import must_be
from d3engine.request.structured import StructuredOutputsParams
from d3engine.server.asking.structured import named
from d3engine.server.errors import invalid
from d3engine.server.shapes.fields import FUNCTIONS_NAME, MAX_TOOLS
from d3engine.server.shapes.requests import ChatRequest, NamedTool, Tool
from d3engine.text.tokenizer import Tokenizer

_NAME = re.compile(FUNCTIONS_NAME)
_LLAMA3_MARK = "<|python_tag|>"


@dataclass(frozen=True)
class Calling:
    """How an answer calls functions.

    Attributes:
        kind: by itself ("auto"), at any rate ("required"), or one whose arguments the answer is ("named").
        names: of the functions; of "named" that one alone.
        form: what the answer must be; None where it may be text.
        tools: as the request has them, for the template.
    """

    kind: Literal["auto", "required", "named"]
    names: tuple[str, ...]
    form: StructuredOutputsParams | None
    tools: Sequence[Mapping[str, Any]]


def calling_of(asked: ChatRequest, tokenizer: Tokenizer) -> Calling | None:
    """How the answer to a chat calls functions; None: it calls none. Raises `RequestError`."""
    if asked.tools is None:
        if asked.tool_choice not in (None, "none"):
            raise invalid(
                "tool_choice", must_be("tool_choice", asked.tool_choice, 'absent or "none" without tools') + "."
            )
        return None
    tools = _tools(asked.tools)
    choice = "auto" if asked.tool_choice is None else asked.tool_choice
    if choice == "none":
        return None
    for name in ("response_format", "structured_outputs"):
        if getattr(asked, name) not in (None, {"type": "text"}):
            raise invalid(name, f'{name} must be absent where tools may be called (tool_choice is not "none").')
    names = tuple(tool.function.name for tool in tools)
    if choice == "auto":
        _require_llama3(tokenizer)
        return Calling("auto", names, None, asked.tools)
    with named("tools"):
        if choice == "required":
            most = 1 if asked.parallel_tool_calls is False else MAX_TOOLS
            return Calling("required", names, StructuredOutputsParams(json=_any_of(tools, most)), asked.tools)
        chosen = _named(choice, tools)
        form = StructuredOutputsParams(json=_parameters(chosen))
        return Calling("named", (chosen.function.name,), form, asked.tools)


def with_arguments_read(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with the arguments of earlier calls as the objects that templates write, not as their text."""
    return [_read_calls(message) if message.get("tool_calls") else message for message in messages]


def _read_calls(message: dict[str, Any]) -> dict[str, Any]:
    calls = message["tool_calls"]
    if not isinstance(calls, list):
        raise invalid("messages", must_be("messages", message, "with tool_calls, a list") + ".")
    found = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if isinstance(function, dict) and isinstance(arguments, str):
            try:
                call = {**call, "function": {**function, "arguments": json.loads(arguments or "{}")}}
            except (ValueError, RecursionError):
                allowed = "with arguments that are JSON in every tool call"
                raise invalid("messages", must_be("messages", message, allowed) + ".") from None
        found.append(call)
    return {**message, "tool_calls": found}


def _tools(given: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """The functions, checked."""
    if not 0 < len(given) <= MAX_TOOLS:
        raise invalid("tools", must_be("tools", f"{len(given)} tools", f"absent, or 1 to {MAX_TOOLS} of them") + ".")
    tools = []
    for place, one in enumerate(given):
        allowed = '{"type": "function", "function": {"name", "description", "parameters", "strict"}}'
        try:
            tool = msgspec.convert(one, Tool)
        except msgspec.ValidationError as error:
            raise invalid("tools", must_be(f"tools[{place}]", one, f"{allowed} ({error})") + ".") from None
        if not _NAME.fullmatch(tool.function.name):
            allowed = "1 to 64 letters, digits, underscores and hyphens of ASCII"
            raise invalid("tools", must_be(f"tools[{place}].function.name", tool.function.name, allowed) + ".")
        tools.append(tool)
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise invalid("tools", must_be("tools", names, "functions of different names") + ".")
    return tools


def _named(choice: object, tools: Sequence[Tool]) -> Tool:
    """The function that must be called."""
    allowed = '"none", "auto", "required", or {"type": "function", "function": {"name": one of the tools}}'
    try:
        name = msgspec.convert(choice, NamedTool).function.name
        return next(tool for tool in tools if tool.function.name == name)
    except (msgspec.ValidationError, StopIteration):
        raise invalid("tool_choice", must_be("tool_choice", choice, allowed) + ".") from None


def _require_llama3(tokenizer: Tokenizer) -> None:
    if not any(tokenizer.convert_id_to_token(token) == _LLAMA3_MARK for token in tokenizer.special_ids):
        message = (
            'tool_choice must be "none", "required" or a named function, since how this model calls functions by itself'
            " is not known."
        )
        raise invalid("tool_choice", message, "unsupported_parameter")


def _parameters(tool: Tool) -> dict[str, Any]:
    """The schema of a function's arguments: those of a function without parameters are none."""
    none = {"type": "object", "properties": {}, "additionalProperties": False}
    return none if tool.function.parameters is None else {"type": "object", **tool.function.parameters}


def _any_of(tools: Sequence[Tool], most: int) -> dict[str, Any]:
    """One or more calls. Each function's schema stands by itself, and what it refers to is found there."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "parameters": {"$ref": f"#/$defs/{place}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for place, tool in enumerate(tools)
    ]
    schemas = {str(place): _moved(_parameters(tool), f"#/$defs/{place}") for place, tool in enumerate(tools)}
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, "maxItems": most, "$defs": schemas}


def _moved(schema: Any, to: str) -> Any:
    """A copy of a schema whose references to its own parts lead to `to`."""
    if isinstance(schema, list):
        return [_moved(item, to) for item in schema]
    if not isinstance(schema, dict):
        return schema
    own = schema.get("$ref")
    moved = {key: _moved(value, to) for key, value in schema.items()}
    return {**moved, "$ref": to + own[1:]} if isinstance(own, str) and own.startswith("#") else moved
