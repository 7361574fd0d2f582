"""A stream begins with its first event, or with a ping where that is late; and work ends when a client leaves."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from loops import on_a_loop

from d3engine.server.errors import RequestError
from d3engine.server.responses.running import unless_disconnected
from d3engine.server.responses.streams import OPENAI_FORM as FORM
from d3engine.server.responses.streams import EventStream
from d3engine.server.routes.messages import MESSAGE_FORM, PING

SCOPE = {"type": "http"}
"""Of a server that tells of a client's leaving by a message alone."""


async def stays() -> Any:
    """Of a client that never leaves."""
    await asyncio.Event().wait()


async def sent_of(events: Callable[[asyncio.Event], AsyncGenerator[bytes, None]], form: Any = FORM) -> list[Any]:
    """What a stream sends; the event that `events` is given is set at the first ping."""
    pinged, sent = asyncio.Event(), []

    async def send(message: Any) -> None:
        sent.append(message.get("body", message["type"]))
        if sent[-1] == form.ping:
            pinged.set()

    stream = EventStream(events(pinged), ping_interval=0.001, form=form)
    await stream({"type": "http"}, stays, send)  # type: ignore[arg-type]
    return sent


def test_a_first_event_that_is_late_is_announced_by_a_ping() -> None:
    async def late(pinged: asyncio.Event) -> AsyncGenerator[bytes, None]:
        await pinged.wait()
        yield b"only"

    sent = asyncio.run(sent_of(late))
    assert (sent[:2], sent[-2:]) == (["http.response.start", FORM.ping], [b"only", FORM.end])
    assert set(sent[2:-2]) <= {FORM.ping}


def test_a_silence_within_a_message_is_filled_with_pings() -> None:
    async def slow(pinged: asyncio.Event) -> AsyncGenerator[bytes, None]:
        yield b"first"
        await pinged.wait()
        yield b"last"

    sent = asyncio.run(sent_of(slow, MESSAGE_FORM))
    assert set(sent[1:]) == {b"first", PING, b"last", b""}
    assert (sent[1], sent[-2:]) == (b"first", [b"last", b""])


def test_event_stream_error_is_raised_or_the_last_event() -> None:
    """An error before any byte is raised, and after a ping it is the last event."""
    error = RequestError(503, "No.", code="no")

    async def fails_at_once(pinged: asyncio.Event) -> AsyncGenerator[bytes, None]:
        raise error
        yield b""

    async def fails_late(pinged: asyncio.Event) -> AsyncGenerator[bytes, None]:
        await pinged.wait()
        raise error
        yield b""

    with pytest.raises(RequestError, match=r"No\."):
        asyncio.run(sent_of(fails_at_once))
    sent = asyncio.run(sent_of(fails_late))
    assert (sent[:2], sent[-1]) == (["http.response.start", FORM.ping], FORM.failed(error))


@on_a_loop
async def test_an_event_waits_for_the_ping_before_it() -> None:
    """Whatever a connection does with the head of a response, its body never comes first."""
    sent: list[Any] = []
    head, go_on = asyncio.Event(), asyncio.Event()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            head.set()
            await go_on.wait()
        sent.append(message.get("body", message["type"]))

    async def events() -> AsyncGenerator[bytes, None]:
        await head.wait()
        asyncio.get_running_loop().call_later(0.005, go_on.set)
        yield b"only"

    await EventStream(events(), ping_interval=0.001, form=FORM)({"type": "http"}, stays, send)  # type: ignore[arg-type]
    assert sent == ["http.response.start", FORM.ping, b"only", FORM.end]


@on_a_loop
async def test_work_ends_when_its_client_leaves() -> None:
    """Work goes on while the client stays, and ends when the client leaves."""
    ended: list[str] = []

    async def work(leaving: asyncio.Event) -> str:
        leaving.set()
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            ended.append("work")
        return "never"

    leaving = asyncio.Event()

    async def leaves() -> Any:
        await leaving.wait()
        return {"type": "http.disconnect"}

    assert await unless_disconnected(SCOPE, stays, asyncio.sleep(0, "done")) == "done"
    assert await unless_disconnected(SCOPE, leaves, work(leaving)) is None
    assert ended == ["work"]
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()  # a task that waits after it is not cancelled
    await asyncio.sleep(0)


@pytest.mark.parametrize("client_leaves", [False, True])
@on_a_loop
async def test_cancelled_caller_is_cancelled_though_clients_leave(client_leaves: bool) -> None:
    """A caller that is cancelled gets its cancellation although the client may leave too."""
    begun = asyncio.Event()

    async def receive() -> Any:
        await begun.wait()
        if not client_leaves:
            await stays()
        return {"type": "http.disconnect"}

    async def work() -> None:
        begun.set()
        await asyncio.sleep(3600)

    task = asyncio.ensure_future(unless_disconnected(SCOPE, receive, work()))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@on_a_loop
async def test_client_that_leaves_at_the_end_cancels_nothing_after() -> None:
    """A client that leaves as its answer ends cancels nothing that comes after."""
    left, done = asyncio.get_running_loop().create_future(), asyncio.get_running_loop().create_future()

    async def receive() -> dict[str, str]:
        await left
        return {"type": "http.disconnect"}

    async def end() -> None:
        for _ in range(5):  # until both are awaited
            await asyncio.sleep(0)
        left.set_result(None)
        done.set_result(7)

    ending = asyncio.ensure_future(end())
    found: int | None = await unless_disconnected(SCOPE, receive, done)
    for _ in range(3):
        await asyncio.sleep(0)
    await ending
    assert found == 7
