"""Sleep and wake over HTTP: the server gives the memory of a model back, and loads it for the next request."""

import asyncio
import gc
import json
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
import pytest
from serving import serving

from d3engine import AsyncEngine, Engine
from d3engine.errors import FailedError
from d3engine.server.app import create_app
from d3engine.server.middleware.settings import GuardSettings
from d3engine.server.models import FurtherModels
from d3engine.server.settings import ServerSettings
from d3engine.utils.garbage import freeze_loaded

CACHE_BYTES = 2**29
BODY: dict[str, Any] = {"prompt": "Tom has 5 pens.", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
LONG = BODY | {"max_tokens": 400, "stream": True}


class Starts:
    """Counts the starts of an engine, and lets them fail."""

    def __init__(self, engine: AsyncEngine) -> None:
        assert engine._restart is not None
        self._restart = engine._restart
        self.count = 0
        self.fault: Exception | None = None
        engine._restart = self

    def __call__(self) -> Any:
        self.count += 1
        if self.fault is not None:
            raise self.fault
        return self._restart()


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    engine = AsyncEngine("demo", device="cpu", kv_cache_memory_bytes=CACHE_BYTES)
    yield engine
    asyncio.run(engine.close())
    gc.unfreeze()


@pytest.fixture(scope="module")
def starts(engine: AsyncEngine) -> Starts:
    return Starts(engine)


@contextmanager
def served(engine: AsyncEngine, ttl: float | None = None, **settings: Any) -> Iterator[httpx.Client]:
    """A client of a server that may put this engine to sleep."""
    options = ServerSettings(**{"model_names": ("demo", "other-name"), "enable_sleep_mode": True, **settings})
    app = create_app(engine, options, lambda first: FurtherModels((), first, ttl=ttl))
    with serving(app) as url, httpx.Client(base_url=url, timeout=120) as http:
        yield http


@pytest.fixture
def http(engine: AsyncEngine, starts: Starts) -> Iterator[httpx.Client]:
    """Of an engine that is awake when a test begins."""
    starts.fault = None
    asyncio.run(engine.wake_up())
    starts.count = 0
    with served(engine) as http:
        yield http


def is_sleeping(http: httpx.Client) -> bool:
    found: bool = http.get("/is_sleeping").json()["is_sleeping"]
    return found


def test_sleep_frees_memory_and_a_request_wakes(engine: AsyncEngine, http: httpx.Client, starts: Starts) -> None:
    """Weights and KV cache are gone, though frozen as loaded; the next answer is to the bit what it was."""
    asked = BODY | {"logprobs": 3, "return_token_ids": True}
    before = http.post("/v1/completions", json=asked).json()
    held = psutil.Process().memory_info().vms
    executor = weakref.ref(engine._front.executor)  # type: ignore[union-attr]
    freeze_loaded()
    slept = http.post("/sleep?level=1")
    assert (slept.status_code, slept.json()) == (200, {"is_sleeping": True})
    assert held - psutil.Process().memory_info().vms > CACHE_BYTES // 2
    assert executor() is None
    assert is_sleeping(http)
    after = http.post("/v1/completions", json=asked).json()
    assert after["choices"] == before["choices"]
    assert not is_sleeping(http)
    assert starts.count == 1


def test_a_sleeping_server_says_what_it_is(http: httpx.Client, starts: Starts) -> None:
    """Health, metrics, models and templates are told without waking the model."""
    http.post("/v1/completions", json=BODY)
    awake = http.get("/metrics").text
    http.post("/sleep")
    for path in ("/health", "/ready", "/v1/models", "/props", "/slots", "/tokenizer_info", "/api/tags"):
        assert http.get(path).status_code == 200, path
    assert http.get("/api/ps").json() == {"models": []}
    asleep = http.get("/metrics").text
    for state, values in (("awake", (1.0, 0.0)), ("weights_offloaded", (0.0, 0.0)), ("discard_all", (0.0, 1.0))):
        line = f'd3engine:engine_sleep_state{{sleep_state="{state}"}}'
        assert (f"{line} {values[0]}" in awake, f"{line} {values[1]}" in asleep) == (True, True)
    assert "d3engine:engine_up 1.0" in asleep
    told = [line for line in awake.splitlines() if line.startswith("d3engine:generation_tokens_total")]
    assert told
    assert told[0] in asleep.splitlines()
    assert is_sleeping(http)
    assert starts.count == 0


def test_sleep_lets_requests_in_progress_end(http: httpx.Client, starts: Starts) -> None:
    """A stream goes on to its end, and a request that comes during the wait is answered by the woken model."""
    expected = http.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
    with ThreadPoolExecutor(2) as pool:
        with http.stream("POST", "/v1/completions", json=LONG) as stream:
            lines = stream.iter_lines()
            events = [next(lines)]
            asleep = pool.submit(http.post, "/sleep")
            while not (asleep.done() or "num_requests_in_flight 2.0" in http.get("/metrics").text):
                pass
            later = pool.submit(http.post, "/v1/completions", json=BODY)
            events += lines
        chunks = [json.loads(line[6:]) for line in events if "{" in line]
        assert asleep.result().status_code == 200
        assert later.result().json()["choices"][0]["text"] == expected
    assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]][-1] == "length"
    assert starts.count == 1


