"""The one answer of a chat, for interfaces that know no choices: what is new of it, read from the chat's own writer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
from starlette.responses import Response

from d3engine.request.outputs import RequestOutput
from d3engine.server.responses.chat import ChatWriter
from d3engine.server.responses.context import RequestContext, UsageCounter, Writer
from d3engine.server.responses.running import DirectStream, outputs_of, prompt_progress, whole_output
from d3engine.server.responses.streams import OPENAI_FORM, EventStream, StreamForm
from d3engine.server.schemas.answers import (
    ChatChoice,
    ChatChunkChoice,
    DepthsOfTokens,
    PromptProgress,
    TokenLogprob,
    ToolCallDelta,
)
from d3engine.server.schemas.requests import ChatRequest, StreamOptions
from d3engine.server.state import json_response


@dataclass(frozen=True)
class Delta:
    """What is new of the answer.

    `reasoning` comes before `text`. `calls` are pieces of the functions that it calls: of a whole answer each is whole,
    otherwise its id and its name come first and then its arguments as they are written. `finish_reason` is None until
    it ends; `stop_reason` is then the string or the token that ended it, if one did. `d3ext` is there where the request
    asks for it.
    """

    text: str
    finish_reason: str | None
    stop_reason: str | int | None
    d3ext: dict[str, DepthsOfTokens]
    calls: Sequence[ToolCallDelta] = ()
    reasoning: str = ""
    logprobs: Sequence[TokenLogprob] = ()


class SingleAnswer:
    """Runs a chat of one answer; `tally` counts what has come of it so far."""

    def __init__(self, job: RequestContext[ChatRequest]) -> None:
        self._job = job
        self.writer = ChatWriter(job)
        self.tally = UsageCounter(job)

    async def whole(self) -> Delta:
        return self.of_whole(await whole_output(self._job, self.tally))

    def of_whole(self, output: RequestOutput) -> Delta:
        """The same from the whole output, which the tally has."""
        (choice,) = self.writer.choices([output])
        message = choice["message"]
        whole: list[ToolCallDelta] = [
            {"index": index, "id": call["id"], "type": "function", "function": {**call["function"]}}
            for index, call in enumerate(message.get("tool_calls", ()))
        ]
        reasoning = message.get("reasoning_content", "")
        return _news(message["content"] or "", whole, output, [choice], reasoning)

    def news(self, output: RequestOutput) -> Delta | None:
        """What a delta brings, if that is worth telling."""
        self.tally.add(0, output)
        chunks = self.writer.chunks(0, output)
        if not chunks:
            return None
        text = "".join(chunk["delta"].get("content") or "" for chunk in chunks)
        calls = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", ())]
        reasoning = "".join(chunk["delta"].get("reasoning_content", "") for chunk in chunks)
        return _news(text, calls, output, chunks, reasoning)


def _news(
    text: str,
    calls: Sequence[ToolCallDelta],
    output: RequestOutput,
    choices: Sequence[ChatChoice] | Sequence[ChatChunkChoice],
    reasoning: str,
) -> Delta:
    (answer,) = output.outputs
    d3ext = {"d3ext": choices[-1]["d3ext"]} if "d3ext" in choices[-1] else {}
    logprobs = [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
    return Delta(text, answer.finish_reason, answer.stop_reason, d3ext, calls, reasoning, logprobs)


class Answer(Protocol):
    """What comes of a job, in either way."""

    @property
    def form(self) -> StreamForm:
        """Of its stream."""

    async def whole(self) -> Mapping[str, Any]:
        """Run it, and return the body."""

    def told(self, number: int, output: RequestOutput) -> bytes:
        """What is new of the prompt of this number, as whole events; nothing where it is worth none. What comes after
        all outputs comes with the last of them."""


async def answer(job: RequestContext[Any], writer: Writer, headers: Mapping[str, str]) -> Response:
    """Run a job and answer as its request asks for."""
    told = _Choices(job, writer)
    tell = told.progress if job.asked.return_progress and len(job.prepared) == 1 else None
    return await respond(job, told, headers, tell_progress=tell)


async def respond(
    job: RequestContext[Any],
    told: Answer,
    headers: Mapping[str, str],
    *,
    tell_progress: Callable[[PromptProgress], bytes] | None = None,
) -> Response:
    """The same for an answer of any form; `tell_progress` makes events of how far its prompt is computed."""
    if job.asked.stream:
        straight = DirectStream()
        events = _events(job, told, straight, tell_progress)
        interval = job.served.settings.sse_keep_alive_seconds
        return EventStream(events, headers, ping_interval=interval, form=told.form, straight=straight)
    return json_response(await told.whole(), headers)


async def _events(
    job: RequestContext[Any],
    told: Answer,
    straight: DirectStream,
    tell_progress: Callable[[PromptProgress], bytes] | None,
) -> AsyncGenerator[bytes, None]:
    """One or more whole events for each output that has news, but for those that have gone straight to the client.

    Raises as `outputs_of` does.
    """
    async with aclosing(outputs_of(job, told.told, straight, is_watched=tell_progress is not None)) as outputs:
        if tell_progress is not None:
            first = asyncio.ensure_future(anext(outputs))
            try:
                async with aclosing(prompt_progress(job, first, straight)) as found:
                    async for progress in found:
                        yield tell_progress(progress)
                if content := told.told(*await first):
                    yield content
            finally:
                first.cancel()
                await asyncio.wait({first})
        async for number, output in outputs:
            if content := told.told(number, output):
                yield content


class _Choices:
    """An answer in choices."""

    form = OPENAI_FORM

    def __init__(self, job: RequestContext[Any], writer: Writer) -> None:
        self._job = job
        self._writer = writer
        self._tally = UsageCounter(job)
        options = job.asked.stream_options or StreamOptions()
        self._tells_usage = bool(options.include_usage)
        self._tells_usage_always = bool(options.continuous_usage_stats)
        self._frame = _Frame(_head(job, writer.chunk_kind), {"usage": None} if options.include_usage else {})
        self._is_first = True

    async def whole(self) -> dict[str, Any]:
        job, writer, outputs = self._job, self._writer, dict[int, RequestOutput]()
        async with aclosing(outputs_of(job)) as found:
            async for number, output in found:
                outputs[number] = writer.taken(output)
                self._tally.add(number, outputs[number])
        in_order = [outputs[number] for number in range(len(job.prepared))]
        told = {"choices": writer.choices(in_order), "usage": self._tally.usage()}
        return {**_head(job, writer.kind), **told, **writer.extras(in_order), **self._tally.depth()}

    def progress(self, found: PromptProgress) -> bytes:
        return self._frame.event([], {"prompt_progress": found})

    def told(self, number: int, given: RequestOutput) -> bytes:
        """The events of one output together, and what the request has come to behind those of the last, so that they
        are one write."""
        output = self._writer.taken(given)
        self._tally.add(number, output)
        chunks = self._writer.chunks(number, output)
        if len(chunks) == 1 and not (self._is_first or output.finished or self._tells_usage_always):
            return self._frame.event(chunks)
        events = self._events(chunks) if chunks else b""
        if self._tells_usage and self._tally.is_finished:
            events += self._frame.event([], {"usage": self._tally.usage()})
        return events

    def _events(self, chunks: Sequence[Mapping[str, Any]]) -> bytes:
        each = {"usage": self._tally.usage()} if self._tells_usage_always else {}
        first = self._writer.extras([]) if self._is_first else {}
        self._is_first = False
        last = self._tally.depth() if self._tally.is_finished else {}
        return self._frame.events(chunks, {**each, **first}, {**each, **last})


def _head(job: RequestContext[Any], kind: str) -> dict[str, Any]:
    return {"id": job.id, "object": kind, "created": job.created, "model": job.model}


class _Frame:
    """What all chunks of a stream have in common, encoded once: what stands before the choices, and after them."""

    def __init__(self, head: Mapping[str, Any], tail: Mapping[str, Any]) -> None:
        self._before = b"data: " + orjson.dumps(head)[:-1] + b',"choices":'
        self._tail = tail
        self._after = _after(tail)

    def event(self, choices: Sequence[Mapping[str, Any]], own: Mapping[str, Any] | None = None) -> bytes:
        """The event of a chunk, which may have fields of its own after those of all, or in their place."""
        after = _after({**self._tail, **own}) if own else self._after
        return self._before + orjson.dumps(choices) + after

    def events(self, choices: Sequence[Mapping[str, Any]], first: Mapping[str, Any], last: Mapping[str, Any]) -> bytes:
        """One event for each choice, since some clients look at the first alone; with what goes into the first of them
        and into the last."""
        end = len(choices) - 1
        tails = [{**(first if i == 0 else {}), **(last if i == end else {})} for i in range(len(choices))]
        return b"".join(self.event([choice], tail) for choice, tail in zip(choices, tails, strict=True))


def _after(tail: Mapping[str, Any]) -> bytes:
    return (b"," + orjson.dumps(tail)[1:] if tail else b"}") + b"\n\n"
