"""Runs requests: outputs as they come, which go from the engine to the socket without waking a task where they can."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from starlette.requests import Request
from starlette.types import Receive, Scope

from d3engine.async_engine.client import AsyncAnswer
from d3engine.request.constraint import FAULT_PREFIX
from d3engine.request.outputs import RequestOutput
from d3engine.server.errors import RequestError
from d3engine.server.metrics import RequestMeter
from d3engine.server.responses.context import RequestContext, UsageCounter
from d3engine.server.schemas.answers import PromptProgress

if TYPE_CHECKING:
    from d3engine.server.connections import DirectWriter


class DirectStream:
    """Of one stream. `outlet` is None until its task opens it, when the first event is out, and with other servers."""

    def __init__(self) -> None:
        self.outlet: DirectWriter | None = None
        self.num_writes = 0

    def write(self, content: bytes) -> None:
        assert self.outlet is not None
        self.num_writes += 1
        self.outlet.write(with_plain_lines(content))


_SEPARATORS = {b"\xc2\x85": rb"\u0085", b"\xe2\x80\xa8": rb"\u2028", b"\xe2\x80\xa9": rb"\u2029"}


def with_plain_lines(events: bytes) -> bytes:
    """Events of JSON in which Unicode's separators are escaped, at which some clients would cut a line in two."""
    for separator, escaped in _SEPARATORS.items():
        if separator in events:
            events = events.replace(separator, escaped)
    return events


_log = logging.getLogger(__name__)

T = TypeVar("T")
Told: TypeAlias = "Callable[[int, RequestOutput], bytes]"
"""What is new of the prompt of a number, as whole events; nothing where it is worth none."""


