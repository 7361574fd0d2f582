"""Answers as Ollama writes them: one object, or a line of JSON for what is new, the last with counts and durations."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import orjson

from d3engine.request.outputs import RequestOutput
from d3engine.server.errors import ollamas_error_body
from d3engine.server.responses.context import RequestContext
from d3engine.server.responses.extras import LogprobWords, UsageCounter
from d3engine.server.responses.running import whole_output
from d3engine.server.responses.streams import StreamForm
from d3engine.server.responses.writer import Delta, SingleAnswer
from d3engine.server.schemas.answers import FunctionCall, TokenLogprob, ToolCallDelta
from d3engine.server.schemas.ollama import OllamaToolCall
from d3engine.server.schemas.requests import ChatRequest

NANOSECONDS = 1_000_000_000


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


class OllamaAnswer:
    """The answer to one POST /api/chat, or with `is_chat` false to /api/generate, under the name that was asked for.

    A call comes as soon as its arguments are whole.
    """

    form = StreamForm(lambda error: ollamas_error_body(error) + b"\n", ping=b"")

    def __init__(self, job: RequestContext[Any], model: str, *, is_chat: bool) -> None:
        self._job = job
        self._model = model
        self._is_chat = is_chat
        self._chat = SingleAnswer(job) if isinstance(job.asked, ChatRequest) else None
        self._words = LogprobWords(job.asked.logprobs or 0, as_ids=False)
        self._usage = UsageCounter(job) if self._chat is None else self._chat.tally
        self._calls: dict[int, FunctionCall] = {}

    async def whole(self) -> dict[str, Any]:
        output = await whole_output(self._job, self._usage)
        news = self._of_completion(output) if self._chat is None else self._chat.of_whole(output)
        return {**self._line(news), **self._end(output)}

    def told(self, number: int, output: RequestOutput) -> bytes:
        if self._chat is not None:
            news = self._chat.news(output)
        else:
            self._usage.add(number, output)
            news = self._of_completion(output)
        if news is None:
            return b""
        line, lines = self._line(news), []
        if news.text or news.reasoning or news.logprobs or "tool_calls" in line.get("message", {}):
            lines.append(line)
        if news.finish_reason is not None:
            lines.append({**self._line(_NOTHING), **self._end(output)})
        return b"".join(orjson.dumps(line) + b"\n" for line in lines)

    def _of_completion(self, output: RequestOutput) -> Delta:
        (answer,) = output.outputs
        logprobs: Sequence[TokenLogprob] = ()
        if self._job.asked.logprobs is not None:
            logprobs = self._words.of_chat(answer.token_ids, answer.logprobs or [])["content"]
        return Delta(answer.text, answer.finish_reason, answer.stop_reason, {}, logprobs=logprobs)

    def _whole_calls(self, pieces: Sequence[ToolCallDelta]) -> list[OllamaToolCall]:
        """The calls that are whole with these pieces; one that is cut off within its arguments never is."""
        found: list[OllamaToolCall] = []
        for piece in pieces:
            known = self._calls.setdefault(piece["index"], {"name": "", "arguments": ""})
            known["name"] += piece["function"].get("name", "")
            known["arguments"] += piece["function"]["arguments"]
            if not known["arguments"].endswith("}"):
                continue
            with suppress(ValueError):  # the end of an inner object
                found.append({"function": {"name": known["name"], "arguments": json.loads(known["arguments"])}})
        return found

    def _line(self, news: Delta) -> dict[str, Any]:
        line: dict[str, Any] = {"model": self._model, "created_at": now(), "done": False}
        if self._is_chat:
            message: dict[str, Any] = {"role": "assistant", "content": news.text}
            line["message"] = message
        else:
            message = line
            line["response"] = news.text
        if news.reasoning:
            message["thinking"] = news.reasoning
        if calls := self._whole_calls(news.calls):
            message["tool_calls"] = calls
        if news.logprobs:
            line["logprobs"] = news.logprobs
        return line

    def _end(self, output: RequestOutput) -> dict[str, Any]:
        usage, times = self._usage.usage(), output.metrics
        return {
            "done": True,
            "done_reason": output.outputs[0].finish_reason,
            "total_duration": _nanoseconds((times.finished_time or time.monotonic()) - times.arrival_time),
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": _nanoseconds(times.prefill_seconds),
            "eval_count": usage["completion_tokens"],
            "eval_duration": _nanoseconds(times.decode_seconds),
            **self._usage.depth(),
        }


_NOTHING = Delta("", None, None, {})


def _nanoseconds(seconds: float | None) -> int:
    return round((seconds or 0.0) * NANOSECONDS)


def loaded(model: str, *, is_chat: bool) -> dict[str, Any]:
    """The answer to a request without a prompt, which asks for the model to be loaded."""
    line: dict[str, Any] = {"model": model, "created_at": now(), "done": True, "done_reason": "load"}
    return line | ({"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""})
