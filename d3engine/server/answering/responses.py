"""The answer of a chat as OpenAI's response: one message of one text, and in a stream the events around it."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from d3engine.server.answering.event_stream import OpenAIForm, StreamForm, named_event
from d3engine.server.answering.job import Job
from d3engine.server.answering.single import News, SingleAnswer
from d3engine.server.errors import RequestError, shown_message
from d3engine.server.shapes.requests import ChatRequest
from d3engine.server.shapes.responses import ModelResponse, OutputMessage, OutputText, ResponsesRequest


class ResponseAnswer:
    """The answer to one POST /v1/responses; also the form of its stream, whose events are counted."""

    ping = OpenAIForm.ping
    end = b""

    def __init__(self, job: Job[ChatRequest], asked: ResponsesRequest) -> None:
        self._job = job
        self._asked = asked
        self._answer = SingleAnswer(job)
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self._num_events = 0
        self._text = ""

    @property
    def form(self) -> StreamForm:
        return self

    async def whole(self) -> ModelResponse:
        return self._ended(await self._answer.whole())

    async def events(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._answer.news()) as found:
            async for news in found:
                events = [] if self._num_events else self._first_events()
                if news.text or news.d3ext:
                    self._text += news.text
                    delta = self._of_part("response.output_text.delta", delta=news.text, logprobs=[])
                    events.append({**delta, **news.d3ext})
                if news.finish_reason is not None:
                    events += self._last_events(news)
                yield b"".join(map(self._numbered, events))

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
        item: OutputMessage = {**self._item(""), "status": "in_progress", "content": []}
        return [
            {"type": "response.created", "response": response},
            {"type": "response.in_progress", "response": response},
            {"type": "response.output_item.added", "output_index": 0, "item": item},
            self._of_part("response.content_part.added", part=_part("")),
        ]

    def _last_events(self, news: News) -> list[dict[str, Any]]:
        whole = News(self._text, news.finish_reason, news.stop_reason, {})
        response = self._ended(whole)
        return [
            self._of_part("response.output_text.done", text=self._text, logprobs=[]),
            self._of_part("response.content_part.done", part=_part(self._text)),
            {"type": "response.output_item.done", "output_index": 0, "item": response["output"][0]},
            {"type": f"response.{response['status']}", "response": response},
        ]

    def _of_part(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "item_id": self._item_id, "output_index": 0, "content_index": 0, **fields}

    # -- the response ------------------------------------------------------------------------------------------------

    def _ended(self, news: News) -> ModelResponse:
        is_cut = news.finish_reason == "length"
        response = self._response("incomplete" if is_cut else "completed")
        item = self._item(news.text)
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
            item["status"] = "incomplete"
        else:
            response["completed_at"] = int(time.time())
        if news.d3ext:
            item["content"][0]["d3ext"] = news.d3ext["d3ext"]
        response["output"] = [item]
        response["usage"] = self._usage()
        return {**response, **self._answer.tally.depth()}  # type: ignore[typeddict-item]  # its own

    def _item(self, text: str) -> OutputMessage:
        content = [_part(text)]
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": content,
        }

    def _response(self, status: Any) -> ModelResponse:
        """The response without what comes at its end."""
        params = self._job.prepared[0].params
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
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._answer.tally.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }


def _part(text: str) -> OutputText:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
