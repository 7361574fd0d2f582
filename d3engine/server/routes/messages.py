"""Anthropic's messages: turns become those of a chat, whose answer is blocks that open, grow and close."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from d3engine.errors import must_be, require
from d3engine.request.outputs import RequestOutput
from d3engine.server.errors import anthropics_error_body, invalid
from d3engine.server.requests import chat
from d3engine.server.requests.bodies import read_body
from d3engine.server.requests.sampling import by_names
from d3engine.server.responses.context import RequestContext
from d3engine.server.responses.streams import StreamForm, named_event
from d3engine.server.responses.writer import Delta, SingleAnswer, respond
from d3engine.server.schemas.answers import DepthsOfTokens
from d3engine.server.schemas.messages import (
    CountTokensRequest,
    Message,
    MessagesRequest,
    MessageUsage,
    StopReason,
    TokenCount,
)
from d3engine.server.schemas.requests import MESSAGES, ChatRequest
from d3engine.server.state import json_response, served_by


async def create_message(request: Request) -> Response:
    """Answer a conversation, as Anthropic has it."""
    asked, headers = await read_body(request, MessagesRequest, _unknown_in)
    fields = {name: getattr(asked, theirs) for theirs, name in CHAT_FIELDS.items()}
    conversation = _chat_of(asked, response_format=_form_of(asked), **fields)
    thinks = dict.fromkeys(("enable_thinking", "thinking_token_budget"), "thinking")
    with by_names({**MESSAGES.by_own, "response_format": "output_config", **thinks}):
        job, headers = await chat.job_of(request, conversation, headers, id_prefix="msg_", ends_with_context=True)
    return await respond(job, MessageAnswer(job), headers)


async def count_message_tokens(request: Request) -> Response:
    """Count a conversation's tokens."""
    served = served_by(request)
    asked, headers = await read_body(request, CountTokensRequest, _unknown_in)
    served.models.check(asked.model)
    conversation = _chat_of(asked)
    with by_names({"enable_thinking": "thinking"}):
        tools, conversation = await chat.tool_use(served, conversation)
    prompt = await chat.chat_prompt(served, conversation, conversation.messages, tools.shown)
    found: TokenCount = {"input_tokens": len(prompt["prompt_token_ids"])}
    return json_response(found, served.ignored.header(tools.ignored, headers))


# -- requests --------------------------------------------------------------------------------------------------------

TURNS = chat.TurnForm(
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
    return chat.merged(found)


def _read(name: str, turn: Any) -> list[dict[str, Any]]:
    """One turn: results come first, since they answer the turn before."""
    content = turn.get("content") if isinstance(turn, dict) else None
    if not isinstance(content, list) or not any(_kind(part) in TURNS.others for part in content):
        return [chat.read_turn(name, turn, TURNS)]
    role = chat.read_role(name, turn, TURNS)
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
            texts.append(chat.read_text_part(where, part, TURNS))
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
    content = "" if given in (None, []) else chat.read_content(f"{name}.content", given, TURNS)
    return {"role": "tool", "tool_call_id": part["tool_use_id"], "content": content}


CHAT_FIELDS = chat.chat_fields(MessagesRequest, MESSAGES, "messages", "tools", "tool_choice", "chat_template_kwargs")


_NOT_BEGUN = [{"role": "assistant", "content": content} for content in ("", [{"type": "text", "text": ""}])]
"""An answer to go on with that has no text yet."""


def _chat_of(asked: CountTokensRequest, **fields: Any) -> ChatRequest:
    """The same as a chat. An answer goes on where the last turn ends if that is the assistant's."""
    messages = read_message_turns(asked.messages)
    if len(messages) > 1 and messages[-1] in _NOT_BEGUN:
        messages.pop()  # which Anthropic allows
    continues = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    if asked.system is not None and asked.system != []:
        messages.insert(0, {"role": "system", "content": chat.read_content("system", asked.system, TURNS)})
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
        "tools": [chat.function_tool(one.name, one.description, one.input_schema, one.strict) for one in asked.tools],
        "tool_choice": "auto" if choice is None or choice.type == "auto" else words.get(choice.type, named),
        "parallel_tool_calls": None if choice is None else not choice.disable_parallel_tool_use,
    }


def _unknown_in(asked: CountTokensRequest) -> list[str]:
    return [*chat.unknown_in_parts("system", asked.system, TURNS), *chat.unknown_in_turns(asked.messages, TURNS)]


# -- answers --------------------------------------------------------------------------------------------------------