def test_requests_at_once_load_a_sleeping_model_once(http: httpx.Client, starts: Starts) -> None:
    """Several requests and a wake-up wait for the same loading."""
    http.post("/sleep")
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(http.post, "/v1/completions", json=BODY) for _ in range(3)]
        woken = pool.submit(http.post, "/wake_up?model=other-name")
        assert len({one.result().json()["choices"][0]["text"] for one in asked}) == 1
    assert (woken.result().status_code, woken.result().json()) == (200, {"is_sleeping": False})
    assert starts.count == 1


@pytest.mark.parametrize("name", ["unknown", "demo:old", ""])
def test_an_unknown_model_is_refused_by_its_name(http: httpx.Client, starts: Starts, name: str) -> None:
    """A request that names none of the server's models wakes nothing."""
    for method, path in (("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")):
        answer = http.request(method, path, params={"model": name})
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")
        assert repr(name) in answer.json()["error"]["message"]
    http.post("/sleep")
    assert http.post("/v1/completions", json=BODY | {"model": name}).status_code == 404
    assert is_sleeping(http)
    assert starts.count == 0


@pytest.mark.parametrize(
    ("query", "field"), [("/sleep?level=2", "level"), ("/sleep?mode=abort", "mode"), ("/wake_up?tags=weights", "tags")]
)
def test_what_cannot_be_honoured_is_refused_by_name(http: httpx.Client, query: str, field: str) -> None:
    """vLLM's other levels, modes and tags."""
    answer = http.post(query)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert not is_sleeping(http)


@pytest.mark.parametrize("fault", [FailedError("at /a/secret/path"), MemoryError(), RuntimeError("CUDA out of memory")])
def test_a_model_that_cannot_be_woken_is_an_error(http: httpx.Client, starts: Starts, fault: Exception) -> None:
    """Requests learn it, and the next one tries again."""
    http.post("/sleep")
    starts.fault = fault
    for path, asked in (("/v1/completions", {"json": BODY}), ("/wake_up", {})):
        answer: httpx.Response = http.post(path, **asked)  # type: ignore[arg-type]
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_not_loaded")
        assert "secret" not in answer.text
    assert is_sleeping(http)
    starts.fault = None
    assert http.post("/v1/completions", json=BODY).status_code == 200


def test_sleep_takes_permission_a_key_and_no_other_origin(engine: AsyncEngine, starts: Starts) -> None:
    """The owner allows it by an option; a web page elsewhere may not ask for it."""
    asyncio.run(engine.wake_up())
    with served(engine, enable_sleep_mode=False) as http:
        for path in ("/sleep", "/wake_up"):
            answer = http.post(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "sleep_not_allowed")
        assert not is_sleeping(http)
    guards = GuardSettings(api_keys=("a-key-of-mine",), allowed_origins=("https://friend.example",))
    with served(engine, guards=guards) as http:
        assert http.post("/sleep").status_code == 401
        http.headers["x-api-key"] = "a-key-of-mine"
        answer = http.post("/sleep", headers={"Origin": "https://elsewhere.example"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
        assert not is_sleeping(http)
        for origin in ("https://friend.example", str(http.base_url).rstrip("/")):
            assert http.post("/wake_up", headers={"Origin": origin}).status_code == 200


@pytest.mark.usefixtures("starts")
def test_an_idle_model_falls_asleep_by_itself(engine: AsyncEngine) -> None:
    """With a time to live, after each request."""
    asyncio.run(engine.wake_up())
    with served(engine, ttl=1e-6) as http:
        found = set()
        for _ in range(2):
            found.add(http.post("/v1/completions", json=BODY).json()["choices"][0]["text"])
            while not is_sleeping(http):
                pass
        assert len(found) == 1


def test_a_dead_engine_stays_dead() -> None:
    """A fault is not slept away: requests and health go on telling it."""
    engine = Engine("demo", device="cpu", kv_cache_memory_bytes=2**24)
    dead = AsyncEngine.from_engine(engine, before_step=lambda: 1 / 0)
    dead._restart = lambda: pytest.fail("a dead engine was started again")
    try:
        with served(dead) as http:
            assert http.post("/v1/completions", json=BODY).json()["error"]["code"] == "engine_dead"
            assert http.post("/sleep").status_code == 503
            assert http.post("/v1/completions", json=BODY).json()["error"]["code"] == "engine_dead"
            assert http.get("/health").status_code == 503
    finally:
        asyncio.run(dead.close())
