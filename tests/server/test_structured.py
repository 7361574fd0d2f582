"""Forms over HTTP: response_format and structured_outputs by OpenAI's own client, whole and streamed."""

import json
import re
from typing import Any

import httpx
import pytest
from json_schemas import closed

CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Tom has 5 pens."}]}
TEXT: dict[str, Any] = {"model": "demo", "prompt": "Tom has 5 pens."}
SCHEMA = closed({"pens": {"type": "integer", "minimum": 0, "maximum": 99}, "of": {"enum": ["Tom", "Zoë"]}})
BY_SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "pens", "strict": True, "schema": SCHEMA}}


def assert_fits(text: str | None) -> None:
    found = json.loads(text or "")
    assert list(found) == ["pens", "of"]
    assert 0 <= found["pens"] <= 99
    assert found["of"] in ("Tom", "Zoë")


def test_a_schema_holds_whole_answers_and_streams(openai: Any) -> None:
    asked = {**CHAT, "response_format": BY_SCHEMA, "temperature": 1.0, "seed": 4}
    whole = openai.chat.completions.create(**asked, n=3)
    for choice in whole.choices:
        assert_fits(choice.message.content)
        assert choice.finish_reason == "stop"
    chunks = list(openai.chat.completions.create(**asked, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "stop"
    text = openai.completions.create(**TEXT, max_tokens=99, extra_body={"response_format": BY_SCHEMA})
    assert_fits(text.choices[0].text)


@pytest.mark.parametrize("depth", ["full", {"policy": "d3", "alpha": 0.9, "start": 0.6}], ids=str)
def test_forms_of_vllms_field_hold_at_every_depth(openai: Any, depth: Any) -> None:
    for form, fits in (
        ({"json": SCHEMA}, lambda text: assert_fits(text) is None),
        ({"regex": "[a-c]{3}", "json": None}, re.compile("[a-c]{3}").fullmatch),
        ({"choice": ["yes", "no"]}, ["yes", "no"].__contains__),
        ({"grammar": 'start: "<" /[a-b]/ ">"'}, ["<a>", "<b>"].__contains__),
    ):
        body = {"structured_outputs": form, "depth": depth}
        assert fits(openai.chat.completions.create(**CHAT, extra_body=body).choices[0].message.content or "")
        assert fits(openai.completions.create(**TEXT, max_tokens=99, extra_body=body).choices[0].text)


def test_any_object_is_the_older_way_of_asking(openai: Any) -> None:
    asked: dict[str, Any] = {**CHAT, "response_format": {"type": "json_object"}, "max_tokens": 60}
    choice = openai.chat.completions.create(**asked, temperature=0).choices[0]
    assert (choice.message.content or "").startswith("{")
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content or ""), dict)


@pytest.mark.parametrize(
    ("changes", "param", "why"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format", "schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format", "name"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format", "json_object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "no"}}}},
            "response_format",
            "Invalid type: no",
        ),
        ({"response_format": "json"}, "response_format", "object"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs", "fields json, regex"),
        ({"structured_outputs": {"json": "["}}, "structured_outputs", "JSON schema"),
        ({"structured_outputs": {"regex": "a"}, "response_format": BY_SCHEMA}, "structured_outputs", "absent"),
        ({"guided_json": SCHEMA}, "guided_json", "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "min_tokens", "0 where"),
    ],
    ids=lambda value: str(value)[:60],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_form_that_cannot_be_kept_is_refused_by_its_field(
    refusal: Any, path: str, changes: dict[str, Any], param: str, why: str
) -> None:
    asked = (CHAT if "chat" in path else TEXT) | changes | {"stream": True}
    status, error = refusal(path, asked)
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert why in error["message"]


def test_a_form_that_says_text_is_none(http: httpx.Client) -> None:
    plain = http.post("/v1/completions", json=TEXT).json()["choices"]
    assert http.post("/v1/completions", json=TEXT | {"response_format": {"type": "text"}}).json()["choices"] == plain


@pytest.mark.parametrize("stream", [False, True])
def test_grammar_beyond_its_limit_is_the_requests_error(http: httpx.Client, stream: bool) -> None:
    """A grammar that meets its limit is the error of its request."""
    heavy = "start: " + " | ".join(f'"a{nth}"' for nth in range(2500))  # too many to follow at once
    body = {**TEXT, "max_tokens": 12, "stream": stream, "structured_outputs": {"grammar": heavy}}
    answer = http.post("/v1/completions", json=body)
    text = answer.text.removeprefix("data: ").partition("\n")[0] if stream else answer.text
    error = json.loads(text)["error"]
    assert (error["code"], error["param"]) == ("grammar_limit", "structured_outputs")
    assert "2000" in error["message"]
    assert answer.status_code == 400 or stream


def test_tokens_that_exclude_a_grammar_are_the_requests_error(http: httpx.Client) -> None:
    """Allowed tokens that exclude all of a grammar are the error of their request."""
    body = {**TEXT, "structured_outputs": {"choice": ["yes", "no"]}, "allowed_token_ids": [5]}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("grammar_limit", "structured_outputs")
    assert "allowed_token_ids, bad_words and stop_token_ids leave none of the tokens" in error["message"]
    assert http.post("/v1/completions", json=body | {"structured_outputs": None}).status_code == 200
