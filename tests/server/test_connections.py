"""What no app gets to see: heads and bodies that never end, clients that do not read, and how a server ends."""

import asyncio
import gc
import json
import socket
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import pytest
from guarded_apps import GuardedApp
from loops import on_a_loop
from served_apps import GUARD, ServedApp, read_answer, read_to_the_end, request, served
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from d3engine.errors import FailedError
from d3engine.server import connections
from d3engine.server import running as running_server
from d3engine.server.middleware.settings import GuardSettings
from d3engine.server.responses.streams import OPENAI_FORM, EventStream
from d3engine.server.running import GuardedServer, bind, most_connections

HASTY = GuardSettings(port=0, header_timeout=0.2, body_timeout=0.2, write_timeout=0.2, max_body_bytes=100_000)


@pytest.fixture(scope="module")
def hasty() -> Iterator[ServedApp]:
    app = GuardedApp(HASTY)
    with served(app.app, app.traffic, HASTY) as running:
        yield running


def ask(running: ServedApp, data: bytes) -> tuple[int, dict[str, dict[str, str]]]:
    with running.connect() as client:
        client.sendall(data)
        return read_answer(client)


def refused(running: ServedApp, *pieces: bytes) -> tuple[int, Any]:
    """Status and error of what is sent; the connection ends after them."""
    with running.connect() as client:
        for piece in pieces:
            client.sendall(piece)
        status, body = read_answer(client)
        assert read_to_the_end(client) == b""
    return status, body["error"]


@pytest.mark.parametrize("begun", [b"G", b"POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "])
def test_a_head_that_does_not_come_whole_is_not_waited_for(hasty: ServedApp, begun: bytes) -> None:
    status, error = refused(hasty, begun)
    assert (status, error["code"]) == (408, "head_timeout")


def test_nor_is_a_connection_kept_that_says_nothing(hasty: ServedApp) -> None:
    with hasty.connect() as client:
        assert client.recv(1) == b""


def test_the_limit_of_a_head_is_not_that_of_a_connection(hasty: ServedApp) -> None:
    with hasty.connect() as client:
        for _ in range(3):
            client.sendall(request("/hello", method="GET"))
            assert read_answer(client)[0] == 200


def test_a_stalled_body_is_answered_and_its_connection_ends(hasty: ServedApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LINGER_SECONDS", 0.05)
    status, error = refused(hasty, request("/echo", b"{", Content_Length="1000"))
    assert (status, error["code"]) == (408, "body_timeout")


def test_a_head_is_of_bounded_length(hasty: ServedApp) -> None:
    with hasty.connect() as client:
        client.sendall(b"GET /hello HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        with suppress(ConnectionError):  # it stops reading before all of this is sent
            for _ in range(100):
                client.sendall(b"X-Long: " + b"x" * 8000 + b"\r\n")
        assert read_to_the_end(client)[:12] in (b"HTTP/1.1 431", b"HTTP/1.1 400", b"")
    assert ask(hasty, request("/hello", method="GET"))[0] == 200


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"NOTHING\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /hello HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"A: b\r\n" * 300 + b"\r\n",
    ],
)
def test_bytes_that_are_not_http_get_an_error_in_one_form(hasty: ServedApp, data: bytes) -> None:
    """Bytes that are not HTTP get an error in the form of all errors."""
    status, body = ask(hasty, data)
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"Transfer-Encoding: gzip, chunked", 501),
        (b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked", 501),
        (b"Transfer-Encoding: chunked, identity", 400),
        (b"Transfer-Encoding: identity, chunked", 501),
        (b"Transfer-Encoding: chunked, chunked", 400),
        (b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", 400),
        (b"Transfer-Encoding: xchunked", 400),
        (b"Transfer-Encoding: chunked\r\nContent-Length: 5", 400),
        (b"Content-Length: 5\r\nTransfer-Encoding: CHUNKED", 400),
        (b"Content-Length: 5, 5", 400),
        (b"Content-Length : 5", 400),
    ],
)
@pytest.mark.parametrize("method", [b"POST /echo", b"GET /hello"])
def test_a_body_that_servers_would_frame_differently_is_refused(
    hasty: ServedApp, method: bytes, head: bytes, status: int
) -> None:
    lines = [method + b" HTTP/1.1", b"Host: 127.0.0.1", b"Content-Type: application/json", head]
    smuggled = request("/hello", method="GET")
    found, error = refused(hasty, b"\r\n".join(lines) + b"\r\n\r\n" + b'3\r\n"a"\r\n0\r\n\r\n' + smuggled)
    assert (found, error["type"]) == (status, "invalid_request_error")


