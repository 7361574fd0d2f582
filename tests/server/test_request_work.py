"""What one request asks for is counted before any of it is done, refused by name, and ends with its client."""

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from demo_server import LEAST, TURNS, demo_engine
from loops import on_a_loop

from d3engine import AsyncEngine
from d3engine.errors import InvalidValueError
from d3engine.request.params import SamplingParams
from d3engine.server.app import ROUTES, create_app
from d3engine.server.in_process import post, scope_of, whole
from d3engine.server.middleware.settings import GuardSettings
from d3engine.server.routes.openapi import description
from d3engine.server.settings import ServerSettings
from d3engine.text import chat_template as chat_prompts

MOST = 4096
WORDS = ["w" * 100] * 20


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    with demo_engine(kv_cache_memory_bytes=2**23) as engine:
        yield engine


class Asked:
    """An app over an engine, whose prompts and texts are noted as they are read."""

    def __init__(self, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        guards = {"max_request_work": MOST, "allowed_hosts": ("*",)} | settings.pop("guards", {})
        self.app = create_app(engine, ServerSettings(model_names=("demo",), guards=GuardSettings(**guards), **settings))
        self.prepared: list[Any] = []
        self.generated: list[Any] = []
        prepare, generate = engine.prepare, engine.generate

        async def noted(prompt: Any, *arguments: Any, **named: Any) -> Any:
            self.prepared.append(prompt)
            return await prepare(prompt, *arguments, **named)

        def begun(prepared: Any) -> Any:
            self.generated.append(prepared)
            return generate(prepared)

        monkeypatch.setattr(engine, "prepare", noted)
        monkeypatch.setattr(engine, "generate", begun)

    def post(self, path: str = "/v1/completions", **body: Any) -> tuple[int, dict[str, Any]]:
        answered = asyncio.run(post(self.app, path, json.dumps(LEAST.get(path, {}) | body).encode()))
        return answered.status, json.loads(answered.body)


@pytest.fixture
def asked(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Asked]:
    return lambda **settings: Asked(engine, monkeypatch, **settings)


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("prompt", {"prompt": ["a" * 2000, "b" * 2100]}),
        ("prompt", {"prompt": [5] * 900, "stop": ["x" * 1000] * 4, "max_tokens": 1}),
        *(
            ("bad_words", {"bad_words": WORDS} | three)
            for three in ({"n": 3, "temperature": 1}, {"best_of": 3, "temperature": 1}, {"prompt": ["a", "b", "c"]})
        ),
        ("allowed_token_ids", {"allowed_token_ids": list(range(700)), "prompt": ["a"] * 6}),
        ("allowed_token_ids", {"allowed_token_ids": list(range(700)) * 6}),
        ("logit_bias", {"logit_bias": {str(token): 1 for token in range(700)}, "n": 6, "temperature": 1}),
        ("stop", {"stop": ["s" * 1000] * 3, "n": 2, "temperature": 1}),
        ("stop", {"stop": "s" * 1000, "n": 5, "temperature": 1}),
        ("stop_token_ids", {"stop_token_ids": [7] * 256, "prompt": ["a"] * 17}),
    ],
)
def test_request_work_beyond_the_bound_is_refused_by_field(
    asked: Callable[..., Asked], field: str, body: dict[str, Any]
) -> None:
    """More work than a request may ask for is refused by its field."""
    app = asked()
    status, answer = app.post(**body)
    if "stop" in body and field == "prompt":
        field = "stop"  # which asks for more than the prompt does
    assert (status, answer["error"]["param"]) == (400, field)
    assert f"{field} must be part of a request of at most {MOST} characters" in answer["error"]["message"]
    assert app.prepared == [], "nothing of it was read"


