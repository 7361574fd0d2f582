"""What programs send that the official clients do not: names of their own, nulls, roles, empty turns, large numbers."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from demo_server import TURNS, InHermesFormat, call_at_once, serving_demo

from d3engine import AsyncEngine
from d3engine.server.requests.formats import ToolFormat

CHAT: dict[str, Any] = {"model": "demo", "messages": TURNS, "stream": False}
RAW: dict[str, Any] = {"model": "demo", "prompt": "Tom has", "raw": True, "stream": False}
LARGE = 2**70
ARGUMENTS = f'{{"many":\n{LARGE}}}'
CALLED: dict[str, Any] = {"name": "count", "arguments": {"many": LARGE}}


@pytest.fixture(scope="module")
def tools(client: AsyncEngine) -> Iterator[httpx.Client]:
    """A server whose model's template knows of tools."""
    with serving_demo(InHermesFormat(client)) as url, httpx.Client(base_url=url, timeout=120) as made:
        yield made


@pytest.mark.parametrize(("path", "body"), [("/api/chat", CHAT), ("/api/generate", RAW)])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_tokens": "x"}, "options.max_tokens must be an integer"),
        ({"num_predict": -9}, "options.num_predict must be an integer"),
        ({"num_predict": 3, "max_tokens": 5}, "options.max_tokens must be absent or what options.num_predict is"),
        ({"temperature": 9}, "options.temperature must be a finite number"),
        ({"temperature": "hot"}, "options.temperature must be a number"),
        ({"repetition_penalty": 0}, "options.repetition_penalty must be"),
        ({"repeat_penalty": 0}, "options.repeat_penalty must be"),
        ({"stop": ""}, "options.stop must be null"),
        ({"n": 2, "temperature": 1}, "options.n must be absent or 1"),
        ({"best_of": 2}, "options.best_of must be absent or 1"),
        ({"echo": True}, "options.echo must be absent or false"),
    ],
)
def test_ollamas_options_are_refused_by_the_name_sent(
    http: httpx.Client, path: str, body: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    """An option is refused by the very name that the client has sent."""
    answer = http.post(path, json=body | {"options": options})
    assert (answer.status_code, answer.json()["error"][: len(said)]) == (400, said)


def test_whole_options_written_as_fractions_are_read(http: httpx.Client) -> None:
    """Home Assistant's number fields are floats: they are taken where Ollama has integers."""
    options = {"num_predict": 2.0, "num_ctx": 64.0, "top_k": 5.0, "seed": 1.0}
    answer = http.post("/api/chat", json=CHAT | {"options": options})
    assert (answer.status_code, answer.json().get("eval_count")) == (200, 2), answer.text


def test_options_without_a_place_in_ollamas_answer_are_named(http: httpx.Client) -> None:
    """What Ollama's answers cannot hold stands in the header of ignored fields."""
    answer = http.post("/api/chat", json=CHAT | {"options": {"num_predict": 2, "n": 1, "prompt_logprobs": 1}})
    assert (answer.status_code, answer.headers["x-d3-ignored-fields"]) == (200, "options.prompt_logprobs")


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (
            "/v1/messages",
            {"messages": TURNS, "max_tokens": 9, "tools": [{"name": "f", "input_schema": {}}]}
            | {"tool_choice": {"type": "any"}, "output_config": {"format": {"type": "json_schema", "schema": {}}}},
            "output_config must be absent where tools may be called",
        ),
        (
            "/v1/responses",
            {"input": "Tom", "tools": [{"type": "function", "name": "f"}], "tool_choice": "required"}
            | {"text": {"format": {"type": "json_object"}}},
            "text must be absent where tools may be called",
        ),
    ],
)
def test_a_form_beside_tools_is_refused_by_its_own_name(
    http: httpx.Client, path: str, body: dict[str, Any], said: str
) -> None:
    """Each interface has its own name for the form of an answer, in the message too."""
    answer = http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["message"][: len(said)]) == (400, said)


@pytest.mark.parametrize("kind", ["text", "json_object"])
def test_a_form_without_a_schema_may_say_that_it_has_none(http: httpx.Client, kind: str) -> None:
    """`json_schema: null` is as good as absent."""
    asked = {"messages": TURNS, "max_tokens": 2, "response_format": {"type": kind, "json_schema": None}}
    assert http.post("/v1/chat/completions", json=asked).status_code == 200


def test_a_developer_is_the_system_of_templates_without_one(client: AsyncEngine) -> None:
    """A developer's message reaches a template that knows the system's alone."""
    known = "{% for m in messages %}{% if m.role in ('system', 'user') %}{{ m.content }}{% endif %}{% endfor %}"
    own = known.replace("system", "developer")
    counts: dict[tuple[str, str], int] = {}
    with serving_demo(client, trust_request_chat_template=True) as url:
        for template in (known, own):
            for role in ("system", "developer", "tool"):
                turns = [{"role": role, "content": "Be brief and be right."}, *TURNS]
                answer = httpx.post(f"{url}/tokenize", json={"messages": turns, "chat_template": template})
                counts[template, role] = answer.json()["count"]
    assert counts[known, "developer"] == counts[known, "system"] > counts[known, "tool"]
    assert counts[own, "developer"] > counts[own, "system"] == counts[own, "tool"]


