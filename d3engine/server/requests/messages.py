"""Anthropic's turns become the messages of a chat: calls of functions and their results stand in blocks there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from d3engine.errors import must_be, require
from d3engine.server.errors import invalid
from d3engine.server.requests.bodies import read_body
from d3engine.server.requests.chat import (
    TurnForm,
    by_names,
    chat_fields,
    chat_prompt,
    function_tool,
    job_of,
    merged,
    read_content,
    read_role,
    read_text,
    read_turn,
    tool_use,
    unknown_in_parts,
    unknown_in_turns,
)
from d3engine.server.responses.context import RequestContext
from d3engine.server.schemas.messages import CountTokensRequest, MessagesRequest
from d3engine.server.schemas.requests import MESSAGES, ChatRequest
from d3engine.server.state import served_by

TURNS = TurnForm(
    field="messages",
    roles={"user": "user", "assistant": "assistant", "system": "system"},
    kinds=("text",),
    beside={},
    beside_text=frozenset({"cache_control", "citations"}),
    others={
        "tool_use": frozenset({"type", "id", "name", "input", "cache_control"}),
        "tool_result": frozenset({"type", "tool_use_id", "content", "is_error", "cache_control"}),
        "thinking": frozenset({"type", "thinking", "signature"}),
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
    texts, calls, results, reasoning = [], [], [], []
    for place, part in enumerate(content):
        where, kind = f"{name}.content[{place}]", _kind(part)
        if kind == "tool_use":
            require(role == "assistant", f"{name}.role", role, "'assistant' for a block of type tool_use")
            calls.append(_call(where, part))
        elif kind == "thinking":
            require(role == "assistant", f"{name}.role", role, "'assistant' for a block of type thinking")
            reasoning.append(_reasoning(where, part))
        elif kind == "tool_result":
            require(role == "user", f"{name}.role", role, "'user' for a block of type tool_result")
            results.append(_result(where, part))
        else:
            texts.append(read_text(where, part, TURNS))
    said: dict[str, Any] = {"role": role, "content": texts or ""}
    if reasoning:
        said["reasoning_content"] = "\n".join(reasoning)
    if calls:
        said["tool_calls"] = calls
    return [*results, *([said] if texts or calls or reasoning else [])]


def _kind(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if isinstance(kind, str) else None


def _call(name: str, part: dict[str, Any]) -> dict[str, Any]:
    fits = isinstance(part.get("id"), str) and isinstance(part.get("name"), str) and isinstance(part.get("input"), dict)
    require(fits, name, part, '{"type": "tool_use", "id": a string, "name": a string, "input": an object}')
    return {"id": part["id"], "type": "function", "function": {"name": part["name"], "arguments": part["input"]}}


def _reasoning(name: str, part: dict[str, Any]) -> str:
    """The signature is not looked at."""
    found = part.get("thinking")
    require(isinstance(found, str), name, part, '{"type": "thinking", "thinking": a string}')
    return str(found)


def _result(name: str, part: dict[str, Any]) -> dict[str, Any]:
    """`is_error` tells the model nothing that the content does not say."""
    fits = isinstance(part.get("tool_use_id"), str)
    require(fits, name, part, '{"type": "tool_result", "tool_use_id": a string, "content": a text or texts}')
    given = part.get("content")
    content = "" if given in (None, []) else read_content(f"{name}.content", given, TURNS)
    return {"role": "tool", "tool_call_id": part["tool_use_id"], "content": content}


CHAT_FIELDS = chat_fields(MessagesRequest, MESSAGES, "messages", "tools", "tool_choice", "chat_template_kwargs")


async def message_job(request: Request) -> tuple[RequestContext[ChatRequest], dict[str, str]]:
    """What to run, wholly checked, and headers for the answer. Raises `RequestError` and `InvalidValueError`."""
    asked, headers = await read_body(request, MessagesRequest, _unknown_in)
    fields = {name: getattr(asked, theirs) for theirs, name in CHAT_FIELDS.items()}
    chat = _chat_of(asked, response_format=_form_of(asked), **fields)
    thinks = dict.fromkeys(("enable_thinking", "thinking_token_budget"), "thinking")
    with by_names({**MESSAGES.by_own, "response_format": "output_config", **thinks}):
        return await job_of(request, chat, headers, id_prefix="msg_", ends_with_context=True)


async def count_tokens(request: Request) -> tuple[int, dict[str, str]]:
    """The length of a conversation's prompt, and headers for the answer. Raises as `message_job` does."""
    served = served_by(request)
    asked, headers = await read_body(request, CountTokensRequest, _unknown_in)
    served.models.check(asked.model)
    chat = _chat_of(asked)
    with by_names({"enable_thinking": "thinking"}):
        tools, chat = await tool_use(served, chat)
    prompt = await chat_prompt(served, chat, chat.messages, tools.shown)
    return len(prompt["prompt_token_ids"]), served.ignored.header(tools.ignored, headers)


def _chat_of(asked: CountTokensRequest, **fields: Any) -> ChatRequest:
    """The same as a chat. An answer goes on where the last turn ends if that is the assistant's."""
    messages = read_message_turns(asked.messages)
    continues = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    if asked.system is not None and asked.system != []:
        messages.insert(0, {"role": "system", "content": read_content("system", asked.system, TURNS)})
    beside = {"chat_template_kwargs": asked.chat_template_kwargs, **_thinking_of(asked), **_tools_of(asked)}
    return ChatRequest(messages=messages, continue_final_message=continues, **beside, **fields)


def _thinking_of(asked: CountTokensRequest) -> dict[str, Any]:
    """`thinking` as a chat has it."""
    given = asked.thinking
    if given is None or given.type == "adaptive":
        return {}
    if given.type == "disabled" and given.budget_tokens is not None:
        raise invalid(
            "thinking", must_be("thinking.budget_tokens", given.budget_tokens, "absent without reasoning") + "."
        )
    return {"enable_thinking": given.type == "enabled", "thinking_token_budget": given.budget_tokens}


def _form_of(asked: MessagesRequest) -> dict[str, Any] | None:
    """`output_config` as a chat's response_format."""
    if asked.output_config is None or asked.output_config.format is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": asked.output_config.format.schema}}


def _tools_of(asked: CountTokensRequest) -> dict[str, Any]:
    """`tools` and `tool_choice` as a chat has them."""
    names = [tool.name for tool in asked.tools or ()]
    choice = asked.tool_choice
    if choice is not None:
        is_named = choice.type == "tool"
        fits = is_named == (choice.name is not None) and (not is_named or choice.name in names)
        allowed = 'with a name out of tools where its type is "tool", and with none elsewhere'
        require(fits, "tool_choice", choice, allowed)
        require(bool(names) or choice.type == "none", "tool_choice", choice.type, 'absent or "none" without tools')
    if not asked.tools:
        return {}
    words: dict[str, Any] = {"none": "none", "any": "required"}
    named = {"type": "function", "function": {"name": choice.name}} if choice is not None else None
    return {
        "tools": [function_tool(one.name, one.description, one.input_schema, one.strict) for one in asked.tools],
        "tool_choice": "auto" if choice is None or choice.type == "auto" else words.get(choice.type, named),
        "parallel_tool_calls": None if choice is None else not choice.disable_parallel_tool_use,
    }


def _unknown_in(asked: CountTokensRequest) -> list[str]:
    return [*unknown_in_parts("system", asked.system, TURNS), *unknown_in_turns(asked.messages, TURNS)]
