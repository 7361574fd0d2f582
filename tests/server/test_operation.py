"""What operators ask: health that is true of an engine that hangs or has ended, readiness, metrics, version."""

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from demo_server import serving_demo
from prometheus_client.parser import text_string_to_metric_families

import d3engine
from d3engine import AsyncEngine, Engine
from d3engine.server import metrics as exposition
from d3engine.server.middleware.limits import AdmissionControl
from d3engine.server.middleware.settings import GuardSettings
from d3engine.server.state import health, readiness

PROMPT = {"model": "demo", "prompt": "Question: Tom has 5 pens.", "max_tokens": 3, "ignore_eos": True}


def heart(age: float, is_working: bool, error: str | None = None) -> Any:
    """A heartbeat that says what a test wants."""
    return SimpleNamespace(last_turn=1000.0 - age, is_working=is_working, error=error)


@pytest.mark.parametrize(
    ("beat", "status"),
    [
        (heart(9999, False), "ok"),
        (heart(0, True), "ok"),
        (heart(60, True), "ok"),
        (heart(61, True), "hung"),
        (heart(0, False, "a fault"), "dead"),
        (heart(9999, True, "a fault"), "dead"),
    ],
)
def test_an_engine_hangs_when_somebody_waits_and_no_step_ends(beat: Any, status: str) -> None:
    assert health(beat, AdmissionControl(1), 60, now=1000.0).status == status


def test_full_queue_is_healthy_unready_and_a_drain_is_neither() -> None:
    """A full queue is healthy but not ready, and a drain is neither."""
    traffic = AdmissionControl(1)
    with traffic.place():
        found = health(heart(0, True), traffic, 60, now=1000.0)
        assert (found.status, readiness(found, traffic).status) == ("ok", "full")
    assert readiness(found, traffic).status == "ok"
    traffic.is_draining = True
    found = health(heart(0, True), traffic, 60, now=1000.0)
    assert (found.status, readiness(found, traffic).status) == ("draining", "draining")


class Stepping:
    """An engine whose steps wait, or fail, when a test says so."""

    def __init__(self, engine: Engine) -> None:
        self.goes = threading.Event()
        self.goes.set()
        self.fault: Exception | None = None
        self.client = AsyncEngine.from_engine(engine, before_step=self._before_step)

    def _before_step(self) -> None:
        assert self.goes.wait(60)
        if self.fault is not None:
            raise self.fault


@pytest.fixture
def stepping() -> Iterator[Stepping]:
    found = Stepping(Engine("demo", device="cpu", kv_cache_memory_bytes=2**22))
    yield found
    found.goes.set()
    asyncio.run(found.client.close())


@pytest.fixture
def asks(stepping: Stepping) -> Iterator[Callable[..., httpx.Response]]:
    """`asks(method, path, body)` of a server over that engine, which is hung after an instant without a step."""
    guards = GuardSettings(health_stall_seconds=1e-6)
    with serving_demo(stepping.client, guards=guards) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield lambda method, path, body=None: client.request(method, path, json=body)


def test_health_tells_an_engine_that_hangs_or_ended(stepping: Stepping, asks: Callable[..., httpx.Response]) -> None:
    """Health reports an engine that hangs, and one that has ended."""
    assert asks("GET", "/health").status_code == 200
    stepping.goes.clear()
    waiting: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: waiting.append(asks("POST", "/v1/completions", PROMPT)))
    thread.start()
    while (hung := asks("GET", "/health")).status_code == 200:
        pass
    assert (hung.status_code, hung.json()["status"]) == (503, "hung")
    assert "no step has ended" in hung.json()["reason"]
    assert asks("GET", "/ready").status_code == 503
    stepping.fault = RuntimeError("/a/secret/path")
    stepping.goes.set()
    thread.join(60)
    assert (waiting[0].status_code, waiting[0].json()["error"]["code"]) == (503, "engine_dead")
    dead = asks("GET", "/health")
    assert (dead.status_code, dead.json()["status"]) == (503, "dead")
    assert "secret" not in dead.text
    metrics = asks("GET", "/metrics")
    assert "d3engine:engine_up 0.0" in metrics.text
    assert asks("POST", "/v1/completions", PROMPT).status_code == 503


def test_metrics_come_while_the_engine_hangs(
    stepping: Stepping, asks: Callable[..., httpx.Response], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exposition, "STATS_SECONDS", 0.05)
    stepping.goes.clear()
    thread = threading.Thread(target=lambda: asks("POST", "/v1/completions", PROMPT))
    thread.start()
    while asks("GET", "/health").status_code == 200:
        pass
    assert "d3engine:num_requests_in_flight 1.0" in asks("GET", "/metrics").text
    stepping.goes.set()
    thread.join(60)


# -- metrics ---------------------------------------------------------------------------------------------------------


