"""The blocks of an Anthropic message, as they open, grow and close: reasoning, a text, calls of functions."""

from __future__ import annotations

import json
from typing import Any

from d3engine.request.outputs import RequestOutput
from d3engine.server.errors import anthropics_error_body
from d3engine.server.responses.context import RequestContext
from d3engine.server.responses.streams import StreamForm, named_event
from d3engine.server.responses.writer import Delta, SingleAnswer
from d3engine.server.schemas.answers import DepthsOfTokens
from d3engine.server.schemas.messages import Message, MessageUsage, StopReason
from d3engine.server.schemas.requests import ChatRequest


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
        arguments = _object(call["function"]["arguments"])
        if arguments is not None:
            name = call["function"].get("name")
            found.append({"type": "tool_use", "id": call.get("id"), "name": name, "input": arguments})
    if found:
        found[0] |= news.d3ext
    return found


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


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
