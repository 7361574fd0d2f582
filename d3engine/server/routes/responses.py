"""OpenAI's responses: their items as the messages of a chat, and those of an answer as they begin, grow and end."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response

from d3engine.errors import must_be, require
from d3engine.request.outputs import RequestOutput
from d3engine.server.errors import RequestError, invalid, shown_message
from d3engine.server.requests import chat
from d3engine.server.requests.bodies import read_body
from d3engine.server.requests.sampling import by_names
from d3engine.server.responses.context import RequestContext
from d3engine.server.responses.streams import StreamForm, named_event
from d3engine.server.responses.writer import Delta, SingleAnswer, respond
from d3engine.server.schemas.answers import DepthsOfTokens
from d3engine.server.schemas.requests import RESPONSES, ChatRequest
from d3engine.server.schemas.responses import (
    ModelResponse,
    NamedResponseTool,
    ResponsesRequest,
    ResponseUsage,
    TextFormat,
)


async def create_response(request: Request) -> Response:
    """Answer a conversation, as OpenAI's responses."""
    asked, headers = await read_body(request, ResponsesRequest, lambda asked: unknown_in_items(asked.input))
    conversation = ChatRequest(
        messages=_messages(asked),
        response_format=_form_of(asked),
        tools=_tools_of(asked),
        tool_choice=_choice_of(asked),
        reasoning_effort=None if asked.reasoning is None else asked.reasoning.effort,
        **{name: getattr(asked, theirs) for theirs, name in CHAT_FIELDS.items()},
    )
    names = {"messages": "input", "response_format": "text", "reasoning_effort": "reasoning"}
    with by_names(RESPONSES.by_own | names):
        job, headers = await chat.job_of(request, conversation, headers, id_prefix="resp_")
    return await respond(job, ResponseAnswer(job, asked), headers)


# -- requests --------------------------------------------------------------------------------------------------------

TURNS = chat.TurnForm(
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
            found.append(chat.read_turn(name, item, TURNS))
        if reasoning and found[-1]["role"] == "assistant":
            found[-1]["reasoning_content"] = reasoning
        reasoning = None
    return found


def unknown_in_items(items: object) -> list[str]:
    given = items if isinstance(items, list) else []
    turns = [item for item in given if _kind(item) not in FIELDS]
    others = [item for item in given if _kind(item) in FIELDS]
    unknown = [f"input.{field}" for item in others for field in item if field not in FIELDS[item["type"]]]
    return list(dict.fromkeys([*chat.unknown_in_turns(turns, TURNS), *unknown]))


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
    content = chat.read_content(f"{name}.output", item.get("output"), TURNS)
    return {"role": "tool", "tool_call_id": item["call_id"], "content": content}


CHAT_FIELDS = chat.chat_fields(ResponsesRequest, RESPONSES, "tools", "tool_choice")


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
        raise invalid("text", must_be("text.format", msgspec.to_builtins(form), allowed) + ".")
    if not is_schema:
        return {"type": form.type}
    return {"type": "json_schema", "json_schema": {"name": form.name, "schema": form.schema}}


def _tools_of(asked: ResponsesRequest) -> list[dict[str, Any]] | None:
    """`tools` as a chat has them; an empty list is none."""
    tools = [chat.function_tool(one.name, one.description, one.parameters, one.strict) for one in asked.tools or ()]
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


# -- answers --------------------------------------------------------------------------------------------------------


class OutputItems:
    """The items of one response; with `begins_with_text` it can be nothing but a message, which begins at once."""

    def __init__(self, *, begins_with_text: bool) -> None:
        self.begins_with_text = begins_with_text
        self.done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._depths: DepthsOfTokens = {"depths": [], "token_offsets": []}

    def first_events(self) -> list[dict[str, Any]]:
        return self._begin(_new_message()) if self.begins_with_text else []

    def events(self, news: Delta) -> list[dict[str, Any]]:
        """What is new; `d3ext` goes with the first that has words to it."""
        found: list[dict[str, Any]] = []
        if news.reasoning:
            if not self._open:
                part = {"type": "reasoning_text", "text": ""}
                found += self._begin(_new("rs", "reasoning", summary=[], content=[part], status="in_progress"))
            found.append(self._grow(news.reasoning))
        if news.text:
            found += [] if self._open and self._open["type"] == "message" else self._begin(_new_message())
            found.append(self._grow(news.text))
        for call in news.calls:
            if "id" in call:
                named = {"call_id": call["id"], "name": call["function"]["name"], "arguments": ""}
                found += self._begin(_new("fc", "function_call", **named, status="in_progress"))
            found.append(self._grow(call["function"]["arguments"]))
        if (depths := news.d3ext.get("d3ext")) is not None:
            self._depths["depths"] += depths["depths"]
            self._depths["token_offsets"] += depths["token_offsets"]
        return [*found, *self._with_depths(found, is_last=news.finish_reason is not None)]

    def _with_depths(self, found: list[dict[str, Any]], *, is_last: bool) -> list[dict[str, Any]]:
        """Put the depths of tokens that wait to the first delta; without one to one of nothing, which is returned.

        They wait where no item has begun, since it is not known yet which it will be.
        """
        if not self._depths["depths"]:
            return []
        more = []
        place = next((one for one in found if one["type"].endswith(".delta")), None)
        if place is None:
            if self._open is None and not is_last:
                return []
            more = [] if self._open else self._begin(_new_message())
            more.append(place := self._grow(""))
        place["d3ext"], self._depths = self._depths, {"depths": [], "token_offsets": []}
        return more

    def _begin(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        before = self.end("completed")
        self._open = item
        begun = self._event("response.output_item.added", item={**item})
        if "content" not in item:
            return [*before, begun]
        begun["item"]["content"] = []
        return [*before, begun, self._of_item("response.content_part.added", part={**item["content"][0]})]

    def _grow(self, text: str) -> dict[str, Any]:
        assert self._open is not None
        if "content" in self._open:
            self._open["content"][0]["text"] += text
        else:
            self._open["arguments"] += text
        kind, more = _GROWS[self._open["type"]]
        return self._of_item(f"{kind}.delta", delta=text, **more)

    def end(self, status: Any) -> list[dict[str, Any]]:
        """The end of the item that is open, if one is."""
        if self._open is None:
            return []
        item = self._open
        item["status"] = status
        kind, more = _GROWS[item["type"]]
        if "content" in item:
            part = {**item["content"][0]}
            events = [self._of_item(f"{kind}.done", text=part["text"], **more)]
            events.append(self._of_item("response.content_part.done", part=part))
        else:
            events = [self._of_item(f"{kind}.done", name=item["name"], arguments=item["arguments"])]
        events.append(self._event("response.output_item.done", item=item))
        self.done.append(item)
        self._open = None
        return events

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "output_index": len(self.done), **fields}

    def _of_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        """An event of the item that is open: of its only part, where it has parts."""
        assert self._open is not None
        place = {"content_index": 0} if "content" in self._open else {}
        return {"type": kind, "item_id": self._open["id"], "output_index": len(self.done), **place, **fields}


_GROWS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "reasoning": ("response.reasoning_text", {}),
    "message": ("response.output_text", {"logprobs": []}),
    "function_call": ("response.function_call_arguments", {}),
}
"""The type of an item -> what its events are called that grow and end it, and what else these say."""


