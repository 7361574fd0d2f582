"""How many at once, for how long, and what each request is called: queue, drain, limits of time, ids, the log."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from guarded_apps import JSON, Answer, GuardedApp
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from d3engine.server.middleware.request_log import RequestLog, log_exchange
from d3engine.server.middleware.settings import GuardSettings

# -- the queue -------------------------------------------------------------------------------------------------------


async def _hold(places: int, calls: int) -> tuple[GuardedApp, list[Answer]]:
    """So many calls at once of a route that answers none of them before all others have been refused."""
    go = asyncio.Event()

    async def wait(request: Request) -> Response:
        await go.wait()
        return PlainTextResponse("done")

    app = GuardedApp(places=places, wait=wait)
    asked = [asyncio.create_task(app.answer("POST", "/wait", JSON, [b"{}"])) for _ in range(calls)]
    while sum(task.done() for task in asked) < calls - places:
        await asyncio.sleep(0)
    go.set()
    return app, await asyncio.gather(*asked)


def test_request_beyond_the_queue_gets_429_with_retry_after() -> None:
    """As many requests as there are places are taken, and the next gets 429 with Retry-After."""
    app, answers = asyncio.run(_hold(places=3, calls=5))
    assert sorted(answer.status for answer in answers) == [200, 200, 200, 429, 429]
    refused = [answer for answer in answers if answer.status == 429]
    assert {(answer.code, answer.headers["retry-after"]) for answer in refused} == {("queue_full", "1")}
    assert app.traffic.taken == 0


# -- drain -----------------------------------------------------------------------------------------------------------


def test_drain_answers_health_readiness_and_metrics_alone() -> None:
    """While the server drains, only health, readiness and metrics are answered."""
    app = GuardedApp()
    app.traffic.is_draining = True
    for method, path in (("POST", "/echo"), ("GET", "/hello"), ("GET", "/v1/models")):
        answer = app.call(method, path, JSON)
        assert (answer.status, answer.code, answer.headers["retry-after"]) == (503, "draining", "1")
    assert [app.call("GET", path).status for path in ("/health", "/ready", "/metrics")] == [200, 200, 200]


# -- limits of time --------------------------------------------------------------------------------------------------


async def _stuck(request: Request) -> Response:
    await asyncio.Event().wait()
    raise AssertionError


def test_an_answer_that_takes_too_long_is_a_504() -> None:
    app = GuardedApp(GuardSettings(request_timeout=0.01), stuck=_stuck)
    answer = app.call("POST", "/stuck", JSON, [b"{}"])
    assert (answer.status, answer.code) == (504, "request_timeout")
    assert app.traffic.taken == 0


def test_stream_timeout_ends_with_an_error_and_done() -> None:
    """A stream that takes too long ends with an error and [DONE]."""
    left = []

    async def stream(request: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            try:
                yield b"data: 1\n\n"
                await asyncio.Event().wait()
            finally:
                left.append(True)

        return StreamingResponse(events(), media_type="text/event-stream")

    app = GuardedApp(GuardSettings(request_timeout=0.05), stream=stream)
    answer = app.call("POST", "/stream", JSON, [b"{}"])
    first, error, done, rest = answer.body.split(b"\n\n")
    assert (answer.status, first, done, rest) == (200, b"data: 1", b"data: [DONE]", b"")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "request_timeout"
    assert answer.messages[-1]["more_body"] is False
    assert left == [True]


def test_a_timeout_of_the_routes_own_is_not_taken_for_the_limit() -> None:
    async def raises(request: Request) -> Response:
        raise TimeoutError("its own")

    app = GuardedApp(GuardSettings(request_timeout=60), raises=raises)
    assert app.call("POST", "/raises", JSON, [b"{}"]).status == 500


def test_a_client_that_does_not_read_is_left_and_its_stream_ends() -> None:
    ended, aborted = [], []

    async def stream(request: Request) -> Response:
        request.scope["state"]["abort_connection"] = lambda: aborted.append(True)

        async def events() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"x" * 1000
            finally:
                ended.append(True)

        return StreamingResponse(events(), media_type="text/event-stream")

    sent = 0

    async def stall(message: Any) -> None:
        nonlocal sent
        sent += 1
        if sent > 4:
            await asyncio.Event().wait()

    app = GuardedApp(GuardSettings(write_timeout=0.05), stream=stream)

    async def run() -> None:
        await app.answer("POST", "/stream", JSON, [b"{}"], send=stall)
        assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]

    asyncio.run(run())
    assert (ended, aborted, app.traffic.taken) == ([True], [True], 0)


def test_slow_model_is_not_taken_for_a_stalled_client() -> None:
    """A slow model is not taken for a client that does not read."""

    async def slow(request: Request) -> Response:
        await asyncio.sleep(0.05)  # many times the limit of a write
        return PlainTextResponse("done")

    assert GuardedApp(GuardSettings(write_timeout=0.005), slow=slow).call("POST", "/slow", JSON, [b"{}"]).status == 200


# -- ids, errors and the log -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["a", "A-b_c.9", "x" * 128])
def test_a_clients_id_comes_back(given: str) -> None:
    app = GuardedApp()
    assert app.call("GET", "/hello", {"X-Request-Id": given}).headers["x-request-id"] == given
    assert app.exchanges[0].request_id == given


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a\x1b[31m", "ä", "a\r\nSet-Cookie: x"])
def test_an_id_that_could_do_harm_is_replaced(given: str) -> None:
    found = GuardedApp().call("GET", "/hello", {"X-Request-Id": given}).headers["x-request-id"]
    assert found != given
    assert len(found) == 32
    assert int(found, 16)


def test_refusals_have_an_id_and_a_content_type_not_guessed() -> None:
    """Refusals have an id too, and forbid browsers to guess a content type."""
    app = GuardedApp(GuardSettings(api_keys=("a-key-of-1234",)))
    answer = app.call("GET", "/hello", {"X-Request-Id": "mine"})
    assert (answer.status, answer.headers["x-request-id"]) == (401, "mine")
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_fault_of_the_server_says_nothing_of_its_insides() -> None:
    app = GuardedApp()
    answer = app.call("POST", "/fail", JSON, [b"{}"])
    assert (answer.status, answer.code) == (500, "internal_error")
    assert b"secret" not in answer.body
    assert app.call("GET", "/hello").status == 200


def test_request_log_is_one_line_of_printable_characters(caplog: pytest.LogCaptureFixture) -> None:
    """A request has one line in the log, and nothing in it steers a terminal."""
    # Row 22 of the security list: what a client sends is escaped where a terminal shows it.
    caplog.set_level(logging.INFO, "d3engine")
    log_exchange(RequestLog("an-id", "POST", "/v1/\x1b[2Jclear\n" + "x" * 999, status=404, code="not_found"))
    (record,) = caplog.records
    line = record.getMessage()
    assert line.isprintable()
    assert line.startswith("POST /v1/\\x1b[2Jclear\\nxxx")
    assert " 404 not_found " in line
    assert line.endswith(" an-id")
    assert len(line) < 400


def test_request_log_leaves_out_probes_unless_they_fail(caplog: pytest.LogCaptureFixture) -> None:
    """What machines ask every few seconds is not logged unless it fails."""
    caplog.set_level(logging.INFO, "d3engine")
    log_exchange(RequestLog("an-id", "GET", "/health", status=200))
    assert not caplog.records
    log_exchange(RequestLog("an-id", "GET", "/health", status=503))
    assert [record.levelname for record in caplog.records] == ["ERROR"]
