"""Rows of the security list that no other file closes, over HTTP: what a stranger may bring, and whom it may hurt."""

import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from demo_server import TURNS, serving_demo

from d3engine import AsyncEngine
from d3engine.text.limited_process import ProcessLimits
from d3engine.text.structured import forms

ROOT = Path(__file__).parents[2]
GOOD: dict[str, Any] = {"prompt": "Tom has 5 pens.", "max_tokens": 60, "temperature": 1, "seed": 7, "ignore_eos": True}
BAD: list[dict[str, Any]] = [
    {"prompt": [5, 768]},
    {"prompt": [-1]},
    {"prompt": "a", "logit_bias": {"768": 1}},
    {"prompt": "a", "stop_token_ids": [2**40]},
    {"prompt": "a", "allowed_token_ids": [768]},
    {"prompt": "a", "structured_outputs": {"regex": "("}},
    {"prompt": "a", "structured_outputs": {"json": {"$ref": "#"}}},
    {"prompt": "a", "min_tokens": 9, "max_tokens": 3},
]


def test_refused_request_changes_nothing_of_its_neighbours(http: httpx.Client) -> None:
    """A request that is refused changes nothing of its neighbours."""
    # Rows 6 and 7 of the security list: ids beyond the embedding's rows, and faults of one request.
    alone = http.post("/v1/completions", json=GOOD).json()["choices"]
    with ThreadPoolExecutor(4) as pool:
        good = [pool.submit(http.post, "/v1/completions", json=GOOD) for _ in range(2)]
        refused = list(pool.map(lambda body: http.post("/v1/completions", json=body), BAD * 2))
    assert {answer.status_code for answer in refused} == {400}
    assert [answer.result().json()["choices"] for answer in good] == [alone, alone]


def test_request_templates_are_refused_or_bounded_if_trusted(http: httpx.Client, client: AsyncEngine) -> None:
    """Templates of requests are refused, and bounded where they are trusted."""
    # Row 8 of the security list.
    body = {"messages": TURNS, "max_tokens": 1, "chat_template": "{{ messages }}"}
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template")
    trusting = serving_demo(client, trust_request_chat_template=True)
    with trusting as url, httpx.Client(base_url=url, timeout=120) as there:
        for source in (
            "{{ 'x' * 9000000 }}",
            "{{ ''.__class__.__mro__ }}",
            "{% for i in range(10**10) %}x{% endfor %}",
        ):
            answer = there.post("/v1/chat/completions", json=body | {"chat_template": source})
            assert answer.status_code == 400, source
        assert there.get("/health").status_code == 200


def test_a_stop_string_is_a_text_and_no_pattern(http: httpx.Client) -> None:
    """Row 9 of the security list: one that would be dear as a pattern is looked for as it is written."""
    body = GOOD | {"temperature": 0, "max_tokens": 12, "prompt": "Question: Tom has 5 pens. Tom finds 3.\nAnswer:"}
    whole = http.post("/v1/completions", json=body).json()["choices"][0]
    assert "5" in whole["text"]
    for stop in ([".*"], ["(a+)+$"], ["[0-9]"], ["\\d"]):
        assert http.post("/v1/completions", json=body | {"stop": stop}).json()["choices"][0] == whole
    cut = http.post("/v1/completions", json=body | {"stop": ["5"]}).json()["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == (whole["text"].partition("5")[0], "stop")


DEAR: list[dict[str, Any]] = [
    {"json": {"$ref": "file:///etc/hostname"}},
    {"json": {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (9973, 9967, 9949, 9941)]}},
    {"regex": "(" * 2000 + "a" + ")" * 2000},
    {"grammar": "start: start start | start"},
]


@pytest.mark.parametrize("form", DEAR, ids=lambda form: str(form)[:40])
def test_a_form_that_would_take_too_much_is_refused_by_its_field(
    http: httpx.Client, form: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 9 of the security list: a form is compiled beside the loop, within limits, and fetches nothing."""
    monkeypatch.setattr(forms, "LIMITS", ProcessLimits(seconds=0.3))
    answer = http.post("/v1/completions", json={"prompt": "a", "structured_outputs": form})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "structured_outputs")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}},
        {"type": "input_image", "image_url": "file:///etc/hostname"},
        {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/a.png"}},
        {"type": "document", "source": {"type": "url", "url": "file:///etc/hostname"}},
        {"type": "input_file", "file_url": "http://127.0.0.1:1/a.pdf"},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
    ],
    ids=lambda part: part["type"],
)
def test_no_part_but_text_is_read_so_nothing_is_fetched(http: httpx.Client, part: dict[str, Any]) -> None:
    """Row 20 of the security list."""
    turns = [{"role": "user", "content": [part]}]
    for path, body in (
        ("/v1/chat/completions", {"messages": turns}),
        ("/v1/responses", {"input": turns}),
        ("/v1/messages", {"messages": turns, "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": turns}),
        ("/tokenize", {"messages": turns}),
    ):
        answer = http.post(path, json=body)
        assert answer.status_code == 400, path
        assert "[0].content[0] must be" in answer.json()["error"]["message"]


def test_litellm_is_nothing_that_an_installation_brings() -> None:
    """Row 21 of the security list: it is tried as a client, in an environment of its own."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    assert needed
    assert not [one for one in needed if "litellm" in one.lower()]
