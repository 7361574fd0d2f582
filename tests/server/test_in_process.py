"""An app called as a function answers as it does over a socket, and hears of a reader who leaves."""

import asyncio
from typing import Any

import pytest
from loops import on_a_loop
from starlette.types import Receive, Scope, Send

from d3engine.server.in_process import messages_of, post


def test_a_whole_answer_has_its_status_id_and_body() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert (scope["path"], dict(scope["headers"])[b"content-length"]) == ("/there", b"4")
        asked = await receive()
        await send({"type": "http.response.start", "status": 418, "headers": [(b"x-request-id", b"one")]})
        await send({"type": "http.response.body", "body": asked["body"] + b"!", "more_body": True})
        await send({"type": "http.response.body"})

    answered = asyncio.run(post(app, "/there", b"1234"))
    assert (answered.status, answered.request_id, answered.body) == (418, "one", b"1234!")


def test_what_the_app_raises_is_raised() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise ZeroDivisionError("why")

    with pytest.raises(ZeroDivisionError, match="why"):
        asyncio.run(post(app, "/", b""))


@on_a_loop
async def test_reader_that_leaves_cancels_the_app() -> None:
    """A reader that leaves cancels the app, which does not run ahead of its reader."""
    sent: list[int] = []
    ended: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            for number in range(1000):
                await send({"type": "http.response.body", "body": b"%d" % number, "more_body": True})
                sent.append(number)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    messages = messages_of(app, "/", b"")
    assert (await anext(messages))["body"] == b"0"
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(sent) <= 2
    await messages.aclose()
    assert ended == ["cancelled"]
