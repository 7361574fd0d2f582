"""The room of a server: what a request takes of it, and what it is told when it does not fit."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from demo_server import demo_engine
from serving import serving
from starlette.applications import Starlette

from d3engine import AsyncEngine
from d3engine.server.app import create_app
from d3engine.server.middleware.limits import AdmissionControl
from d3engine.server.middleware.settings import GuardSettings
from d3engine.server.settings import ServerSettings

SAMPLED: dict[str, Any] = {"max_tokens": 2, "temperature": 1, "seed": 1}
COMPLETION = {"prompt": "Tom has", **SAMPLED}
CHAT = {"messages": [{"role": "user", "content": "Tom has 5 pens."}], **SAMPLED}


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    with demo_engine(kv_cache_memory_bytes=2**22, max_num_seqs=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def app(engine: AsyncEngine) -> Starlette:
    """With room for two sequences that run and two that wait."""
    return create_app(engine, ServerSettings(model_names=("demo",), guards=GuardSettings(max_queue=2)))


@pytest.fixture(scope="module")
def small(app: Starlette) -> Iterator[httpx.Client]:
    """A client of that app."""
    with serving(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def empty(app: Starlette, small: httpx.Client) -> AdmissionControl:
    """The app's places, once the last request has left."""
    traffic: AdmissionControl = app.state.traffic
    while traffic.taken:
        small.get("/version")
    return traffic


@pytest.mark.parametrize(
    ("path", "body", "sequences"),
    [
        ("/v1/completions", COMPLETION, 1),
        ("/v1/completions", COMPLETION | {"n": 4}, 4),
        ("/v1/completions", COMPLETION | {"prompt": ["Tom", "Ann"], "n": 2}, 4),
        ("/v1/completions", COMPLETION | {"best_of": 3}, 3),
        ("/v1/completions", COMPLETION | {"n": 3, "stream": True}, 3),
        ("/v1/chat/completions", CHAT | {"n": 2}, 2),
    ],
    ids=str,
)
def test_a_request_takes_room_for_all_its_sequences(
    app: Starlette, small: httpx.Client, path: str, body: dict[str, Any], sequences: int
) -> None:
    """Row 4 of the security list: what one request may set in motion is bounded, however it is written."""
    with empty(app, small).place() as others:
        others.take(4 - sequences)  # one too many
        full = small.post(path, json=body)
        assert (full.status_code, full.headers["retry-after"]) == (429, "1")
        assert full.json()["error"]["code"] == "queue_full"
        others.leave()
        others.take(4 - sequences)
        assert small.post(path, json=body).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", COMPLETION | {"n": 2}),
        ("/v1/completions", COMPLETION | {"prompt": ["Tom", "Ann"], "add_special_tokens": False}),
        ("/v1/chat/completions", CHAT | {"n": 2}),
    ],
    ids=str,
)
def test_nothing_is_read_of_a_request_that_finds_no_room(
    app: Starlette,
    engine: AsyncEngine,
    small: httpx.Client,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
) -> None:
    """Templates and tokenizers are where a refused request could cost most."""

    async def read(*asked: Any, **more: Any) -> Any:
        raise AssertionError("a request was read that has no place")

    assert engine.tokenizer is not None
    monkeypatch.setattr(engine, "prepare", read)
    monkeypatch.setattr(engine, "chat_prompt", read)
    monkeypatch.setattr(type(engine.tokenizer), "encode", read)
    with empty(app, small).place() as others:
        others.take(2)
        assert small.post(path, json=body).status_code == 429


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/completions", COMPLETION | {"n": 5}, "n must be at most 4 answers per prompt, since"),
        ("/v1/completions", COMPLETION | {"best_of": 5}, "best_of must be at most 4 answers per prompt, since"),
        ("/v1/completions", COMPLETION | {"prompt": ["a"] * 5}, "prompt must be at most 4 prompts, since"),
        ("/v1/completions", COMPLETION | {"prompt": ["a"] * 3, "n": 2}, "prompt must be at most 2 prompts, since"),
        ("/v1/chat/completions", CHAT | {"n": 5, "stream": True}, "n must be at most 4 answers per prompt, since"),
    ],
    ids=str,
)
def test_request_larger_than_the_room_is_refused_by_its_field(
    small: httpx.Client, path: str, body: dict[str, Any], message: str
) -> None:
    """A request larger than all of the room is refused by its field, without Retry-After."""
    answer = small.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "too_many_sequences", message.split()[0])
    assert error["message"].startswith(message)
    assert "the server has room for 4 sequences" in error["message"]
    assert "retry-after" not in answer.headers