def values(http: httpx.Client) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of /metrics, as Prometheus' own parser reads it."""
    families = list(text_string_to_metric_families(http.get("/metrics").text))
    assert all(family.documentation.endswith(".") for family in families)
    samples = [sample for family in families for sample in family.samples]
    assert all(one.name.startswith("d3engine:") for one in samples)
    found = {(one.name.removeprefix("d3engine:"), tuple(sorted(one.labels.items()))): one.value for one in samples}
    assert len(found) == len(samples), "a sample stands twice"
    return found


def grown(http: httpx.Client, ask: Callable[[], object]) -> Callable[..., float]:
    """`of(name, label=value)`: by how much a sample grew while something was asked."""
    before = values(http)
    ask()
    after = values(http)
    assert set(after) >= set(before)
    return lambda name, **labels: after[name, tuple(labels.items())] - before[name, tuple(labels.items())]


def test_request_is_counted_once_in_each_of_its_metrics(http: httpx.Client) -> None:
    """A request is counted once in every metric that it belongs to."""
    two = PROMPT | {"n": 2, "max_tokens": 4, "temperature": 1}
    of = grown(http, lambda: http.post("/v1/completions", json=two).raise_for_status())
    assert of("request_success_total", finished_reason="length") == 2
    assert of("generation_tokens_total") == of("request_generation_tokens_sum") == 8
    assert of("request_generation_tokens_count") == of("e2e_request_latency_seconds_count") == 1
    assert of("time_to_first_token_seconds_count") == of("request_queue_time_seconds_count") == 1
    assert of("prompt_tokens_total") >= of("request_prompt_tokens_sum") > 0
    assert of("http_requests_total", route="/v1/completions", status="2xx") == 1
    assert of("step_seconds_count") == of("engine_steps_total") > 0


def test_metrics_have_layers_run_and_those_of_full_depth(http: httpx.Client) -> None:
    """The saving is the ratio of layers run and layers of full depth."""
    of = grown(http, lambda: http.post("/v1/completions", json=PROMPT | {"max_tokens": 8}))
    run, full = of("layers_run_total", policy="default"), of("layers_full_total", policy="default")
    assert full == 8 * 16
    assert run == of("token_layers_sum") < full
    assert of("token_layers_count") == 8
    of = grown(http, lambda: http.post("/v1/completions", json=PROMPT | {"depth": "full"}))
    assert of("layers_run_total", policy="full") == of("layers_full_total", policy="full") == 3 * 16
    other = {"policy": "d3", "alpha": 0.5, "start": 0.5}
    of = grown(http, lambda: http.post("/v1/completions", json=PROMPT | {"depth": other}))
    assert of("layers_full_total", policy="other") == 3 * 16


def test_a_stream_is_counted_token_by_token(http: httpx.Client) -> None:
    def stream() -> None:
        body = PROMPT | {"stream": True, "max_tokens": 120, "ignore_eos": True}  # too many to be merged into one event
        http.post("/v1/completions", json=body).raise_for_status()

    for _ in range(10):  # on a loaded machine all tokens may come at once, with no time between them
        of = grown(http, stream)
        if of("inter_token_latency_seconds_count"):
            break
    assert of("request_generation_tokens_sum") == 120
    assert 0 < of("inter_token_latency_seconds_count") <= 119
    assert of("request_time_per_output_token_seconds_count") == 1


def test_no_client_can_make_the_metrics_grow(http: httpx.Client) -> None:
    """Row 16 of the security list: every label has a closed set of values."""
    before = set(values(http))
    for number in range(5):
        http.get(f"/no/such/route/{number}")
        http.request(f"METHOD{number}", "/v1/models")
        http.post("/v1/completions", json=PROMPT | {"model": f"model-{number}"})
        depth = {"policy": "d3", "alpha": 0.5 + number / 100, "start": 0.5}
        http.post("/v1/completions", json=PROMPT | {"depth": depth})
        http.get("/v1/models", headers={"X-Request-Id": f"id-{number}"})
    assert set(values(http)) == before


def test_refusals_are_counted_by_their_reason(http: httpx.Client) -> None:
    of = grown(http, lambda: http.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"}))
    assert of("admission_rejections_total", reason="unsupported_media_type") == 1
    assert of("http_requests_total", route="/v1/completions", status="4xx") == 1


def test_the_dashboard_shows_metrics_that_there_are(http: httpx.Client) -> None:
    page = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
    asked = [target["expr"] for panel in page["panels"] for target in panel.get("targets", ())]
    named = {name for text in asked for name in re.findall(r"d3engine:(\w+)", text)}
    assert len(named) > 10
    assert named <= {name for name, _ in values(http)}


def test_the_version_is_the_packages(http: httpx.Client) -> None:
    assert http.get("/version").json() == {"version": d3engine.__version__}