def _new_message() -> dict[str, Any]:
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return _new("msg", "message", role="assistant", status="in_progress", content=[part])


def _new(prefix: str, kind: str, **fields: Any) -> dict[str, Any]:
    return {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, **fields}


class ResponseAnswer:
    """The answer to one POST /v1/responses, whose events are counted."""

    def __init__(self, job: RequestContext[ChatRequest], asked: ResponsesRequest) -> None:
        self._job = job
        self._asked = asked
        self._answer = SingleAnswer(job)
        self._items = OutputItems(begins_with_text=job.is_text_alone)
        self._num_events = 0

    @property
    def form(self) -> StreamForm:
        return StreamForm(self.failed)  # made when it is asked for: kept, it would be garbage for the collector

    async def whole(self) -> ModelResponse:
        news = await self._answer.whole()
        self._items.first_events()
        self._items.events(news)
        self._items.end(_status(news))
        response = self._ended(news)
        first = response["output"][0] if news.d3ext and response["output"] else {}
        first.get("content", [first])[0].update(news.d3ext)
        return response

    def told(self, number: int, output: RequestOutput) -> bytes:
        news = self._answer.news(output)
        if news is None:
            return b""
        events = [] if self._num_events else self._first_events()
        events += self._items.events(news)
        if news.finish_reason is not None:
            events += self._items.end(_status(news))
            response = self._ended(news)
            events.append({"type": f"response.{response['status']}", "response": response})
        return b"".join(map(self._numbered, events))

    def failed(self, error: RequestError) -> bytes:
        response = self._response("failed")
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        response["error"] = {"code": code, "message": shown_message(error)}
        return self._numbered({"type": "response.failed", "response": response})

    def _numbered(self, event: dict[str, Any]) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return named_event({**event, "sequence_number": number})

    # -- events ------------------------------------------------------------------------------------------------------

    def _first_events(self) -> list[dict[str, Any]]:
        response = self._response("in_progress")
        return [
            {"type": "response.created", "response": response},
            {"type": "response.in_progress", "response": response},
            *self._items.first_events(),
        ]

    # -- the response ------------------------------------------------------------------------------------------------

    def _ended(self, news: Delta) -> ModelResponse:
        status = _status(news)
        response = self._response(status)
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        response["output"] = [dict(item) for item in self._items.done]
        response["usage"] = self._usage()
        return {**response, **self._answer.tally.depth()}  # type: ignore[typeddict-item]  # its own

    def _response(self, status: Any) -> ModelResponse:
        """The response without what comes at its end."""
        params = self._job.prepared[0].params
        asked = self._asked
        form = (asked.text and asked.text.format) or TextFormat(type="text")
        written = {name: value for name, value in msgspec.structs.asdict(form).items() if value is not None}
        choice = msgspec.to_builtins("auto" if asked.tool_choice is None else asked.tool_choice)
        return {
            "id": self._job.id,
            "object": "response",
            "created_at": self._job.created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": _as_json(asked.metadata or {}),
            "model": self._job.model,
            "output": [],
            "background": False,
            "parallel_tool_calls": bool(asked.tools) and asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "text": _as_json({"format": written}),
            "tool_choice": choice if asked.tools else "none",
            "tools": _as_json(asked.tools or []),
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def _usage(self) -> ResponseUsage:
        usage = self._answer.tally.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._answer.writer.num_reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }


def _as_json(given: Any) -> Any:
    """What a request brought, for its response: orjson alone would write no integer beyond 64 bits."""
    return orjson.Fragment(msgspec.json.encode(given))


def _status(news: Delta) -> Literal["completed", "incomplete"]:
    return "incomplete" if news.finish_reason == "length" else "completed"