def test_work_up_to_the_bound_is_done(asked: Callable[..., Asked]) -> None:
    app = asked()
    words = ["w" * 100] * 10
    assert app.post(bad_words=words, n=4, temperature=1)[0] == 200
    assert app.post(allowed_token_ids=list(range(200)), prompt=["a"] * 20)[0] == 200
    assert app.post(allowed_token_ids=list(range(203)), prompt=["a"] * 20)[0] == 200
    assert app.post(allowed_token_ids=list(range(204)), prompt=["a"] * 20)[0] == 400


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_conversation_counts_with_its_body(asked: Callable[..., Asked], path: str) -> None:
    app = asked()
    long = {"role": "user", "content": "Tom " * 1200}
    status, answer = app.post(path, **({"input": [long]} if path == "/v1/responses" else {"messages": [long]}))
    assert status == 400
    assert "max_request_work" in answer["error"]["message"]
    assert app.prepared == []


def test_a_body_is_the_bound_unless_another_is_set(asked: Callable[..., Asked]) -> None:
    app = asked(guards={"max_request_work": None, "max_body_bytes": 2048})
    assert app.post(bad_words=["w" * 500], n=3, temperature=1)[0] == 200
    status, answer = app.post(bad_words=["w" * 500], n=5, temperature=1)
    assert (status, answer["error"]["param"]) == (400, "bad_words")


@pytest.mark.parametrize("path", LEAST)
def test_priority_takes_permission(asked: Callable[..., Asked], engine: AsyncEngine, path: str) -> None:
    app = asked()
    status, answer = app.post(path, priority=-1)
    message = answer["error"]["message"]
    assert status == 400
    assert message == "priority must be 0 or more, since this server lets no request run before others; got -1."
    assert app.prepared == []
    prepared = asyncio.run(engine.prepare("Tom", SamplingParams(max_tokens=1), priority=-7))
    assert prepared.priority == -7, "a program that has the engine needs none"
    assert app.post(path, priority=2)[0] == 200
    assert app.generated[-1].priority == 2
    allowing = asked(allow_priority=True)
    assert allowing.post(path, priority=-1)[0] == 200
    assert allowing.generated[-1].priority == -1


def test_openapi_says_which_priorities_there_are(asked: Callable[..., Asked]) -> None:
    for allow, bounds in ((False, (0, 2**31 - 1)), (True, (-(2**31), 2**31 - 1))):
        schemas = description(ROUTES, asked(allow_priority=allow).app.state.served)["components"]["schemas"]
        for name in ("CompletionRequest", "ChatRequest", "ResponsesRequest", "MessagesRequest"):
            integer = next(kind for kind in schemas[name]["properties"]["priority"]["anyOf"] if "minimum" in kind)
            assert (integer["minimum"], integer["maximum"]) == bounds


def test_a_long_body_that_was_refused_is_not_read_again(asked: Callable[..., Asked]) -> None:
    app = asked(guards={"max_request_work": None})
    tokens = [5] * 40_000
    first = app.post(prompt=["a b c " * 12_000])
    assert first[0] == 400
    assert len(app.prepared) == 1
    assert app.post(prompt=["a b c " * 12_000]) == first
    assert len(app.prepared) == 1
    assert app.post(prompt=["a b d " * 12_000])[0] == 400
    assert len(app.prepared) == 2
    for _ in range(2):  # whereas what is answered is answered again
        assert app.post(allowed_token_ids=tokens)[0] == 200
    assert len(app.prepared) == 4


def test_prompts_behind_one_that_is_refused_are_not_read(asked: Callable[..., Asked]) -> None:
    app = asked(guards={"max_request_work": None})
    assert app.post(prompt=["a", "b " * 5000, "c", "d"])[0] == 400
    assert [prompt[:1] for prompt in app.prepared] == ["a", "b"]


