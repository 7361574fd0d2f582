"""What is refused over HTTP: always by name, in OpenAI's words, before the first byte, and never as a 422 or a 500."""

import threading
from typing import Any

import httpx
import pytest
from bad_values import bad_values
from openai import BadRequestError, NotFoundError, OpenAI

from d3engine.server.requests import bodies

COMPLETION: dict[str, Any] = {"model": "demo", "prompt": "Tom has"}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        *bad_values(prompt=[None, [], ["a", [1]], [1, "a"], [[]], 5, [1.5], ["a"] * 257, [5] * 1025, [5] * 1024]),
        ({"prompt": [768]}, "prompt_token_ids"),
        *bad_values(n=[0, 65, "2", True], max_tokens=[-5, 0, 2**70, 1.5], temperature=[2.1, -1], top_p=[0]),
        ({"n": 2, "temperature": 0}, "n"),  # of greedy answers, which would be the same
        *bad_values(logit_bias=[{"a": 1}, {"768": 1}, {"1": 101}], stop=["", [""], ["a"] * 17, 5], seed=[2**63]),
        *bad_values(logprobs=[21, -1, True], prompt_logprobs=[21], presence_penalty=[3], min_tokens=[17]),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"best_of": 1, "n": 2, "temperature": 1}, "best_of"),
        ({"best_of": 2, "stream": True, "temperature": 1}, "best_of"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": 5, "stream": True}, "stream_options"),
        ({"stream_options": {"include_usage": 1}, "stream": True}, "stream_options"),
        *bad_values(suffix=["."], response_format=[{"type": "xml"}], guided_json=[{}], cache_salt=[""], depth=["deep"]),
    ],
    ids=str,
)
def test_completion_that_cannot_be_honoured_names_the_field(refusal: Any, changes: dict[str, Any], param: str) -> None:
    status, error = refusal("/v1/completions", COMPLETION | changes)
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert error["message"].startswith((param, "This model's maximum context length is 1024 tokens, but", "In depth"))


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"a"', b'{"prompt": NaN}', b"\xff"])
def test_a_body_that_is_no_json_object_is_a_400(http: httpx.Client, body: bytes) -> None:
    answer = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"


def test_the_official_client_raises_its_own_errors(openai: OpenAI) -> None:
    with pytest.raises(NotFoundError) as missing:
        openai.completions.create(model="gpt-4", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(BadRequestError) as long:
        openai.completions.create(model="demo", prompt="Tom " * 2000)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "prompt")
    assert "This model's maximum context length is 1024 tokens" in long.value.message  # which LiteLLM looks for
    with pytest.raises(BadRequestError) as both:
        openai.completions.create(model="demo", prompt="Tom has", max_tokens=1022)
    assert both.value.code == "context_length_exceeded"
    assert "1024 tokens" in both.value.message


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"tools": [{"type": "mcp", "name": "f"}]}, "tools", 'tools[0].type must be "function".'),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0].name must be given."),
        ({"tools": [{"type": "function", "name": "f", "a": 1}]}, "tools", "tools[0].a must be absent."),
        (
            {"text": {"format": {"type": "x"}}},
            "text",
            'text.format.type must be "json_object" or "json_schema" or "text".',
        ),
        ({"text": {"format": 5}}, "text", "text.format must be an object or null."),
    ],
    ids=str,
)
def test_mistake_deep_inside_is_named_by_place(refusal: Any, body: dict[str, Any], param: str, message: str) -> None:
    status, error = refusal("/v1/responses", {"input": "Tom"} | body)
    assert (status, error["param"], error["message"]) == (400, param, message)


def test_stream_that_cannot_begin_is_an_error_status(refusal: Any) -> None:
    """A stream that cannot begin is an error status and no event."""
    status, error = refusal("/v1/completions", COMPLETION | {"stream": True, "max_tokens": 5000})
    assert (status, error["code"]) == (400, "context_length_exceeded")


def test_what_a_client_sent_is_not_sent_back_at_length(http: httpx.Client) -> None:
    for field, status in (("model", 404), ("temperature", 400)):
        answer = http.post("/v1/completions", json=COMPLETION | {field: "x" * 100_000})
        assert answer.status_code == status
        assert len(answer.content) < 2000


# -- fields ----------------------------------------------------------------------------------------------------------


def test_fields_that_nobody_knows_are_taken_and_named(http: httpx.Client) -> None:
    unknown = {"later_one": 2, "later_two": 1.0, "stream": True, "stream_options": {"later": True}, "a\r\nb: c": 1}
    answer = http.post("/v1/completions", json=COMPLETION | unknown)
    assert answer.status_code == 200
    named = answer.headers["x-d3-ignored-fields"]
    assert named == "later_one, later_two, (unprintable), stream_options.later"
    many = http.post("/v1/completions", json=COMPLETION | {f"unknown_{i}": i for i in range(5000)})
    assert len(many.headers["x-d3-ignored-fields"]) < 500
    assert many.headers["x-d3-ignored-fields"].endswith("and 4984 more")


def test_long_body_is_read_off_the_event_loop(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long body is read in another thread than the event loop's."""
    threads = []
    read = bodies.check_refused

    def note(content: Any, shape: Any) -> None:
        threads.append(threading.current_thread())
        read(content, shape)

    monkeypatch.setattr(bodies, "check_refused", note)
    for length in (10, 2**17):
        assert http.post("/tokenize", json={"prompt": "x" * length}).status_code == 200
    assert threads[0] is not threads[1]
