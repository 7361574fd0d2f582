"""The answer of a chat as Anthropic's message: its blocks, and in a stream the events around them."""

from __future__ import annotations

from typing import Any

from d3engine.request.outputs import RequestOutput
from d3engine.server.answering.event_stream import named_event
from d3engine.server.answering.job import RequestContext
from d3engine.server.answering.message_blocks import MessageBlocks, whole_blocks
from d3engine.server.answering.single import Delta, SingleAnswer
from d3engine.server.errors import RequestError, anthropics_error_body
from d3engine.server.shapes.messages import Message, MessageUsage, StopReason
from d3engine.server.shapes.requests import ChatRequest

PING = named_event({"type": "ping"})


class MessageForm:
    """Of a streamed message; nothing comes after its last event."""

    ping = PING
    end = b""

    def failed(self, error: RequestError) -> bytes:
        return b"event: error\ndata: " + anthropics_error_body(error) + b"\n\n"


class MessageAnswer:
    """The answer to one POST /v1/messages."""

    form = MessageForm()

    def __init__(self, job: RequestContext[ChatRequest]) -> None:
        self._job = job
        self._answer = SingleAnswer(job)
        self._blocks = MessageBlocks(begins_with_text=job.calling is None)
        self._has_begun = False
        self._has_calls = False

    async def whole(self) -> Message:
        news = await self._answer.whole()
        content = whole_blocks(news, begins_with_text=self._job.calling is None)
        self._has_calls = bool(news.calls)
        return {**self._message(content, news), **self._answer.tally.depth()}  # type: ignore[typeddict-item]  # its own

    def told(self, number: int, output: RequestOutput) -> bytes:
        news = self._answer.news(output)
        if news is None:
            return b""
        events = [] if self._has_begun else self._first_events(self._blocks)
        self._has_begun = True
        events += self._blocks.events(news)
        self._has_calls = self._blocks.has_calls
        if news.finish_reason is not None:
            events += [*self._blocks.close(), *self._last_events(news)]
        return b"".join(map(named_event, events))

    def _first_events(self, blocks: MessageBlocks) -> list[dict[str, Any]]:
        start = self._message([], None)
        start["usage"]["output_tokens"] = 0
        return [
            {"type": "message_start", "message": start},
            *blocks.first_events(),
            {"type": "ping"},
        ]

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