@on_a_loop
async def test_nothing_more_is_read_for_a_client_that_has_left(
    asked: Callable[..., Asked], engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = asked()
    body = json.dumps({"prompt": ["a", "b", "c"], "max_tokens": 1}).encode()
    begun, left, prepare = asyncio.Event(), asyncio.Event(), engine.prepare

    async def slow(prompt: Any, *arguments: Any, **named: Any) -> Any:
        found = await prepare(prompt, *arguments, **named)
        if prompt == "b":
            begun.set()
            await asyncio.Event().wait()
        return found

    monkeypatch.setattr(engine, "prepare", slow)
    unread, sent = [{"type": "http.request", "body": body, "more_body": False}], []

    async def receive() -> Any:
        if not unread:
            await left.wait()
            return {"type": "http.disconnect"}
        return unread.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    running = asyncio.create_task(app.app(scope_of("/v1/completions", len(body)), receive, send))
    await begun.wait()
    left.set()
    await running
    assert app.app.state.traffic.taken == 0
    assert sent[0]["status"] == 499
    assert app.prepared == ["a", "b"]
    assert app.generated == []


def test_prompts_of_a_request_and_requests_of_a_key_take_turns(asked: Callable[..., Asked]) -> None:
    """Prompts of a request take turns as one, and so do requests of a key."""
    app = asked()
    for _ in range(2):
        assert app.post(prompt=["a", "b"])[0] == 200
    flows = [prepared.flow for prepared in app.generated]
    assert flows[0] == flows[1] != flows[2] == flows[3]
    assert {key for key, _ in flows} == {""}

    keyed = asked(guards={"api_keys": ("first-key", "second-key")})
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()

    async def post_with(key: bytes) -> None:
        scope = scope_of("/v1/completions", len(body))
        scope["headers"].append((b"authorization", b"Bearer " + key))

        async def send(message: Any) -> None:
            assert message.get("status", 200) == 200

        await keyed.app(scope, whole(body), send)

    for key in (b"first-key", b"first-key", b"second-key"):
        asyncio.run(post_with(key))
    first, again, other = [prepared.flow for prepared in keyed.generated]
    assert first[0] == again[0] != other[0]
    assert len({first[1], again[1], other[1]}) == 3
    assert "first-key" not in first[0]


def test_rules_are_made_once_for_all_prompts_of_a_request(asked: Callable[..., Asked]) -> None:
    app = asked()
    assert app.post(prompt=["a", "b", "c"], bad_words=["pens"], allowed_token_ids=list(range(300)))[0] == 200
    assert len({id(prepared.rules) for prepared in app.generated}) == 1
    assert app.generated[0].rules.bad_words


OPENS: list[str] = []
_is_watching = threading.Event()


def _watch(event: str, arguments: Any) -> None:
    if _is_watching.is_set() and event in ("open", "subprocess.Popen", "os.listdir", "os.scandir"):
        OPENS.append(f"{event} {arguments[0]}")


def test_no_file_is_opened_for_a_request(asked: Callable[..., Asked], engine: AsyncEngine) -> None:
    """A process that may open no further one (EMFILE) goes on to answer its clients."""
    app = asked()
    asyncio.run(engine.chat_template())
    for path in LEAST:
        assert app.post(path)[0] == 200
    sys.addaudithook(_watch)
    OPENS.clear()
    _is_watching.set()
    try:
        with open(__file__, encoding="utf-8"):
            assert len(OPENS) == 1, "opened files are seen"
        OPENS.clear()
        for path in LEAST:
            assert app.post(path)[0] == 200
        assert app.post("/tokenize", messages=TURNS)[0] == 200
        assert app.post("/tokenize", prompt="Tom")[0] == 200
        assert app.post("/detokenize", tokens=[5])[0] == 200
        assert app.post("/v1/messages/count_tokens", messages=TURNS)[0] == 200
    finally:
        _is_watching.clear()
    assert OPENS == []


def test_a_model_without_a_template_is_looked_at_once(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Any] = []

    def load(directory: Any) -> None:
        reads.append(directory)

    monkeypatch.setattr(chat_prompts, "load_chat_template", load)
    prompts = chat_prompts.ChatPrompts(tmp_path, object())  # type: ignore[arg-type]
    for _ in range(3):
        with pytest.raises(InvalidValueError, match="has no chat template"):
            prompts.token_ids(TURNS)
    assert len(reads) == 1
