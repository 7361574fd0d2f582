"""The items of a response's input become the messages of a chat; calls and their results are items of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import to_builtins
from starlette.requests import Request

from d3engine.errors import must_be, require
from d3engine.server.errors import invalid
from d3engine.server.requests.bodies import read_body
from d3engine.server.requests.chat import (
    TurnForm,
    by_names,
    chat_fields,
    function_tool,
    job_of,
    read_content,
    read_turn,
    unknown_in_turns,
)
from d3engine.server.responses.context import RequestContext
from d3engine.server.schemas.requests import RESPONSES, ChatRequest
from d3engine.server.schemas.responses import NamedResponseTool, ResponsesRequest, TextFormat

TURNS = TurnForm(
    field="input",
    roles={"user": "user", "assistant": "assistant", "system": "system", "developer": "system"},
    kinds=("input_text", "output_text"),
    beside={"type": ("message",), "id": None, "status": None, "phase": None},
    beside_text=frozenset({"annotations", "logprobs"}),
)
CALL, RESULT, REASONING = "function_call", "function_call_output", "reasoning"
FIELDS = {
    CALL: frozenset({"type", "id", "status", "call_id", "name", "arguments"}),
    RESULT: frozenset({"type", "id", "status", "call_id", "output"}),
    REASONING: frozenset({"type", "id", "status", "summary", "content", "encrypted_content"}),
}


def read_items(items: Sequence[Any]) -> list[dict[str, Any]]:
    """The messages of a chat; reasoning, text and calls that follow each other are one. Raises `InvalidValueError`."""
    require(len(items) > 0, "input", items, "a list of at least one item")
    found: list[dict[str, Any]] = []
    reasoning: str | None = None
    for place, item in enumerate(items):
        name, kind = f"input[{place}]", _kind(item)
        if kind == REASONING:
            reasoning = _reasoning(name, item)
            continue
        if kind == CALL:
            if reasoning is not None or not (found and found[-1]["role"] == "assistant"):
                found.append({"role": "assistant", "content": ""})
            found[-1].setdefault("tool_calls", []).append(_call(name, item))
        elif kind == RESULT:
            found.append(_result(name, item))
        else:
            found.append(read_turn(name, item, TURNS))
        if reasoning and found[-1]["role"] == "assistant":
            found[-1]["reasoning_content"] = reasoning
        reasoning = None
    return found


def unknown_in_items(items: object) -> list[str]:
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


def _reasoning(name: str, item: dict[str, Any]) -> str:
    """Of its content, or where it was told as a summary alone, of that."""
    content, summary = item.get("content") or [], item.get("summary") or []
    fits = isinstance(content, list) and isinstance(summary, list)
    fits = fits and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content + summary)
    require(fits, name, item, '{"type": "reasoning", "content": [{"type": "reasoning_text", "text"}], "summary": []}')
    return "\n".join(part["text"] for part in content or summary)


def _result(name: str, item: dict[str, Any]) -> dict[str, Any]:
    require(isinstance(item.get("call_id"), str), f"{name}.call_id", item.get("call_id"), "a string")
    content = read_content(f"{name}.output", item.get("output"), TURNS)
    return {"role": "tool", "tool_call_id": item["call_id"], "content": content}


CHAT_FIELDS = chat_fields(ResponsesRequest, RESPONSES, "tools", "tool_choice")


async def response_job(request: Request) -> tuple[RequestContext[ChatRequest], ResponsesRequest, dict[str, str]]:
    """What to run, wholly checked, what was asked for, and headers for the answer. Raises as `chat_job` does."""
    asked, headers = await read_body(request, ResponsesRequest, lambda asked: unknown_in_items(asked.input))
    chat = ChatRequest(
        messages=_messages(asked),
        response_format=_form_of(asked),
        tools=_tools_of(asked),
        tool_choice=_choice_of(asked),
        reasoning_effort=None if asked.reasoning is None else asked.reasoning.effort,
        **{name: getattr(asked, theirs) for theirs, name in CHAT_FIELDS.items()},
    )
    names = {"messages": "input", "response_format": "text", "reasoning_effort": "reasoning"}
    with by_names(RESPONSES.by_own | names):
        job, headers = await job_of(request, chat, headers, id_prefix="resp_")
        return job, asked, headers


def _messages(asked: ResponsesRequest) -> list[dict[str, Any]]:
    given = asked.input
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else read_items(given)
    before = [] if asked.instructions is None else [{"role": "system", "content": asked.instructions}]
    return [*before, *messages]


def _form_of(asked: ResponsesRequest) -> dict[str, Any] | None:
    """`text.format` as a chat's response_format."""
    form = None if asked.text is None else asked.text.format
    if form is None:
        return None
    is_schema = form.type == "json_schema"
    fits = (form.name is not None and form.schema is not None) if is_schema else form == TextFormat(type=form.type)
    if not fits:
        allowed = 'with name and schema where its type is "json_schema", and with its type alone elsewhere'
        raise invalid("text", must_be("text.format", to_builtins(form), allowed) + ".")
    if not is_schema:
        return {"type": form.type}
    return {"type": "json_schema", "json_schema": {"name": form.name, "schema": form.schema}}


def _tools_of(asked: ResponsesRequest) -> list[dict[str, Any]] | None:
    """`tools` as a chat has them; an empty list is none."""
    tools = [function_tool(one.name, one.description, one.parameters, one.strict) for one in asked.tools or ()]
    return tools or None


def _choice_of(asked: ResponsesRequest) -> str | dict[str, Any] | None:
    """`tool_choice` as a chat has it; "auto" without tools asks for nothing."""
    choice = asked.tool_choice
    if isinstance(choice, NamedResponseTool):
        if choice.name not in [tool.name for tool in asked.tools or ()]:
            allowed = "the name of one of the tools"
            raise invalid("tool_choice", must_be("tool_choice.name", choice.name, allowed) + ".")
        return {"type": "function", "function": {"name": choice.name}}
    return None if choice == "auto" and not asked.tools else choice
