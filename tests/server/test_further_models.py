"""Several models of one server: loaded when a request names one, in a room that may be too small for all."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from invoking import refused, succeed
from serving import serving
from tiny_models import save_tiny_llama

from d3engine import AsyncEngine, ModelFormatError
from d3engine.cli import serve
from d3engine.cli.commands import ExitCode
from d3engine.engine import host, memory
from d3engine.server.app import create_app
from d3engine.server.models import FurtherModel, FurtherModels
from d3engine.server.settings import ServerSettings
from d3engine.server.state import AppState

BODY: dict[str, Any] = {"prompt": "Tom has 5 pens.", "max_tokens": 6, "temperature": 0}
SIZE = 100


class Loads:
    """Makes engines of the bundled model, and counts them by name; those of `broken` cannot be made."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.broken: set[str] = set()
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def of(self, name: str) -> Callable[[], AsyncEngine]:
        def load() -> AsyncEngine:
            self.seen.append(name)
            self.may_go_on.wait()
            if name in self.broken:
                raise ModelFormatError("/a/path/that/no/client/shall/see is broken")
            return AsyncEngine("demo", device="cpu", kv_cache_memory_bytes=2**24, max_num_seqs=4)

        return load


@contextmanager
def several(
    client: AsyncEngine,
    loads: Loads,
    *,
    room: int | None = None,
    ttl: float | None = None,
    sleeps: bool = False,
    **settings: Any,
) -> Iterator[tuple[httpx.Client, FurtherModels]]:
    """A server of the bundled model, and of it again as "b" and "c"."""
    models = [FurtherModel(name, loads.of(name), SIZE, client.directory, client.config) for name in ("b", "c")]
    app = create_app(
        client,
        ServerSettings(model_names=("a",), enable_sleep_mode=sleeps, **settings),
        lambda first: FurtherModels(models, first, first_bytes=SIZE, room_bytes=room, ttl=ttl),
    )
    further: FurtherModels = app.state.further
    with serving(app) as url, httpx.Client(base_url=url, timeout=120) as http:
        try:
            yield http, further
        finally:
            loads.may_go_on.set()
            for _, state in further.loaded():
                asyncio.run(state.client.close())


def test_a_model_is_loaded_when_a_request_names_it(client: AsyncEngine) -> None:
    loads = Loads()
    with several(client, loads) as (http, further):
        expected = http.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
        assert loads.seen == []
        assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["a", "b", "c"]
        for _ in range(2):
            answer = http.post("/v1/completions", json={"model": "b", **BODY}).json()
            assert (answer["model"], answer["choices"][0]["text"]) == ("b", expected)
        assert loads.seen == ["b"]
        body = {"model": "c:latest", "prompt": BODY["prompt"], "raw": True, "options": {"num_predict": 6, "seed": 1}}
        text = http.post("/api/generate", json={**body, "stream": True}).text
        assert text.endswith("}\n")
        assert '"model":"c:latest"' in text
        assert loads.seen == ["b", "c"]
        assert [one.name for one, _ in further.loaded()] == ["b", "c"]
        assert [one["name"] for one in http.get("/api/tags").json()["models"]] == ["a", "b", "c"]
        assert [one["name"] for one in http.get("/api/ps").json()["models"]] == ["a", "b", "c"]
        assert http.post("/v1/completions", json={"model": "b:latest", **BODY}).json()["model"] == "b"
        assert http.post("/v1/completions", json={"model": "a:latest", **BODY}).json()["model"] == "a"
        assert http.get("/v1/models/a:latest").json()["id"] == "a"
        for field in ("model", "name"):
            assert http.post("/api/show", json={field: "b"}).json()["modelfile"] == "FROM b\n"
        card = http.get("/v1/models/b").json()
        assert (card["id"], card["root"]) == ("b", "b")
        assert http.post("/v1/completions", json={"model": "d", **BODY}).status_code == 404
        assert http.post("/v1/embeddings", json={"model": "b", "input": "x"}).json()["model"] == "b"


