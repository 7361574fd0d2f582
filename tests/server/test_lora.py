"""LoRA adapters as ids of the model: listed, named by requests, loaded and unloaded while others are answered."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from demo_server import Around, demo_engine

from benchmarks.lora import write_random_adapter
from d3engine import AsyncEngine, Engine, FullDepth, InvalidValueError, SamplingParams
from d3engine.model.config import ModelConfig
from d3engine.server.app import create_app
from d3engine.server.settings import ServerSettings

BODY = {"prompt": "Question: Tom has 5 pens.", "temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters of the bundled model."""
    config, found = ModelConfig.from_directory("d3engine/demo_model"), {}
    for seed, name in enumerate(("first", "second")):
        found[name] = tmp_path_factory.mktemp(name)
        write_random_adapter(found[name], config, 8, seed=seed, size=0.3)
    return found


@pytest.fixture(scope="module")
def engine(paths: dict[str, Path]) -> Iterator[AsyncEngine]:
    with demo_engine(lora_modules=[f"first={paths['first']}"]) as engine:
        yield engine


def http_of(engine: AsyncEngine, **settings: Any) -> httpx.Client:
    from starlette.testclient import TestClient

    app = create_app(engine, ServerSettings(model_names=("demo",), **settings))
    return TestClient(app, base_url="http://127.0.0.1:8000")


@pytest.fixture(scope="module")
def http(engine: AsyncEngine) -> httpx.Client:
    return http_of(engine, allow_lora_loading=True)


@pytest.fixture(scope="module")
def own(paths: dict[str, Path]) -> Iterator[Engine]:
    with Engine("demo", device="cpu", kv_cache_memory_bytes=2**25, lora_modules=paths) as engine:
        yield engine


def text_of(http: httpx.Client, model: str, **more: Any) -> str:
    answer = http.post("/v1/completions", json={**BODY, "model": model, **more})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    text: str = answer.json()["choices"][0]["text"]
    return text


def expected(own: Engine, adapter: str | None) -> str:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (output,) = own.generate([BODY["prompt"]], params, use_tqdm=False, lora_request=adapter)
    text: str = output.outputs[0].text
    return text


def test_an_adapter_is_an_id_of_the_model(http: httpx.Client, own: Engine) -> None:
    cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
    assert list(cards) == ["demo", "first"]
    assert (cards["first"]["parent"], cards["first"]["root"]) == ("demo", "demo")
    assert http.get("/v1/models/first").json() == cards["first"]
    assert [card["d3ext"]["certified"] for card in cards.values()] == [True, False]
    for name, card in cards.items():
        answer = http.post("/v1/completions", json={**BODY, "model": name, "return_depths": True}).json()
        assert answer["d3ext"]["certified"] == card["d3ext"]["certified"]
    assert text_of(http, "first") == expected(own, "first") != expected(own, None) == text_of(http, "demo")


def test_chats_name_adapters_too(http: httpx.Client) -> None:
    found = []
    for model in ("demo", "first"):
        body = {"model": model, "messages": [{"role": "user", "content": "Tom has 5 pens."}], "temperature": 0}
        answer = http.post("/v1/chat/completions", json={**body, "max_tokens": 12, "ignore_eos": True})
        assert answer.status_code == 200, answer.text
        found.append(answer.json()["choices"][0]["message"]["content"])
    assert found[0] != found[1]


def test_adapters_are_loaded_and_unloaded(http: httpx.Client, own: Engine, paths: dict[str, Path]) -> None:
    assert http.post("/v1/completions", json={**BODY, "model": "second"}).status_code == 404
    loaded = http.post("/v1/load_lora_adapter", json={"lora_name": "second", "lora_path": str(paths["second"])})
    assert (loaded.status_code, loaded.json()["id"]) == (200, "second")
    assert str(paths["second"]) not in http.get("/v1/models").text
    assert text_of(http, "second") == expected(own, "second") != text_of(http, "first")
    again = http.post("/v1/load_lora_adapter", json={"lora_name": "second", "lora_path": str(paths["second"])})
    assert (again.status_code, again.json()["error"]["param"]) == (400, "lora_name")
    gone = http.post("/v1/unload_lora_adapter", json={"lora_name": "second"})
    assert (gone.status_code, gone.json()) == (200, {"id": "second", "object": "model", "deleted": True})
    assert http.post("/v1/completions", json={**BODY, "model": "second"}).json()["error"]["code"] == "model_not_found"
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "second"}).status_code == 404


class Unloading(Around):
    """An engine whose adapter is unloaded while the prompt of a chat is written."""

    async def chat_prompt(self, *asked: Any, **more: Any) -> Any:
        """The prompt, and no adapter."""
        if "second" in self._client.lora_adapters:
            await self._client.unload_lora_adapter("second")
        return await self._client.chat_prompt(*asked, **more)


def test_an_adapter_unloaded_meanwhile_is_not_there(engine: AsyncEngine, paths: dict[str, Path]) -> None:
    """The model alone does not answer in place of an adapter that is unloaded while the prompt is read."""
    http = http_of(Unloading(engine), allow_lora_loading=True)  # type: ignore[arg-type]
    body = {"model": "second", "messages": [{"role": "user", "content": "Tom has 5 pens."}], "max_tokens": 2}
    assert http.post("/v1/chat/completions", json={**body, "model": "demo"}).status_code == 200
    http.post("/v1/load_lora_adapter", json={"lora_name": "second", "lora_path": str(paths["second"])})
    answer = http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"lora_name": "demo", "lora_path": "/nowhere"}, "lora_name"),
        ({"lora_name": "new", "lora_path": "/nowhere"}, "lora_path"),
        ({"lora_name": "a\nb", "lora_path": "/nowhere"}, "lora_name"),
        ({"lora_name": "new"}, "lora_path"),
        ({"lora_name": "new", "lora_path": ""}, "lora_path"),
        ({"lora_name": "new", "lora_path": "a\0b"}, "lora_path"),
        ({"lora_name": 5, "lora_path": "/nowhere"}, "lora_name"),
    ],
)
def test_what_cannot_be_loaded_is_refused_by_field(http: httpx.Client, body: dict[str, Any], field: str) -> None:
    answer = http.post("/v1/load_lora_adapter", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_adapters_are_loaded_only_where_the_owner_allows_it(engine: AsyncEngine, paths: dict[str, Path]) -> None:
    closed = http_of(engine)
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        answer = closed.post(path, json={"lora_name": "first", "lora_path": str(paths["first"])})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "lora_loading_not_allowed")
    assert [card["id"] for card in closed.get("/v1/models").json()["data"]] == ["demo", "first"]


def test_an_adapter_cannot_have_the_models_own_id(engine: AsyncEngine) -> None:
    with pytest.raises(InvalidValueError, match="lora_modules must be a name that is no id of the model; got 'first'"):
        http_of(engine, depth_aliases={"first": FullDepth()})
