"""Answers as Ollama writes them: one object, or a line of JSON for what is new, the last with counts and durations."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

import orjson

from d3engine.request.outputs import RequestOutput
from d3engine.server.errors import RequestError, ollamas_error_body
from d3engine.server.responses.chat import ChatWriter
from d3engine.server.responses.context import RequestContext
from d3engine.server.responses.extras import LogprobWords, UsageCounter
from d3engine.server.responses.running import outputs_of
from d3engine.server.schemas.ollama import OllamaLogprob, OllamaToolCall
from d3engine.server.schemas.requests import ChatRequest

NANOSECONDS = 1_000_000_000


def now() -> str:
    """The time of day as Ollama writes it."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


class OllamaForm:
    """Of a stream of lines; nothing comes after the last."""

    ping = b""
    end = b""

    def failed(self, error: RequestError) -> bytes:
        return ollamas_error_body(error) + b"\n"


class OllamaAnswer:
    """The answer to one POST /api/chat, or with `is_chat` false to /api/generate, under the name that was asked for.

    A call comes as soon as its arguments are whole.
    """

    form = OllamaForm()

    def __init__(self, job: RequestContext[Any], model: str, *, is_chat: bool) -> None:
        self._job = job
        self._model = model
        self._is_chat = is_chat
        self._writer = ChatWriter(job) if isinstance(job.asked, ChatRequest) else None
        self._words = LogprobWords(job.asked.logprobs or 0, as_ids=False) if self._writer is None else None
        self._usage = UsageCounter(job)
        self._calls: dict[int, dict[str, str]] = {}

    async def whole(self) -> dict[str, Any]:
        found = None
        async with aclosing(outputs_of(self._job)) as outputs:
            async for _, output in outputs:
                self._usage.add(0, output)
                found = output
        assert found is not None  # every request has a last output
        news = self._news(found, is_whole=True)
        return {**self._line(news), **self._end(found, news)}

    def told(self, number: int, output: RequestOutput) -> bytes:
        self._usage.add(number, output)
        news, lines = self._news(output), []
        if any(news[name] for name in ("text", "thinking", "calls", "logprobs")):
            lines.append(self._line(news))
        if news["reason"] is not None:
            lines.append({**self._line(_NOTHING), **self._end(output, news)})
        return b"".join(orjson.dumps(line) + b"\n" for line in lines)

    def _news(self, output: RequestOutput, *, is_whole: bool = False) -> dict[str, Any]:
        """What is new: text, thinking, calls that are whole, log-probabilities, and why it has ended."""
        if self._writer is None:
            return self._of_completion(output)
        if is_whole:
            (choice,) = self._writer.choices([output])
            message: Mapping[str, Any] = choice["message"]
            self._take_calls(list(enumerate(message.get("tool_calls") or ())))
            chunks: Sequence[Mapping[str, Any]] = [choice]
            deltas = [message]
        else:
            chunks = self._writer.chunks(0, output)
            deltas = [chunk["delta"] for chunk in chunks]
            self._take_calls([(call["index"], call) for delta in deltas for call in delta.get("tool_calls", ())])
        reason = output.outputs[0].finish_reason
        logprobs = [entry for chunk in chunks for entry in (chunk["logprobs"] or {}).get("content", ())]
        return {
            "text": "".join(delta.get("content") or "" for delta in deltas),
            "thinking": "".join(delta.get("reasoning_content") or "" for delta in deltas),
            "calls": self._whole_calls(is_last=reason is not None),
            "logprobs": logprobs,
            "reason": reason,
        }

    def _of_completion(self, output: RequestOutput) -> dict[str, Any]:
        (answer,) = output.outputs
        logprobs: Sequence[Any] = []
        if self._job.asked.logprobs is not None and self._words is not None:
            logprobs = self._words.of_chat(answer.token_ids, answer.logprobs or [])["content"]
        return {**_NOTHING, "text": answer.text, "logprobs": logprobs, "reason": answer.finish_reason}

    def _take_calls(self, calls: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        for index, call in calls:
            known = self._calls.setdefault(index, {"name": "", "arguments": ""})
            known["name"] += call["function"].get("name") or ""
            known["arguments"] += call["function"]["arguments"]

    def _whole_calls(self, *, is_last: bool) -> list[OllamaToolCall]:
        """The calls whose arguments have come; one that was cut off within them is none."""
        found: list[OllamaToolCall] = []
        for index in sorted(self._calls):
            try:
                arguments = json.loads(self._calls[index]["arguments"])
            except ValueError:
                continue
            if isinstance(arguments, dict):
                found.append({"function": {"name": self._calls[index]["name"], "arguments": arguments}})
                self._calls[index] = _DONE
        if is_last:
            self._calls.clear()
        return found

    def _line(self, news: Mapping[str, Any]) -> dict[str, Any]:
        line: dict[str, Any] = {"model": self._model, "created_at": now(), "done": False}
        if self._is_chat:
            message: dict[str, Any] = {"role": "assistant", "content": news["text"]}
            line["message"] = message
        else:
            message = line
            line["response"] = news["text"]
        if news["thinking"]:
            message["thinking"] = news["thinking"]
        if news["calls"]:
            message["tool_calls"] = news["calls"]
        if news["logprobs"]:
            line["logprobs"] = [_logprob(entry) for entry in news["logprobs"]]
        return line

    def _end(self, output: RequestOutput, news: Mapping[str, Any]) -> dict[str, Any]:
        usage, times = self._usage.usage(), output.metrics
        return {
            "done": True,
            "done_reason": news["reason"],
            "total_duration": _nanoseconds((times.finished_time or time.monotonic()) - times.arrival_time),
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": _nanoseconds(times.prefill_seconds),
            "eval_count": usage["completion_tokens"],
            "eval_duration": _nanoseconds(times.decode_seconds),
            **self._usage.depth(),
        }


_NOTHING: dict[str, Any] = {"text": "", "thinking": "", "calls": [], "logprobs": [], "reason": None}
_DONE = {"name": "", "arguments": "null"}


def _nanoseconds(seconds: float | None) -> int:
    return round((seconds or 0.0) * NANOSECONDS)


def _logprob(entry: Mapping[str, Any]) -> OllamaLogprob:
    """A chat's entry of one token, which has the same fields."""
    return {
        "token": entry["token"],
        "logprob": entry["logprob"],
        "bytes": entry["bytes"],
        "top_logprobs": [
            {"token": one["token"], "logprob": one["logprob"], "bytes": one["bytes"]} for one in entry["top_logprobs"]
        ],
    }


def loaded(model: str, *, is_chat: bool) -> dict[str, Any]:
    """The answer to a request without a prompt, which asks for the model to be loaded."""
    line: dict[str, Any] = {"model": model, "created_at": now(), "done": True, "done_reason": "load"}
    return line | ({"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""})