def test_without_room_for_both_the_one_used_before_is_unloaded(client: AsyncEngine) -> None:
    loads = Loads()
    with several(client, loads, room=SIZE) as (http, further):
        for name in ("b", "c", "c", "b"):
            assert http.post("/v1/completions", json={"model": name, **BODY}).json()["model"] == name
            assert [one.name for one, _ in further.loaded()] == [name]
    assert loads.seen == ["b", "c", "b"]


def test_requests_wait_where_two_models_do_not_fit(client: AsyncEngine) -> None:
    """Requests wait for each other where there is no room for both models."""
    loads = Loads()
    answers: list[str] = []
    with several(client, loads, room=SIZE) as (http, _):

        def ask(name: str) -> None:
            body = {"model": name, **BODY, "max_tokens": 40, "ignore_eos": True}
            answers.append(httpx.post(http.base_url.join("/v1/completions"), json=body, timeout=120).json()["model"])

        loads.may_go_on.clear()
        threads = [threading.Thread(target=ask, args=(name,)) for name in ("b", "c", "b", "c")]
        for thread in threads:
            thread.start()
        loads.may_go_on.set()
        for thread in threads:
            thread.join()
    assert sorted(answers) == ["b", "b", "c", "c"]


def test_a_model_in_steady_use_makes_way_for_another(client: AsyncEngine) -> None:
    """Requests that come while another model waits for room are answered after that one's."""
    models = [FurtherModel(name, Loads().of(name), SIZE, client.directory, client.config) for name in ("b", "c")]
    further = FurtherModels(models, AppState(client, ServerSettings(model_names=("a",))), room_bytes=SIZE)
    begun: list[str] = []

    async def ask(name: str, may_end: asyncio.Event) -> None:
        place = further.place_of(name)
        assert place is not None
        async with further.use(place):
            begun.append(name)
            await may_end.wait()

    async def ask_both() -> None:
        first_may_end, others_may_end = asyncio.Event(), asyncio.Event()
        others_may_end.set()
        asked = [asyncio.create_task(ask("b", first_may_end))]
        while begun != ["b"]:
            await asyncio.sleep(0)
        for name in ("c", "b"):
            asked.append(asyncio.create_task(ask(name, others_may_end)))
            for _ in range(9):  # until it has begun or waits
                await asyncio.sleep(0)
        first_may_end.set()
        await asyncio.gather(*asked)
        await further.close()

    asyncio.run(ask_both())
    assert begun == ["b", "c", "b"]


def test_model_that_cannot_be_loaded_fails_its_requests_alone(client: AsyncEngine) -> None:
    """A model that cannot be loaded is an error of its requests alone."""
    loads = Loads()
    loads.broken.add("b")
    with several(client, loads) as (http, _):
        answer = http.post("/v1/completions", json={"model": "b", **BODY})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "model_not_loaded"
        assert "/a/path" not in answer.text
        assert http.post("/v1/completions", json=BODY).status_code == 200
        loads.broken.clear()
        assert http.post("/v1/completions", json={"model": "b", **BODY}).status_code == 200


def test_a_model_without_requests_is_unloaded(client: AsyncEngine) -> None:
    loads = Loads()
    with several(client, loads, ttl=1e-6) as (http, further):
        for _ in range(2):
            assert http.post("/v1/completions", json={"model": "b", **BODY}).json()["model"] == "b"
            while further.loaded():
                http.get("/health")
    assert loads.seen == ["b", "b"]


def test_an_idle_time_has_one_timer_for_all_requests(client: AsyncEngine) -> None:
    """However many requests a model has had, one timer waits for it to be idle."""
    models = [FurtherModel("b", Loads().of("b"), SIZE, client.directory, client.config)]
    further = FurtherModels(models, AppState(client, ServerSettings(model_names=("a",))), ttl=1000)
    timers: list[Any] = []

    async def use_it() -> None:
        loop, place = asyncio.get_running_loop(), further.place_of("b")
        call_later: Any = loop.call_later
        loop.call_later = lambda *asked: timers.append(asked[1]) or call_later(*asked)  # type: ignore
        assert place is not None
        for _ in range(3):
            async with further.use(place):
                pass
        await further.close()

    asyncio.run(use_it())
    assert timers.count(further._unload_if_idle) == 1


