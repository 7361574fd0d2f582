"""The answer of a chat as OpenAI's response: its items, and in a stream the events around them."""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec

from d3engine.request.outputs import RequestOutput
from d3engine.server.answering.event_stream import OpenAIForm, StreamForm, named_event
from d3engine.server.answering.job import RequestContext
from d3engine.server.answering.output_items import OutputItems
from d3engine.server.answering.single import Delta, SingleAnswer
from d3engine.server.errors import RequestError, shown_message
from d3engine.server.shapes.requests import ChatRequest
from d3engine.server.shapes.responses import ModelResponse, ResponsesRequest, ResponseUsage, TextFormat


class ResponseAnswer:
    """The answer to one POST /v1/responses; also the form of its stream, whose events are counted."""

    ping = OpenAIForm.ping
    end = b""

    def __init__(self, job: RequestContext[ChatRequest], asked: ResponsesRequest) -> None:
        self._job = job
        self._asked = asked
        self._answer = SingleAnswer(job)
        self._items = OutputItems(begins_with_text=job.calling is None)
        self._num_events = 0

    @property
    def form(self) -> StreamForm:
        return self

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
        form = None if self._asked.text is None else self._asked.text.format
        return {
            "id": self._job.id,
            "object": "response",
            "created_at": self._job.created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": self._asked.instructions,
            "max_output_tokens": self._asked.max_output_tokens,
            "metadata": self._asked.metadata or {},
            "model": self._job.model,
            "output": [],
            "background": False,
            "parallel_tool_calls": bool(self._asked.tools) and self._asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "text": {"format": _without_nulls(form) if form is not None else {"type": "text"}},
            "tool_choice": _choice(self._asked),
            "tools": [msgspec.to_builtins(tool) for tool in self._asked.tools or ()],
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
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }


def _status(news: Delta) -> Literal["completed", "incomplete"]:
    return "incomplete" if news.finish_reason == "length" else "completed"


def _choice(asked: ResponsesRequest) -> str | dict[str, Any]:
    """What the request's `tool_choice` came to."""
    if not asked.tools:
        return "none"
    found: str | dict[str, Any] = msgspec.to_builtins("auto" if asked.tool_choice is None else asked.tool_choice)
    return found


def _without_nulls(form: TextFormat) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(form).items() if value is not None}