CHUNKED = (
    b"POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
)


UPGRADE = {"Connection": "keep-alive, Upgrade, HTTP2-Settings", "HTTP2_Settings": "AAMAAABkAARAAAAAAAIAAAAA"}


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_request_to_upgrade_is_one_like_any_other(hasty: ServedApp, protocol: str, at_once: bool) -> None:
    """Java's own client asks for HTTP/2 with each request; its body is read, and is no request of another."""
    smuggled = request("/hello", method="GET")
    text = json.dumps(smuggled.decode()).encode()
    asked = request("/echo", text, Upgrade=protocol, **UPGRADE)
    chunked = CHUNKED.replace(b"Host:", b"Upgrade: h2c\r\nConnection: Upgrade\r\nHost:") + b'3\r\n"b"\r\n0\r\n\r\n'
    pieces = [asked + chunked + smuggled]
    if not at_once:
        pieces = [pieces[0][:60], pieces[0][60:-150], pieces[0][-150:-1], pieces[0][-1:]]
    with hasty.connect() as client:
        for piece in pieces:
            client.sendall(piece)
        assert read_answer(client) == (200, smuggled.decode())
        assert read_answer(client) == (200, "b")
        assert read_answer(client) == (200, b"hello")
    assert ask(hasty, request("/hello", method="GET", Upgrade=protocol, **UPGRADE)) == (200, b"hello")


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Content_Length": "200000"}, "body_too_long"),
        ({"Content_Type": "text/plain"}, "unsupported_media_type"),
        ({"Host": "example.org"}, "host_not_allowed"),
    ],
)
def test_a_request_to_upgrade_is_refused_like_any_other(hasty: ServedApp, headers: dict[str, str], code: str) -> None:
    """No guard is passed by asking for another protocol."""
    _, body = ask(hasty, request("/echo", b"{}", Upgrade="h2c", **UPGRADE | headers))
    assert body["error"]["code"] == code


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    "long",
    [
        b"3;a=" + b"x" * 20_000 + b'\r\n"a"\r\n0\r\n\r\n',
        b'3\r\n"a"\r\n0;' + b"x" * 20_000 + b"\r\n\r\n",
        b'3\r\n"a"\r\n0\r\n' + b"A: b\r\n" * 4_000 + b"\r\n",
        b'1;a=1234567890\r\n"\r\n' + b"1;a=1234567890\r\na\r\n" * 4_000,
    ],
)
def test_chunk_extensions_and_trailers_are_counted(long: bytes, at_once: bool) -> None:
    app = GuardedApp(GuardSettings(port=0))
    with served(app.app, app.traffic, GuardSettings(port=0)) as running:
        status, error = refused(running, *([CHUNKED + long] if at_once else [CHUNKED, long]))
    assert (status, error["code"]) == (400, "chunk_extensions_too_long")


def test_small_chunks_extensions_and_pipelined_bodies_are_read(hasty: ServedApp) -> None:
    """Small chunks, short extensions and pipelined bodies are read."""
    text = b'"' + b"a" * 9_000 + b'"'
    chunks = b"".join(b"1;b=c\r\n%c\r\n" % letter for letter in text) + b"0\r\nTrailer: x\r\n\r\n"
    with hasty.connect() as client:
        client.sendall(CHUNKED + chunks + CHUNKED + b'3\r\n"b"\r\n0\r\n\r\n')
        assert read_answer(client)[0] == 200
        assert read_answer(client) == (200, "b")


