"""The two ways in which any answer goes out: whole, or as a stream of chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response

from d3engine.request.outputs import RequestOutput
from d3engine.server.answering.event_stream import EventStream, OpenAIForm, StreamForm
from d3engine.server.answering.job import RequestContext
from d3engine.server.answering.running import outputs_of, while_connected
from d3engine.server.answering.straight import DirectStream
from d3engine.server.answering.tally import UsageCounter
from d3engine.server.answers import json_response
from d3engine.server.shapes.requests import StreamOptions


class Writer(Protocol):
    """What an interface makes of outputs."""

    kind: str
    """What it calls an answer."""
    chunk_kind: str
    """And a chunk of one."""

    def taken(self, output: RequestOutput) -> RequestOutput:
        """What of an output counts."""

    def choices(self, outputs: Sequence[RequestOutput]) -> Sequence[Mapping[str, Any]]:
        """The choices of a whole answer, from the whole output of each prompt."""

    def chunks(self, number: int, output: RequestOutput) -> Sequence[Mapping[str, Any]]:
        """What is new of the choices of one prompt, one entry for each chunk."""

    def extras(self, outputs: Sequence[RequestOutput]) -> Mapping[str, Any]:
        """Further fields of a whole answer, or, of no outputs yet, of a stream's first chunk."""


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


async def answer(request: Request, job: RequestContext[Any], writer: Writer, headers: Mapping[str, str]) -> Response:
    """Run a job and answer as its request asks for."""
    return await respond(request, job, _Choices(job, writer), headers)


async def respond(request: Request, job: RequestContext[Any], told: Answer, headers: Mapping[str, str]) -> Response:
    """The same for an answer of any form."""
    if job.asked.stream:
        interval = job.served.settings.sse_keep_alive_seconds
        straight = DirectStream()
        events = _events(job, told, straight)
        return EventStream(events, headers, ping_interval=interval, form=told.form, straight=straight)
    found = await while_connected(request.scope, request.receive, told.whole())
    return json_response(found, headers)


async def _events(job: RequestContext[Any], told: Answer, straight: DirectStream) -> AsyncGenerator[bytes, None]:
    """One or more whole events for each output that has news, but for those that have gone straight to the client.

    Raises as `outputs_of` does.
    """
    async with aclosing(outputs_of(job, told.told, straight)) as outputs:
        async for number, output in outputs:
            if content := told.told(number, output):
                yield content


class _Choices:
    """An answer in choices."""

    form = OpenAIForm()

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
        return await _whole(self._job, self._writer)

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


async def _whole(job: RequestContext[Any], writer: Writer) -> dict[str, Any]:
    tally = UsageCounter(job)
    outputs: dict[int, RequestOutput] = {}
    async with aclosing(outputs_of(job)) as found:
        async for number, output in found:
            outputs[number] = writer.taken(output)
            tally.add(number, outputs[number])
    in_order = [outputs[number] for number in range(len(job.prepared))]
    return {
        **_head(job, writer.kind),
        "choices": writer.choices(in_order),
        "usage": tally.usage(),
        **writer.extras(in_order),
        **tally.depth(),
    }


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
