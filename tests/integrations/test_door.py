"""A door before replicas: what clients see of a replica that dies, by when it dies, and of one that lives.
Replicas that die are pretended: they send what a real app has sent, and stop wherever a test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import httpx
import pytest

if TYPE_CHECKING:
    from starlette.types import Message, Scope

    from d3engine.integrations.proxy import Replica

PROMPT = "Question: Tom has 5 pens. Tom finds 3. How many pens does Tom have now?\nAnswer:"
ANSWER = " Adding 3 makes 5 + 3 = 8. #### 8"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 40},
    "/v1/messages": {"messages": [{"role": "user", "content": "Tom has 5 pens. How many?"}], "max_tokens": 12},
    "/v1/responses": {"input": "Tom has 5 pens. How many?", "max_output_tokens": 12},
}
LIMIT = 2**20


@pytest.fixture(scope="module")
def replica() -> Iterator[Replica]:
    from d3engine.integrations.proxy import Replica
    from d3engine.server.settings import ServerSettings

    engine_arguments = {"device": "cpu", "num_threads": 1, "kv_cache_memory_bytes": 2**24}
    replica = Replica("first", "demo", ServerSettings(model_names=("demo",)), engine_arguments)
    yield replica
    asyncio.run(replica.close())


class Asked:
    """`ask` of replicas of which the first ones die: each after it has passed on so many messages."""

    def __init__(self, replica: Replica, deaths: Sequence[int] = (), fault: Exception | None = None) -> None:
        self._replica = replica
        self._deaths = list(deaths)
        self._fault = fault
        self.num_asked = 0

    async def __call__(self, scope: Scope, body: bytes) -> AsyncGenerator[list[Message], None]:
        from d3engine.integrations.proxy import ReplicaDiedError

        self.num_asked += 1
        left = self._deaths.pop(0) if self._deaths else None
        async for messages in self._replica.answer(scope, body):
            for message in messages:
                if left == 0:
                    raise self._fault or ReplicaDiedError("killed")
                left = None if left is None else left - 1
                yield [message]


def ask_door(asked: Asked, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    """The answer of a door over those replicas."""
    from d3engine.integrations.proxy import Proxy

    async def ask_all(scope: Scope, body: bytes) -> list[tuple[str, list[Message]]]:
        first = await asked._replica.whole_answer(scope, body)
        return [first, ("second", first[1])]

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(Proxy(asked, ask_all, LIMIT))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await (client.post(path, json=body) if body else client.get(path))

    return asyncio.run(ask())


def events_of(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) if line != "[DONE]" else line for line in lines]


def test_a_replica_answers_through_the_door_as_a_server_does(replica: Replica) -> None:
    whole = ask_door(Asked(replica), **BODIES["/v1/completions"])
    assert (whole.status_code, whole.json()["choices"][0]["text"]) == (200, ANSWER)
    *events, done = events_of(ask_door(Asked(replica), **BODIES["/v1/completions"], stream=True))
    assert "".join(event["choices"][0]["text"] for event in events) == ANSWER
    assert done == "[DONE]"
    refused = ask_door(Asked(replica), prompt=3)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
    assert ask_door(Asked(replica), "/nowhere").status_code == 404
    assert ask_door(Asked(replica), prompt="a" * LIMIT).status_code == 400  # too long for the model, not for the door


def test_body_longer_than_allowed_is_refused_without_reading(replica: Replica) -> None:
    """A body longer than allowed is refused, although the proxy does not read it whole."""
    from d3engine.integrations.proxy import Proxy

    pieces = iter([b"[" * 1000] * 10)
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": next(pieces), "more_body": True}

    async def send(message: Message) -> None:
        sent.append(message)

    bodies: list[bytes] = []

    async def ask(scope: Scope, body: bytes) -> AsyncGenerator[list[Message], None]:
        bodies.append(body)
        yield [{"type": "http.response.start", "status": 413, "headers": []}]
        yield [{"type": "http.response.body", "body": b"too long"}]

    door = Proxy(ask, replica.whole_answer, max_body_bytes=1500)  # type: ignore[arg-type]  # not asked
    asyncio.run(door({"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}, receive, send))
    assert [len(body) for body in bodies] == [1501]
    assert len(list(pieces)) == 8
    assert [message.get("status") for message in sent] == [413, None]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("deaths", [(0,), (1,), (0, 1)], ids=str)
def test_request_of_one_that_dies_early_goes_to_another(
    replica: Replica, deaths: tuple[int, ...], stream: bool
) -> None:
    """A request whose replica dies before its first word goes to another."""
    asked = Asked(replica, deaths)
    answer = ask_door(asked, **BODIES["/v1/completions"], stream=stream)
    assert asked.num_asked == len(deaths) + 1
    assert answer.status_code == 200
    events = events_of(answer)[:-1] if stream else [answer.json()]
    assert "".join(event["choices"][0]["text"] for event in events) == ANSWER


def test_request_over_which_every_replica_dies_is_refused(replica: Replica) -> None:
    """A request over which every replica dies is refused in the end."""
    from d3engine.integrations.proxy import ATTEMPTS

    asked = Asked(replica, [0] * 9)
    answer = ask_door(asked, **BODIES["/v1/completions"])
    assert asked.num_asked == ATTEMPTS
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_died")
    assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize("path", BODIES)
def test_stream_that_breaks_off_ends_with_an_error_event(replica: Replica, path: str) -> None:
    """A stream that breaks off ends with an event that says so."""
    whole = events_of(ask_door(Asked(replica), path, **BODIES[path], stream=True))
    asked = Asked(replica, [2])  # its head, and the first piece of its body
    answer = ask_door(asked, path, **BODIES[path], stream=True)
    assert asked.num_asked == 1
    *events, last = events_of(answer)
    if path == "/v1/completions":
        assert last == "[DONE]"
        *events, last = events
    assert 0 < len(events) < len(whole)
    error = last if path == "/v1/responses" else last["error"]
    assert error["message"] == "The replica that wrote this answer has died; ask again."
    if path == "/v1/completions":
        assert error["code"] == "replica_died"
    else:
        assert last["type"] == "error"
    if path == "/v1/responses":
        assert [event["sequence_number"] for event in [*events, last]] == list(range(len(events) + 1))


def test_fault_of_the_proxy_is_an_error_that_shows_no_insides(replica: Replica) -> None:
    """A fault of the proxy itself is an error too, and shows nothing of its insides."""
    answer = ask_door(Asked(replica, [0], ValueError("secret")), **BODIES["/v1/completions"])
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "secret" not in answer.text


def test_metrics_are_those_of_all_replicas_each_under_its_name(replica: Replica) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    ask_door(Asked(replica), **BODIES["/v1/completions"])
    text = ask_door(Asked(replica), "/metrics").raise_for_status().text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert len(families) == text.count("# TYPE ")
    tokens = {sample.labels["replica"]: sample.value for sample in families["d3engine:generation_tokens"].samples}
    assert set(tokens) == {"first", "second"}
    assert tokens["first"] >= 12
    buckets = families["d3engine:step_seconds"].samples
    assert {sample.labels["replica"] for sample in buckets if "le" in sample.labels} == {"first", "second"}


def test_who_leaves_ends_the_request_of_the_replica(replica: Replica) -> None:
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "root_path": ""}
    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    body = json.dumps({"prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": True}).encode()

    async def leave() -> int:
        answer = replica.answer({**scope, "headers": headers}, body)
        await anext(answer)
        await answer.aclose()
        return (await replica._engine.stats()).num_running

    assert asyncio.run(leave()) == 0


def test_the_door_joins_a_body_once_however_small_its_pieces_are() -> None:
    from d3engine.integrations.proxy import _read

    class Piece(bytes):
        """Counts how often bytes that were read are copied together with it."""

        copied = 0

        def __radd__(self, before: bytes) -> bytes:
            Piece.copied += len(before)
            return bytes(before) + bytes(self)

    pieces = [Piece(b"ab") for _ in range(1000)]

    async def receive() -> Message:
        return {"type": "http.request", "body": pieces.pop(), "more_body": bool(pieces)}

    assert asyncio.run(_read(receive, 2001)) == b"ab" * 1000
    assert Piece.copied == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/metrics"])
def test_nothing_of_a_body_is_read_before_the_key_is_known(path: str) -> None:
    from d3engine.integrations.proxy import Proxy

    asked: list[bytes] = []
    sent: list[Message] = []

    async def receive() -> Message:
        asked.append(b"body")
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    async def ask(scope: Scope, body: bytes) -> AsyncGenerator[list[Message], None]:
        yield [{"type": "http.response.start", "status": 200, "headers": []}]
        yield [{"type": "http.response.body", "body": b"up 1\n"}]

    async def ask_all(scope: Scope, body: bytes) -> list[tuple[str, list[Message]]]:
        return [("one", [message async for messages in ask(scope, body) for message in messages])]

    door = Proxy(ask, ask_all, 1500, api_keys=["a-good-key"])
    for headers in ([], [(b"authorization", b"Bearer another")], [(b"authorization", b"Bearer a-good-key")]):
        scope = {"type": "http", "method": "POST", "path": f"/d3{path}", "root_path": "/d3", "headers": headers}
        asyncio.run(door(scope, receive, send))
    assert [message["status"] for message in sent if "status" in message] == [401, 401, 200]
    assert asked == [b"body"]