def test_a_further_model_sleeps_and_wakes_by_its_name(client: AsyncEngine) -> None:
    """Asleep it is unloaded, and the first model is not asked."""
    loads = Loads()
    with several(client, loads, sleeps=True) as (http, further):
        expected = http.post("/v1/completions", json={"model": "b", **BODY}).json()["choices"]
        assert http.post("/sleep?model=b").json() == {"is_sleeping": True}
        assert further.loaded() == []
        assert http.get("/is_sleeping").json() == {"is_sleeping": False}
        assert http.post("/wake_up?model=b").json() == {"is_sleeping": False}
        assert http.post("/v1/completions", json={"model": "b", **BODY}).json()["choices"] == expected
    assert loads.seen == ["b", "b"]


def test_no_adapter_has_the_name_of_a_further_model(client: AsyncEngine) -> None:
    """Requests of that name are for the model: an adapter would never be asked."""
    with several(client, Loads(), allow_lora_loading=True) as (http, _):
        answer = http.post("/v1/load_lora_adapter", json={"lora_name": "b", "lora_path": "/nowhere"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_name")


def test_a_first_model_that_sleeps_leaves_its_room(client: AsyncEngine) -> None:
    """Both others fit while it sleeps; waking it unloads the one that was used least recently."""
    loads = Loads()
    first = AsyncEngine("demo", device="cpu", kv_cache_memory_bytes=2**24)
    try:
        with several(first, loads, room=SIZE, sleeps=True) as (http, further):
            assert http.post("/sleep").json() == {"is_sleeping": True}
            for name in ("b", "c"):
                assert http.post("/v1/completions", json={"model": name, **BODY}).json()["model"] == name
            assert [one.name for one, _ in further.loaded()] == ["b", "c"]
            assert http.post("/v1/completions", json={"model": "a", **BODY}).json()["model"] == "a"
            assert [one.name for one, _ in further.loaded()] == ["c"]
    finally:
        asyncio.run(first.close())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "demo"], "--model must be a model of another name than those that are served; got 'demo'"),
        (["--model", "/does/not/exist"], "/does/not/exist"),
        (["--model-ttl", "0"], "--model-ttl must be a finite number in (0, 86400]; got 0"),
        (
            ["--served-model-name", "a", "--model", "demo", "--kv-cache-memory-bytes", str(2**50)],
            "--kv-cache-memory-bytes must be at most",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_loaded(words: list[str], said: str) -> None:
    assert said in refused(["serve", "demo", "--port", "0", *words])


def test_a_model_whose_longest_text_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The KV cache of one text counts where that is above 1 GiB; a default length is one that there is room for."""
    for name in ("a", "b"):  # 12 KiB a token
        save_tiny_llama(tmp_path / name, max_position_embeddings=2**18, num_key_value_heads=4, head_dim=128)
    for module in (host, memory):
        monkeypatch.setattr(module, "machine_bytes", lambda: 5 * 2**29)
    words = ["--port", "0", "--device", "cpu", "--model", str(tmp_path / "b")]
    stderr = refused(["serve", str(tmp_path / "a"), *words, "--max-model-len", "100000"])
    said = f"a model that fits beside {tmp_path / 'a'}: it takes about 1.1 GiB with its KV cache, and 1.1 GiB are left"
    assert said in stderr
    shown: list[FurtherModel] = []
    monkeypatch.setattr(serve, "_run", lambda *given: shown.extend(given[-1].args[0]) or ExitCode.DONE)
    stderr = succeed(["serve", "demo", *words]).stderr
    (model,) = shown
    assert f"b: max_model_len is {model.max_model_len:,}, what the memory has room for beside demo" in stderr
    assert model.max_model_len is not None
    assert 2**17 < model.max_model_len < 184_000, "what the memory has room for alone"
    assert 2**30 < model.num_bytes < 0.9 * 5 * 2**29 - 2**29