def test_a_role_that_no_template_names_is_refused(client: AsyncEngine) -> None:
    """A template that writes any role's name would show the model one that it has never seen."""
    any_role = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    with_reader = "{% for m in messages %}{% if m.role == 'reader' %}!{% endif %}{{ m.content }}{% endfor %}"
    with serving_demo(client, trust_request_chat_template=True) as url:
        for template, role, status in (
            (any_role, "reader", 400),
            (with_reader, "reader", 200),
            (any_role, "developer", 200),
            (any_role, "tool", 200),
            (with_reader, "writer", 400),
        ):
            body = {"messages": [*TURNS, {"role": role, "content": "Tom."}], "chat_template": template, "max_tokens": 1}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body)
            assert answer.status_code == status, answer.text
            if status == 400:
                error = answer.json()["error"]
                assert error["param"] == "messages[1].role"
                assert "messages[1].role must be 'system' or 'user' or" in error["message"]
                assert repr(role) in error["message"]


def test_an_answer_without_text_can_be_sent_back(http: httpx.Client) -> None:
    """A content of null is what an answer has that ends at once."""
    turns = [*TURNS, {"role": "assistant", "content": None}, *TURNS]
    assert http.post("/v1/chat/completions", json={"messages": turns, "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize("empty", ["", [{"type": "text", "text": ""}]])
def test_a_message_that_has_not_begun_begins(http: httpx.Client, empty: Any) -> None:
    """An empty last turn of the assistant's is none."""
    asked = {"messages": TURNS, "max_tokens": 5, "temperature": 0}
    wanted = http.post("/v1/messages", json=asked).json()["content"]
    begun = asked | {"messages": [*TURNS, {"role": "assistant", "content": empty}]}
    assert http.post("/v1/messages", json=begun).json()["content"] == wanted


def test_arguments_of_a_call_keep_large_numbers(tools: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of more than 64 bits, alone on its line, reaches the client of each interface."""
    monkeypatch.setattr(ToolFormat, "arguments", lambda own, nth, schema: json.dumps(ARGUMENTS))
    call_at_once(monkeypatch, several=False)
    message = {"messages": TURNS, "max_tokens": 99, "tools": [{"name": "count", "input_schema": {}}]}
    (block,) = tools.post("/v1/messages", json=message).json()["content"]
    assert {"name": block["name"], "arguments": block["input"]} == CALLED
    offered = {"model": "demo", "messages": TURNS, "tools": [{"type": "function", "function": {"name": "count"}}]}
    for stream in (False, True):
        lines = tools.post("/api/chat", json=offered | {"stream": stream}).text.splitlines()
        calls = [call["function"] for line in lines for call in json.loads(line)["message"].get("tool_calls", ())]
        assert calls == [CALLED]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (rb"Tom \ud83d has", r"\ud83d is half of a character, without its other half."),
        (rb"\\\uD83D", r"\uD83D is half of a character, without its other half."),
        (rb"\\ud83d and no end", "Input data was truncated."),
    ],
)
def test_half_a_character_is_not_called_a_truncated_body(http: httpx.Client, text: bytes, said: str) -> None:
    """A text that a program has cut within an emoji is refused for that."""
    body = b'{"prompt": "' + text + (b"" if text.endswith(b"end") else b'"}')
    answer = http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, f"The body is no JSON: {said}")


def test_a_response_gives_large_numbers_back(http: httpx.Client) -> None:
    """What a response repeats of its request may have numbers of more than 64 bits."""
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": LARGE}}}
    tool = {"type": "function", "name": "f", "parameters": schema}
    asked = {"input": "Tom", "max_output_tokens": 2, "metadata": {"a": LARGE}, "tools": [tool], "tool_choice": "none"}
    answer = http.post("/v1/responses", json=asked)
    assert answer.status_code == 200, answer.text
    assert answer.json()["metadata"] == {"a": LARGE}
    assert answer.json()["tools"][0]["parameters"] == schema


SEPARATED = "Tom\u2028Ann\u2029Bob\x85Eve"


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"messages": TURNS, "structured_outputs": {"choice": [SEPARATED]}}),
        ("/v1/completions", {"prompt": "Tom", "max_tokens": 60, "structured_outputs": {"choice": [SEPARATED]}}),
        ("/api/chat", {"model": "demo", "messages": TURNS, "format": {"enum": [SEPARATED]}}),
    ],
)
def test_a_line_of_a_stream_has_no_separator_within(http: httpx.Client, path: str, asked: dict[str, Any]) -> None:
    """Clients that split a stream at Unicode's separators find whole lines of JSON, and the text in them."""
    with http.stream("POST", path, json=asked | {"stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines()]
    events = [json.loads(line) for line in lines if line not in ("", "[DONE]")]
    if path == "/api/chat":
        assert json.loads("".join(event["message"]["content"] for event in events)) == SEPARATED
    else:
        choices = [event["choices"][0] for event in events]
        assert "".join(one.get("text") or one.get("delta", {}).get("content") or "" for one in choices) == SEPARATED
