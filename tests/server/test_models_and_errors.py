"""The app's frame: what is served under which id, and how what cannot be answered is said."""

import httpx
import pytest
from bad_values import assert_refused, bad_values
from starlette.testclient import TestClient

from d3engine import D3, Engine, FullDepth
from d3engine.server.app import create_app
from d3engine.server.settings import ServerSettings


@pytest.fixture(scope="module")
def http() -> TestClient:
    settings = ServerSettings(model_names=("demo", "org/demo"), depth_aliases={"demo-full": FullDepth()})
    engine = Engine("demo", device="cpu", kv_cache_memory_bytes=2**22)
    return TestClient(create_app(engine, settings), base_url="http://127.0.0.1:8000")


def test_a_method_that_a_route_lacks_is_told_whatever_its_body(http: httpx.Client) -> None:
    for path in ("/health", "/v1/models", "/v1/models/demo", "/metrics", "/"):
        answer = http.post(path, content=b"<a/>", headers={"content-type": "text/xml"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")
        assert "GET" in answer.headers["allow"]


def test_every_id_is_listed_with_the_depth_that_it_stands_for(http: TestClient) -> None:
    body = http.get("/v1/models").json()
    assert body["object"] == "list"
    own = {"policy": "d3", "alpha": 0.8, "start": 0.6, "tail": 0, "on_skip": "none"}
    found = {card["id"]: (card["d3ext"]["depth"], card["d3ext"]["calibrated"]) for card in body["data"]}
    assert found == {"demo": (own, True), "org/demo": (own, True), "demo-full": ({"policy": "full"}, False)}
    assert {card["d3ext"]["certified"] for card in body["data"]} == {True}
    assert [card["d3ext"]["certified_depth"] for card in body["data"]] == [own, own, own]
    assert {card["max_model_len"] for card in body["data"]} == {1024}
    assert {card["d3ext"]["num_layers"] for card in body["data"]} == {16}
    assert [card["parent"] for card in body["data"]] == [None, None, "demo"]


@pytest.mark.parametrize("name", ["demo", "org/demo", "demo-full"])
def test_a_model_is_shown_by_its_id_slashes_included(http: TestClient, name: str) -> None:
    cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
    assert http.get(f"/v1/models/{name}").json() == cards[name]


def test_unknown_model_id_is_a_404_with_openais_code(http: TestClient) -> None:
    """An id that is not served is a 404 with the code that clients look for."""
    answer = http.get("/v1/models/gpt-4")
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "model", "model_not_found")
    assert "'gpt-4'" in error["message"]


def test_unknown_path_and_wrong_method_are_errors_in_one_form(http: TestClient) -> None:
    """An unknown path is an error in the form of all, and a wrong method names those that a path has."""
    unknown = http.get("/v1/embedding")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")
    assert set(unknown.json()["error"]) == {"message", "type", "param", "code"}
    assert set(http.delete("/v1/models").headers["allow"].split(", ")) == {"GET", "HEAD"}


@pytest.mark.parametrize(
    ("changes", "named"),
    bad_values(
        model_names=[(), ("a\n",)],
        depth_aliases=[{"demo": FullDepth()}],
        allow_depth=[("speculative",), ("unknown",)],
        max_depth_policies=[0],
    ),
)
def test_settings_that_make_no_server_are_refused_by_name(changes: dict[str, object], named: str) -> None:
    with assert_refused(named):
        ServerSettings(**({"model_names": ("demo",)} | changes))  # type: ignore[arg-type]


def test_an_alias_may_stand_for_any_policy() -> None:
    policy = D3(alpha=0.9, start=0.6)
    assert ServerSettings(model_names=("demo",), depth_aliases={"demo-d3": policy}).depth_aliases["demo-d3"] == policy