def test_a_trailer_is_no_header() -> None:
    seen: list[list[tuple[bytes, bytes]]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["more_body"]:
            pass
        seen.append(scope["headers"])
        await Response(b'"done"')(scope, receive, send)

    with served(app, GuardedApp(HASTY).traffic, HASTY) as running, running.connect() as client:
        client.sendall(CHUNKED + b"0\r\nAuthorization: Bearer stolen\r\n\r\n")
        assert read_answer(client)[0] == 200
    assert b"authorization" not in dict(seen[0])


def test_who_sends_too_much_reads_why_and_may_ask_again(hasty: ServedApp) -> None:
    """Row 15 of the security list, over the wire: what comes after the refusal is thrown away."""
    with hasty.connect() as client:
        client.sendall(request("/echo", b"x" * 3_000_000))
        status, body = read_answer(client)
        assert (status, body["error"]["code"]) == (413, "body_too_long")
        client.sendall(request("/echo", b'"again"'))
        assert read_answer(client) == (200, "again")


def send_for_ever(client: socket.socket) -> None:
    while True:
        client.sendall(b"x" * 10_000)


def test_refused_endless_body_is_discarded_for_a_while_only(hasty: ServedApp, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused body that never ends is discarded for a limited time only."""
    monkeypatch.setattr(connections, "LINGER_SECONDS", 0.05)
    with hasty.connect() as client:
        client.sendall(request("/echo", Content_Length=str(2**40)))
        with pytest.raises(ConnectionError):
            send_for_ever(client)
    assert ask(hasty, request("/echo", b'"next"')) == (200, "next")


def test_client_that_does_not_read_loses_its_connection() -> None:
    """A client that does not read loses its connection, and the stream ends."""
    ended = threading.Event()

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while True:
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        finally:
            ended.set()

    async def stream(request: Request) -> Any:
        return endless

    app = GuardedApp(HASTY, stream=stream)
    with served(app.app, app.traffic, HASTY) as running, running.connect(receive_bytes=4096) as client:
        client.sendall(request("/stream", b"{}"))
        assert ended.wait(GUARD)
        read_to_the_end(client)  # which ends, although the stream does not
        assert ask(running, request("/echo", b'"next"')) == (200, "next")
    assert app.traffic.taken == 0


def test_client_of_http_1_0_gets_no_chunks() -> None:
    """A stream ends where its connection does; an answer of known length says it."""

    async def pieces() -> AsyncIterator[bytes]:
        yield b"one "
        yield b"two"

    async def stream(request: Request) -> Any:
        return StreamingResponse(pieces())

    app = GuardedApp(HASTY, stream=stream)
    with served(app.app, app.traffic, HASTY) as running:
        with running.connect() as client:
            client.sendall(request("/stream", b"{}").replace(b"HTTP/1.1", b"HTTP/1.0"))
            head, _, body = read_to_the_end(client).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower()
        assert body == b"one two"
        assert ask(running, request("/echo", b'"whole"').replace(b"HTTP/1.1", b"HTTP/1.0")) == (200, "whole")


class Written(asyncio.Transport):
    """A transport that keeps what it is given."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed


@on_a_loop
async def test_write_buffer_joins_the_writes_of_one_turn_in_order() -> None:
    """Writes of one turn go out as one, in their order and before the end."""
    inner = Written()
    gathered = connections.WriteBuffer(inner, asyncio.get_running_loop())
    gathered.write(b"head ")
    gathered.write(b"body ")
    assert inner.writes == []
    await asyncio.sleep(0)
    assert inner.writes == [b"head body "]
    much = b"x" * connections.MOST_GATHERED
    gathered.write(b"little ")
    gathered.write(much)
    assert inner.writes[1:] == [b"little " + much]
    gathered.write(b"last")
    gathered.close()
    assert (inner.writes[-1], gathered.is_closing()) == (b"last", True)
    gathered.write(b"too late")
    await asyncio.sleep(0)
    assert inner.writes[-1] == b"last"


def test_an_outlet_is_free_while_its_client_reads_and_only_then() -> None:
    found: dict[str, int] = {}
    ended = threading.Event()

    async def flood(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        outlet = scope["state"]["outlet"]
        found["pieces"] = 0
        while outlet.is_free and found["pieces"] < 10_000:
            outlet.write(b"x" * 65536)
            found["pieces"] += 1
        await send({"type": "http.response.body", "body": b"last", "more_body": False})
        found["free after its end"] = outlet.is_free
        ended.set()

    async def stream(request: Request) -> Any:
        return flood

    app = GuardedApp(GuardSettings(port=0), stream=stream)
    with served(app.app, app.traffic) as running, running.connect(receive_bytes=4096) as client:
        client.sendall(request("/stream", b"{}", Connection="close"))
        head = client.recv(1)
        answer = head + read_to_the_end(client)
        assert ended.wait(GUARD)
    assert 0 < found["pieces"] < 10_000
    assert not found["free after its end"]
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")  # what was sent before the first piece
    assert answer.count(b"x" * 65536) == found["pieces"]
    assert answer.endswith(b"4\r\nlast\r\n0\r\n\r\n")


REFUSED = {
    "by its head": request("/echo", b"{}", Content_Type="text/plain"),
    "by its length": request("/echo", b"", Content_Length="999999"),
    "for want of a route": request("/nowhere", method="GET"),
}


@pytest.mark.parametrize("refused", REFUSED)
def test_refused_request_leaves_no_garbage(refused: str) -> None:
    """A refused request leaves nothing for the garbage collector."""
    app = GuardedApp(HASTY)

    def num_left() -> int:
        return sum(isinstance(there, RequestResponseCycle) for there in gc.get_objects())

    with served(app.app, app.traffic, HASTY) as running:
        gc.collect()
        gc.disable()
        try:
            before = num_left()
            for _ in range(5):
                assert ask(running, REFUSED[refused])[0] >= 400
            with running.connect() as client:  # by whose answer the connections before it have ended
                client.sendall(request("/hello", method="GET"))
                assert read_answer(client)[0] == 200
                assert num_left() <= before + 2
        finally:
            gc.enable()


def test_ended_stream_leaves_no_garbage() -> None:
    """A stream that has ended leaves nothing for the garbage collector."""
    # What a collection finds it frees all at once, while every other stream waits.
    outlets: list[weakref.ref[Any]] = []

    async def stream(request: Request) -> Response:
        outlets.append(weakref.ref(request.scope["state"]["outlet"]))

        async def events() -> AsyncGenerator[bytes, None]:
            yield b"data: only\n\n"

        return EventStream(events(), ping_interval=15, form=OPENAI_FORM)

    app = GuardedApp(GuardSettings(port=0), stream=stream)
    gc.disable()
    try:
        with served(app.app, app.traffic) as running, running.connect() as client:
            client.sendall(request("/stream", b"{}"))
            data = b""
            while not data.endswith(b"0\r\n\r\n"):
                data += client.recv(65536)
            client.sendall(request("/echo", b'"next"'))
            assert read_answer(client) == (200, "next")
            assert [outlet() for outlet in outlets] == [None]
    finally:
        gc.enable()


# -- how it ends -----------------------------------------------------------------------------------------------------


class Held:
    """An app with a stream that waits in its middle until it is told to go on."""

    def __init__(self, settings: GuardSettings) -> None:
        self.go_on = asyncio.Event()
        self.settings = settings
        self.guarded = GuardedApp(settings, stream=self._stream)

    async def _stream(self, request: Request) -> Response:
        self.loop = asyncio.get_running_loop()

        async def events() -> AsyncIterator[bytes]:
            yield b"data: first\n\n"
            await self.go_on.wait()
            yield b"data: last\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    def begin(self, running: ServedApp) -> socket.socket:
        """A client that has read the first event."""
        client = running.connect()
        client.sendall(request("/stream", b"{}"))
        data = b""
        while b"data: first" not in data:
            data += client.recv(65536)
        return client


def test_drain_finishes_what_runs_and_refuses_what_is_new() -> None:
    """A drain finishes the answers that have begun, and answers 503 to new requests."""
    held = Held(GuardSettings(port=0))
    with served(held.guarded.app, held.guarded.traffic, held.settings) as running, held.begin(running) as client:
        running.server.drain("SIGTERM")
        status, body = ask(running, request("/echo", b"{}"))
        assert (status, body["error"]["code"]) == (503, "draining")
        assert ask(running, request("/health", method="GET"))[0] == 200  # the app's own; guards let it through
        held.loop.call_soon_threadsafe(held.go_on.set)
        assert b"data: last\n\n" in read_to_the_end(client)
        running.join()
    assert running.server.num_cut == 0
    assert running.said == ["SIGTERM: answers in progress have 30 seconds to end; a second signal ends them at once"]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that waits until what it has cut off has ended."""
    monkeypatch.setattr(running_server, "CUT_SECONDS", GUARD)


@pytest.mark.usefixtures("patient")
def test_drain_cut_stream_ends_with_an_error_and_done() -> None:
    """A stream that takes longer than a drain may ends with an error: it is not to be taken for whole."""
    held = Held(GuardSettings(port=0, drain_timeout=0.05))
    with served(held.guarded.app, held.guarded.traffic, held.settings) as running, held.begin(running) as client:
        running.server.drain()
        running.join()
        said = read_to_the_end(client)
    assert b"data: last" not in said
    assert b'"type":"server_error","param":null,"code":"draining"' in said
    assert said.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert running.server.num_cut == 1


@pytest.mark.usefixtures("patient")
def test_drain_cut_answer_is_a_503() -> None:
    """An answer of which nothing was sent before the end of a drain is a 503 with the code "draining"."""

    async def stuck(request: Request) -> Response:
        await asyncio.Event().wait()
        raise AssertionError

    settings = GuardSettings(port=0, drain_timeout=0)
    app = GuardedApp(settings, stuck=stuck)
    with served(app.app, app.traffic, settings) as running, running.connect() as client:
        client.sendall(request("/stuck", b"{}"))
        while not app.traffic.taken:
            pass
        running.server.drain()
        status, body = read_answer(client)
        running.join()
    assert (status, body["error"]["code"]) == (503, "draining")


def test_an_idle_server_ends_at_once() -> None:
    app = GuardedApp()
    with served(app.app, app.traffic) as running:
        running.server.drain()
        running.join()
    assert running.said == []


def test_bind_of_a_taken_port_fails_before_loading() -> None:
    """A port that is taken is reported before anything is loaded."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(FailedError, match=rf"cannot listen at http://127\.0\.0\.1:{port}: Address already in use"):
            bind(GuardSettings(port=port))


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_second_server_of_a_port_ends_by_its_name(loop: str) -> None:
    """Of two servers that load at the same time the second to listen says which address is taken."""
    with bind(GuardSettings(port=0)) as first:
        settings = GuardSettings(port=first.getsockname()[1])
        app = GuardedApp(settings)
        server = GuardedServer(app.app, settings, app.traffic, [].append)
        factory = asyncio.new_event_loop if loop == "asyncio" else server.config.get_loop_factory()
        with bind(settings) as second, asyncio.Runner(loop_factory=factory) as runner:
            first.listen()
            with pytest.raises(FailedError, match=rf"cannot listen at http://127\.0\.0\.1:{settings.port}: Address"):
                runner.run(server.serve([second]))


def crowded(most: int, **posted: Any) -> tuple[GuardedApp, GuardSettings]:
    settings = GuardSettings(port=0, max_connections=most)
    return GuardedApp(settings, **posted), settings


def test_excess_connection_replaces_the_one_idle_longest() -> None:
    """A connection beyond the limit takes the place of the one idle longest."""
    app, settings = crowded(2)
    with served(app.app, app.traffic, settings) as running:
        clients = []
        for _ in range(5):
            clients.append(running.connect())
            clients[-1].sendall(request("/echo", b"{}"))
            assert read_answer(clients[-1])[0] == 200
        assert [client.recv(1) for client in clients[:3]] == [b""] * 3, "these were ended"
        for client in clients[3:]:
            client.sendall(request("/echo", b"{}"))
            assert read_answer(client)[0] == 200
        for client in clients:
            client.close()


def test_a_connection_that_says_nothing_is_idle_too() -> None:
    app, settings = crowded(2)
    with served(app.app, app.traffic, settings) as running:
        silent = [running.connect() for _ in range(6)]
        assert ask(running, request("/echo", b"{}"))[0] == 200
        for one in silent:
            one.close()


def test_where_all_are_at_work_a_further_connection_is_refused() -> None:
    go = threading.Event()
    begun = threading.Semaphore(0)

    async def wait(request: Request) -> Response:
        begun.release()
        await asyncio.to_thread(go.wait, GUARD)
        return Response(b"{}", media_type="application/json")

    app, settings = crowded(2, wait=wait)
    with served(app.app, app.traffic, settings) as running:
        busy = [running.connect() for _ in range(2)]
        for client in busy:
            client.sendall(request("/wait", b"{}"))
            assert begun.acquire(timeout=GUARD)
        with running.connect() as client:
            answer = read_to_the_end(client)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in answer
        assert b'"code":"too_many_connections"' in answer
        go.set()
        for client in busy:
            assert read_answer(client)[0] == 200
        assert ask(running, request("/echo", b"{}"))[0] == 200  # in the place of one that is idle now
        for client in busy:
            client.close()


def test_connections_leave_half_of_the_files_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 4096))
    assert most_connections(GuardSettings(max_connections=1000)) == 50
    assert most_connections(GuardSettings(max_connections=30)) == 30
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert most_connections(GuardSettings(max_connections=1000)) == 1000
