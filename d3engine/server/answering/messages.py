"""The answer of a chat as Anthropic's message: one block of text, and in a stream the events around it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from d3engine.server.answering.event_stream import named_event
from d3engine.server.answering.job import Job
from d3engine.server.answering.single import News, SingleAnswer
from d3engine.server.errors import RequestError, anthropics_error_body
from d3engine.server.shapes.messages import Message, MessageUsage, TextBlock
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

    def __init__(self, job: Job[ChatRequest]) -> None:
        self._job = job
        self._answer = SingleAnswer(job)

    async def whole(self) -> Message:
        news = await self._answer.whole()
        block: TextBlock = {"type": "text", "text": news.text, **news.d3ext}  # type: ignore[typeddict-item]  # its own
        return {**self._message([block], news), **self._answer.tally.depth()}  # type: ignore[typeddict-item]  # as well

    async def events(self) -> AsyncGenerator[bytes, None]:
        has_begun = False
        async with aclosing(self._answer.news()) as found:
            async for news in found:
                events = [] if has_begun else self._first_events()
                has_begun = True
                if news.text or news.d3ext:
                    delta = {"type": "text_delta", "text": news.text}
                    events.append({"type": "content_block_delta", "index": 0, "delta": delta, **news.d3ext})
                if news.finish_reason is not None:
                    events += self._last_events(news)
                yield b"".join(map(named_event, events))

    def _first_events(self) -> list[dict[str, Any]]:
        block: TextBlock = {"type": "text", "text": ""}
        start = self._message([], None)
        start["usage"]["output_tokens"] = 0
        return [
            {"type": "message_start", "message": start},
            {"type": "content_block_start", "index": 0, "content_block": block},
            {"type": "ping"},
        ]

    def _last_events(self, news: News) -> list[dict[str, Any]]:
        reason, sequence = self._stop(news)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return [
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": delta, "usage": self._usage(), **self._answer.tally.depth()},
            {"type": "message_stop"},
        ]

    def _message(self, content: list[TextBlock], news: News | None) -> Message:
        reason, sequence = (None, None) if news is None else self._stop(news)
        return {
            "id": self._job.id,
            "type": "message",
            "role": "assistant",
            "model": self._job.model,
            "content": content,
            "stop_reason": reason,  # type: ignore[typeddict-item]  # one of those
            "stop_sequence": sequence,
            "usage": self._usage(),
        }

    def _stop(self, news: News) -> tuple[str, str | None]:
        """Why it ended, and the string that ended it, if one did."""
        if news.finish_reason == "length":
            is_whole = self._answer.tally.usage()["completion_tokens"] == self._job.asked.max_tokens
            return "max_tokens" if is_whole else "model_context_window_exceeded", None
        if isinstance(news.stop_reason, str):
            return "stop_sequence", news.stop_reason
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