class MessageBlocks:
    """The blocks of one message; with `begins_with_text` it can be nothing but a text, whose block opens at once."""

    def __init__(self, *, begins_with_text: bool) -> None:
        self._begins_with_text = begins_with_text
        self._index = -1
        self._kind: str | None = None
        self._waiting: DepthsOfTokens = {"depths": [], "token_offsets": []}
        self.has_calls = False

    def first_events(self) -> list[dict[str, Any]]:
        return self._open("text", {"type": "text", "text": ""}) if self._begins_with_text else []

    def events(self, news: Delta) -> list[dict[str, Any]]:
        """What is new; `d3ext` goes with the first that has words to it."""
        found: list[dict[str, Any]] = []
        if (told := news.d3ext.get("d3ext")) is not None:
            self._waiting["depths"] += told["depths"]
            self._waiting["token_offsets"] += told["token_offsets"]
        if news.reasoning:
            if self._kind != "thinking":
                found += self._open("thinking", _thinking_block(""))
            found.append(self._delta({"type": "thinking_delta", "thinking": news.reasoning}))
        if news.text:
            if self._kind != "text":
                found += [*self.close(), *self._open("text", {"type": "text", "text": ""})]
            found.append(self._delta({"type": "text_delta", "text": news.text}))
        for call in news.calls:
            if "id" in call:
                self.has_calls = True
                block: dict[str, Any] = {
                    "type": "tool_use",
                    "id": call["id"],
                    "name": call["function"].get("name"),
                    "input": {},
                }
                found += [*self.close(), *self._open("tool_use", block)]
            found.append(self._delta({"type": "input_json_delta", "partial_json": call["function"]["arguments"]}))
        if self._waiting["depths"] and self._kind is not None:
            found.append(self._delta(_NOTHING_NEW[self._kind]))
        return found

    def close(self) -> list[dict[str, Any]]:
        """The end of the block that is open, if one is."""
        if self._kind is None:
            return []
        self._kind = None
        return [{"type": "content_block_stop", "index": self._index}]

    def _open(self, kind: str, block: dict[str, Any]) -> list[dict[str, Any]]:
        self._kind, self._index = kind, self._index + 1
        return [{"type": "content_block_start", "index": self._index, "content_block": block}]

    def _delta(self, delta: dict[str, str]) -> dict[str, Any]:
        event: dict[str, Any] = {"type": "content_block_delta", "index": self._index, "delta": delta}
        if self._waiting["depths"]:
            event["d3ext"], self._waiting = self._waiting, {"depths": [], "token_offsets": []}
        return event


_NOTHING_NEW = {
    "thinking": {"type": "thinking_delta", "thinking": ""},
    "text": {"type": "text_delta", "text": ""},
    "tool_use": {"type": "input_json_delta", "partial_json": ""},
}


def _thinking_block(reasoning: str) -> dict[str, Any]:
    """Reasoning; its signature is empty, since the server checks none of those that come back."""
    return {"type": "thinking", "thinking": reasoning, "signature": ""}


def whole_blocks(news: Delta, *, begins_with_text: bool) -> list[dict[str, Any]]:
    """The blocks of a whole answer; a call that was cut off within its arguments is none."""
    found = [_thinking_block(news.reasoning)] if news.reasoning else []
    if news.text or begins_with_text:
        found.append({"type": "text", "text": news.text})
    for call in news.calls:
        arguments, name = call["function"]["arguments"], call["function"].get("name")
        if _is_object(arguments):
            # As the model wrote it: orjson writes no integer beyond 64 bits.
            found.append({"type": "tool_use", "id": call.get("id"), "name": name, "input": orjson.Fragment(arguments)})
    if found:
        found[0] |= news.d3ext
    return found


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


PING = named_event({"type": "ping"})


MESSAGE_FORM = StreamForm(lambda error: b"event: error\ndata: " + anthropics_error_body(error) + b"\n\n", PING)


class MessageAnswer:
    """The answer to one POST /v1/messages."""

    form = MESSAGE_FORM

    def __init__(self, job: RequestContext[ChatRequest]) -> None:
        self._job = job
        self._answer = SingleAnswer(job)
        self._blocks = MessageBlocks(begins_with_text=job.is_text_alone)
        self._has_begun = False
        self._has_calls = False

    async def whole(self) -> Message:
        news = await self._answer.whole()
        content = whole_blocks(news, begins_with_text=self._job.is_text_alone)
        self._has_calls = bool(news.calls)
        return {**self._message(content, news), **self._answer.tally.depth()}  # type: ignore[typeddict-item]  # its own

    def told(self, number: int, output: RequestOutput) -> bytes:
        news = self._answer.news(output)
        if news is None:
            return b""
        events = [] if self._has_begun else self._first_events()
        self._has_begun = True
        events += self._blocks.events(news)
        self._has_calls = self._blocks.has_calls
        if news.finish_reason is not None:
            events += [*self._blocks.close(), *self._last_events(news)]
        return b"".join(map(named_event, events))

    def _first_events(self) -> list[dict[str, Any]]:
        start = self._message([], None)
        start["usage"]["output_tokens"] = 0
        return [{"type": "message_start", "message": start}, *self._blocks.first_events(), {"type": "ping"}]

    def _last_events(self, news: Delta) -> list[dict[str, Any]]:
        reason, sequence = self._stop(news)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return [
            {"type": "message_delta", "delta": delta, "usage": self._usage(), **self._answer.tally.depth()},
            {"type": "message_stop"},
        ]

    def _message(self, content: list[dict[str, Any]], news: Delta | None) -> Message:
        reason, sequence = (None, None) if news is None else self._stop(news)
        return {
            "id": self._job.id,
            "type": "message",
            "role": "assistant",
            "model": self._job.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self._usage(),
        }

    def _stop(self, news: Delta) -> tuple[StopReason, str | None]:
        """Why it ended, and the string that ended it, if one did."""
        if news.finish_reason == "length":
            is_whole = self._answer.tally.usage()["completion_tokens"] == self._job.asked.max_tokens
            return "max_tokens" if is_whole else "model_context_window_exceeded", None
        if isinstance(news.stop_reason, str):
            return "stop_sequence", news.stop_reason
        if self._has_calls:
            return "tool_use", None
        return "end_turn", None

    def _usage(self) -> MessageUsage:
        usage = self._answer.tally.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }
