"""Every field of the official clients' request types is honoured, refused by name, or known to change no answer."""

import importlib
from typing import Any

import httpx
import pytest
from demo_server import LEAST

from d3engine import SamplingParams
from d3engine.server.requests.refused import taken_names
from d3engine.server.requests.sampling import sampling_params
from d3engine.server.schemas.requests import CompletionRequest

TYPES = [
    ("openai.types.chat.completion_create_params", "CompletionCreateParamsBase", "requests", "ChatRequest"),
    ("openai.types.completion_create_params", "CompletionCreateParamsBase", "requests", "CompletionRequest"),
    ("openai.types.responses.response_create_params", "ResponseCreateParamsBase", "responses", "ResponsesRequest"),
    ("anthropic.types.message_create_params", "MessageCreateParamsBase", "messages", "MessagesRequest"),
    ("anthropic.types.message_count_tokens_params", "MessageCountTokensParams", "messages", "CountTokensRequest"),
]
TOOLS = [
    ("openai.types.shared_params", "FunctionDefinition", "requests", "Function"),
    ("openai.types.responses", "FunctionToolParam", "responses", "ResponseTool"),
    ("anthropic.types", "ToolParam", "messages", "MessageTool"),
    ("anthropic.types", "OutputConfigParam", "messages", "OutputConfig"),
]
"""What forbids fields that it does not know."""
OFF = (
    {"use_beam_search": False, "mirostat": 0, "dry_multiplier": 0.0, "xtc_probability": 0, "typical_p": 1.0}
    | {"repeat_penalty": 1.0, "length_penalty": 1.0, "early_stopping": False, "best_of": 1, "n": 1}
    | {"documents": None, "min_p": 0, "mirostat_tau": 5.0}
)
"""Values that ask for nothing, as programs made for other servers send them."""
PART = {"type": "text", "text": "Tom", "cache_control": {"type": "ephemeral"}, "citations": None}
NOTHING: dict[str, dict[str, Any]] = {
    "/v1/completions": {"user": "me", "metadata": {"a": "b"}, "service_tier": "auto", "best_of": 1, "suffix": None}
    | {"n": None, "response_format": {"type": "text"}},
    "/v1/chat/completions": {"modalities": ["text"], "store": False, "tool_choice": "auto", "metadata": {}}
    | {"response_format": {"type": "text"}, "parallel_tool_calls": True, "user": "me", "tools": []}
    | {"max_completion_tokens": 2, "max_tokens": 2},
    "/v1/responses": {"store": False, "background": False, "tools": [], "tool_choice": "auto", "user": "me"}
    | {"parallel_tool_calls": True, "include": [], "text": {"format": {"type": "text"}}, "truncation": "disabled"}
    | {"stream_options": {"include_obfuscation": False}, "previous_response_id": None},
    "/v1/messages": {"messages": [{"role": "user", "content": [PART]}], "metadata": {"user_id": "me"}, "tools": []}
    | {"service_tier": "auto", "thinking": {"type": "disabled"}, "system": [], "stop_sequences": []}
    | {"cache_control": {"type": "ephemeral"}},
}
"""And values that ask for nothing more than a route does anyway."""
ON = (
    {"use_beam_search": True, "mirostat": 2, "dry_multiplier": 0.8, "xtc_probability": 0.5, "typical_p": 0.9}
    | {"repeat_penalty": 1.1, "length_penalty": 2.0, "early_stopping": True, "documents": [{"text": "a"}]}
    | {"truncate_prompt_tokens": 5, "top_n_sigma": 1.0, "num_ctx": 2048, "max_new_tokens": 5}
    | {"prompt_embeds": "gASVCAAAAAAAAACMBHRlc3SULg=="}  # row 10 of the security list: no tensors of a stranger
)


HONOURED = {"dry_multiplier", "xtc_probability", "typical_p", "repeat_penalty", "truncate_prompt_tokens", "top_n_sigma"}
"""Of these, what completions and chats do."""


def annotations(kind: Any) -> set[str]:
    return {name for base in kind.__mro__ for name in getattr(base, "__annotations__", {})}


@pytest.mark.parametrize(("module", "name", "file", "shape"), TYPES)
def test_every_field_of_a_clients_request_is_known(module: str, name: str, file: str, shape: str) -> None:
    own = getattr(importlib.import_module(f"d3engine.server.schemas.{file}"), shape)
    fields = annotations(getattr(importlib.import_module(module), name)) or set()
    assert len(fields) > 8
    assert fields - {*own.__struct_fields__, *taken_names(own)} == set()


@pytest.mark.parametrize(("module", "name", "file", "shape"), TOOLS)
def test_every_field_of_a_clients_tool_is_honoured_or_refused(module: str, name: str, file: str, shape: str) -> None:
    own = getattr(importlib.import_module(f"d3engine.server.schemas.{file}"), shape)
    assert own.__struct_config__.forbid_unknown_fields
    assert {*own.__struct_fields__} & annotations(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize("path", LEAST)
def test_fields_that_change_an_answer_are_refused_on_each_route(http: httpx.Client, path: str) -> None:
    """Fields that change an answer are honoured, or refused by name on every route."""
    for name, value in ON.items():
        answer = http.post(path, json=LEAST[path] | {name: value})
        if name in HONOURED and path in ("/v1/completions", "/v1/chat/completions"):
            assert answer.status_code == 200, (name, answer.text)
            assert "x-d3-ignored-fields" not in answer.headers
            continue
        assert answer.status_code == 400, (name, answer.text)
        assert answer.json()["error"]["message"].startswith(f"{name} must be absent"), answer.text


@pytest.mark.parametrize(
    ("path", "fields"), [*((path, OFF) for path in LEAST), *NOTHING.items()], ids=lambda value: str(value)[:30]
)
def test_values_that_ask_for_nothing_pass(http: httpx.Client, path: str, fields: dict[str, Any]) -> None:
    answer = http.post(path, json=LEAST[path] | fields)
    assert answer.status_code == 200, answer.text
    assert "x-d3-ignored-fields" not in answer.headers


@pytest.mark.parametrize("path", LEAST)
def test_whole_number_written_as_a_fraction_is_read(http: httpx.Client, path: str) -> None:
    """Clients whose numbers are all floats write 2 as 2.0; what is no whole number is refused by its name."""
    field = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    answer = http.post(path, json=LEAST[path] | {field: 2.0})
    assert answer.status_code == 200, answer.text
    refused = http.post(path, json=LEAST[path] | {field: 2.5})
    assert refused.json()["error"]["message"].startswith(f"{field} must be an integer")


def test_a_penalty_by_another_servers_name_is_the_penalty(http: httpx.Client) -> None:
    asked = LEAST["/v1/completions"] | {"max_tokens": 20}
    answers = [
        http.post("/v1/completions", json=asked | more).json()["choices"][0]["text"]
        for more in ({}, {"repetition_penalty": 3.0}, {"repeat_penalty": 3.0}, {"rep_pen": 3.0})
    ]
    assert answers[0] != answers[1]
    assert answers[1:] == answers[1:2] * 3
    refused = http.post("/v1/completions", json=asked | {"repeat_penalty": 3.0, "repetition_penalty": 2.0})
    assert refused.json()["error"]["param"] == "repeat_penalty"


def test_a_truncated_prompt_is_its_end(http: httpx.Client) -> None:
    whole = http.post("/tokenize", json={"prompt": "Question: Tom has 5 pens. Tom finds 3."}).json()["tokens"]
    asked: dict[str, Any] = {"max_tokens": 8, "return_token_ids": True}
    wanted = http.post("/v1/completions", json=asked | {"prompt": whole[-4:]}).json()
    found = http.post("/v1/completions", json=asked | {"prompt": whole, "truncate_prompt_tokens": 4}).json()
    assert found["usage"] == wanted["usage"] | {"prompt_tokens_details": found["usage"]["prompt_tokens_details"]}
    assert found["choices"][0]["token_ids"] == wanted["choices"][0]["token_ids"]
    chat = {"messages": [{"role": "user", "content": "Tom " * 5000}], "truncate_prompt_tokens": -1, "max_tokens": 4}
    answer = http.post("/v1/chat/completions", json=chat).json()
    length = http.get("/v1/models").json()["data"][0]["max_model_len"]
    assert answer["usage"]["prompt_tokens"] == length - 4
    echo = asked | {"prompt": whole, "truncate_prompt_tokens": 4, "echo": True}
    assert http.post("/v1/completions", json=echo).json()["error"]["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"max_tokens": 5, "n": 2, "stop": ["a"], "presence_penalty": 1}),
        ("/v1/messages", {"stop": ["a"], "logprobs": True, "response_format": {"type": "json_object"}}),
        ("/v1/completions", {"messages": [], "max_completion_tokens": 5}),
        ("/v1/chat/completions", {"prompt": "a", "echo": True, "best_of": 2}),
    ],
)
def test_a_field_of_another_route_is_refused(http: httpx.Client, path: str, fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        answer = http.post(path, json=LEAST[path] | {name: value})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"].startswith(f"{name} must be absent")


def test_several_answers_have_the_apis_temperature() -> None:
    """Several answers have the API's default temperature, not the model's."""
    for file in (0.0, 0.7):
        defaults = SamplingParams(temperature=file)
        for asked, expected in (
            (CompletionRequest(prompt="a", n=2), 1.0),
            (CompletionRequest(prompt="a", n=2, temperature=0.5), 0.5),
            (CompletionRequest(prompt="a", n=1), file),
            (CompletionRequest(prompt="a"), file),
        ):
            assert sampling_params(asked, defaults, None).temperature == expected
    best = sampling_params(CompletionRequest(prompt="a", best_of=2), SamplingParams(temperature=0.0), None, n=2)
    assert best.temperature == 1.0