async def outputs_of(
    job: RequestContext[Any],
    told: Told | None = None,
    straight: DirectStream | None = None,
    *,
    is_watched: bool = False,
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The outputs of all prompts as they come, each with its prompt's number.

    Those of a single prompt go straight to the client, by what `told` makes of them, while `straight` is free. With
    `is_watched` the engine knows it by the job's id, for `prompt_progress`.

    Raises `RequestError` for a depth too many at work, and where one of the prompts fails.
    """
    with job.served.depths.at_work(job.depth):
        if len(job.prepared) == 1:
            async with aclosing(_outputs(job, 0, told, straight, is_watched=is_watched)) as outputs:
                async for output in outputs:
                    yield 0, output
            return
        async with aclosing(_merged(job)) as merged:
            async for found in merged:
                yield found


PROGRESS_SECONDS = 0.5
"""Between two looks at how far a prompt is computed."""


async def prompt_progress(
    job: RequestContext[Any], first: asyncio.Future[Any], straight: DirectStream
) -> AsyncGenerator[PromptProgress, None]:
    """How far the single prompt of a job is computed, now and then until it is, or until its first output, which is
    `first` or has gone straight to the client.

    The engine is asked between two of its steps: tokens take no longer.
    """
    found, is_reading = None, True
    while is_reading and not first.done():
        await asyncio.wait({first}, timeout=PROGRESS_SECONDS)
        stats = asyncio.ensure_future(job.served.client.stats())
        try:
            await asyncio.wait({first, stats}, return_when=asyncio.FIRST_COMPLETED)
            has_begun = first.done() or straight.num_writes > 0
            if has_begun or stats.exception() is not None:  # which `first` raises too
                return
            before, found = found, stats.result().prompts.get(job.id)
        finally:
            stats.cancel()
        is_reading = found is not None or before is None
        if found is not None and found != before:
            total, cached, computed = found
            yield {"total": total, "cache": cached, "processed": computed}


async def whole_output(job: RequestContext[Any], usage: UsageCounter | None = None) -> RequestOutput:
    """The whole output of a single prompt, which `usage` counts. Raises as `outputs_of` does."""
    found = None
    async with aclosing(outputs_of(job)) as outputs:
        async for number, output in outputs:
            if usage is not None:
                usage.add(number, output)
            found = output
    assert found is not None  # every request has a last output
    return found


async def _outputs(
    job: RequestContext[Any],
    number: int,
    told: Told | None = None,
    straight: DirectStream | None = None,
    *,
    is_watched: bool = False,
) -> AsyncGenerator[RequestOutput, None]:
    prepared = job.prepared[number]
    if is_watched:
        prepared = replace(prepared, request_id=job.id)
    # What a client gives can be closed, be it a generator or not.
    given = cast("AsyncGenerator[RequestOutput, None]", job.served.client.generate(prepared))
    async with aclosing(given) as outputs:
        with job.served.meters.request(prepared) as meter:
            if isinstance(given, AsyncAnswer) and told is not None and straight is not None:
                given.tap(_sent_straight(job, number, meter, told, straight))
            async for output in outputs:
                _see(job, number, meter, output)
                _check_sound(output)
                yield output


def _see(job: RequestContext[Any], number: int, meter: RequestMeter, output: RequestOutput) -> None:
    meter.see(output)
    if job.trace is not None:
        job.trace.see(number, output)


def _sent_straight(
    job: RequestContext[Any], number: int, meter: RequestMeter, told: Told, straight: DirectStream
) -> Callable[[Sequence[RequestOutput]], int]:
    """Writes outputs that have come at once in one piece, up to one at which an answer ends, and none while it would
    have to wait."""

    def write(outputs: Sequence[RequestOutput]) -> int:
        if straight.outlet is None or not straight.outlet.is_free:
            return 0
        events = []
        for output in outputs:
            if any(answer.finish_reason is not None for answer in output.outputs):
                break
            _see(job, number, meter, output)
            events.append(told(number, output))
        if content := b"".join(events):
            straight.write(content)
        return len(events)

    return write


async def _merged(job: RequestContext[Any]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Of several prompts. Each waits for its reader, so that no more than one output of each is kept here."""
    found: asyncio.Queue[tuple[int, RequestOutput | Exception]] = asyncio.Queue(1)

    async def read(number: int) -> None:
        try:
            async with aclosing(_outputs(job, number)) as outputs:
                async for output in outputs:
                    await found.put((number, output))
        except Exception as error:
            await found.put((number, error))

    readers = [asyncio.create_task(read(number)) for number in range(len(job.prepared))]
    try:
        unfinished = len(readers)
        while unfinished:
            number, output = await found.get()
            if isinstance(output, Exception):
                raise output
            unfinished -= output.finished
            yield number, output
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


def _check_sound(output: RequestOutput) -> None:
    """Raise `RequestError` for a request that the engine has given up, whose text is no answer."""
    for answer in output.outputs:
        if answer.finish_reason == "abort":
            reason = str(answer.stop_reason)
            if reason.startswith(FAULT_PREFIX):  # the request's own: the same again would end alike
                message = f"The answer was ended by its grammar ({reason.removeprefix(FAULT_PREFIX)})."
                raise RequestError(400, message, param="structured_outputs", code="grammar_limit")
            _log.error("request %s ended before its time: %s", output.request_id, answer.stop_reason)
            raise RequestError(500, "The engine failed on this request.", code="request_failed")


async def unless_disconnected(scope: Scope, receive: Receive, work: Awaitable[T]) -> T | None:
    """The result of `work`, or None if the client leaves before; `work` is then cancelled, and has ended.

    It runs in the caller's own task, as under a timeout of asyncio's. The body must have been read, so that the next
    message is the client's leaving: it is awaited by a task where the connection does not tell of that by itself.
    """
    task = asyncio.current_task()
    assert task is not None
    cancelled_before = task.cancelling()
    has_left = is_over = False

    def leave(watching: asyncio.Future[None]) -> None:
        nonlocal has_left
        if watching.cancelled():
            return
        watching.exception()  # a connection that cannot be read has ended too
        if not is_over:  # where both have ended at once, this is called after all
            has_left = True
            task.cancel()

    told: asyncio.Future[None] | None = scope.get("state", {}).get("client_left")
    watching = asyncio.ensure_future(_disconnect(receive)) if told is None else told
    watching.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if has_left and task.uncancel() <= cancelled_before:
            return None
        raise
    finally:
        is_over = True
        watching.remove_done_callback(leave)
        if told is None:
            watching.cancel()


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`; raises `RequestError` (499) if the client leaves before, and ends it."""
    found = await unless_disconnected(request.scope, request.receive, work)
    if found is None:
        raise RequestError(499, "The client has left.", code="client_closed_request")
    return found


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
