"""/openapi.json: every route is in it, and what the official client sends and gets is what it says."""

import json
import re
from typing import Any

import httpx
import pytest
from openai import OpenAI

from d3engine import AsyncEngine
from d3engine.server.app import ROUTES


@pytest.fixture(scope="module")
def described(http: httpx.Client) -> Any:
    return http.get("/openapi.json").json()


@pytest.fixture(scope="module")
def faults(described: Any) -> Any:
    """`faults(value, "Shape")`: what of a value is not as the description says; an undescribed field is a fault too."""
    from jsonschema import Draft202012Validator
    from referencing import Registry
    from referencing.jsonschema import DRAFT202012

    closed = json.loads(json.dumps(described))
    for schema in closed["components"]["schemas"].values():
        if "properties" in schema:
            schema["additionalProperties"] = False
    registry: Any = Registry().with_resource("urn:openapi", DRAFT202012.create_resource(closed))

    def find(value: Any, shape: str) -> list[str]:
        schema = {"$ref": f"urn:openapi#/components/schemas/{shape}"}
        return [
            f"{e.json_path}: {e.message}" for e in Draft202012Validator(schema, registry=registry).iter_errors(value)
        ]

    return find


def shape_of(content: Any) -> str:
    """The name of the shape of a JSON body."""
    found: str = content["application/json"]["schema"]["$ref"]
    return found.rpartition("/")[2]


def test_every_route_of_the_app_is_in_it(described: Any) -> None:
    there = {(path, method.upper()) for path, item in described["paths"].items() for method in item}
    routes = {(route.path.replace(":path}", "}"), method) for route in ROUTES for method in route.methods or ()}
    assert {(path, method) for path, method in routes if method != "HEAD"} <= there
    bare = {path for path, item in described["paths"].items() if "requestBody" not in item.get("post", "requestBody")}
    assert bare == {"/sleep", "/wake_up"}


def test_every_shape_that_it_refers_to_is_in_it(described: Any) -> None:
    named = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(described)))
    assert named == set(described["components"]["schemas"])


def test_it_says_what_the_official_client_sends_and_gets(described: Any, faults: Any, url: str) -> None:
    seen = []

    def note(answer: httpx.Response) -> None:
        answer.read()
        seen.append((answer.request.url.path, answer.request.content, answer.content))

    with OpenAI(
        base_url=f"{url}/v1", api_key="none", http_client=httpx.Client(event_hooks={"response": [note]})
    ) as client:
        asked: Any = {"model": "demo", "max_tokens": 3, "temperature": 0.5, "seed": 1, "stop": ["#"], "n": 2}
        client.completions.create(prompt=["Tom has", "Ann"], logprobs=2, logit_bias={"5": 1}, **asked)
        messages: Any = [{"role": "user", "content": "Tom has 5 pens."}]
        client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=2, **asked)
        client.responses.create(model="demo", input=messages, max_output_tokens=3, instructions="Be brief.")
        client.models.list()
    for path, sent, got in seen:
        (operation,) = described["paths"][path].values()
        if sent:
            body = shape_of(operation["requestBody"]["content"])
            assert faults(json.loads(sent), body) == []
            assert faults(json.loads(sent) | {"temperature": "2"}, body)
        assert faults(json.loads(got), shape_of(operation["responses"]["200"]["content"])) == []
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "Tom has 5 pens."}], "max_tokens": 3}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "Tom has 5 pens."}]}),
        ("/tokenize", {"prompt": "Tom", "return_token_strs": True}),
        ("/detokenize", {"tokens": [5, 6]}),
        ("/tokenize", {"content": "Tom", "with_pieces": True}),
        ("/tokenizer_info", None),
        ("/v1/embeddings", {"input": ["Tom", "Ann"], "encoding_format": "base64", "dimensions": 3}),
        ("/api/chat", {"model": "demo", "messages": [{"role": "user", "content": "Tom"}], "stream": False}),
        ("/api/chat", {"model": "demo"}),
        ("/api/generate", {"model": "demo", "prompt": "Tom", "stream": False, "raw": True, "logprobs": True}),
        ("/api/embed", {"model": "demo", "input": ["Tom", "Ann"]}),
        ("/api/embeddings", {"model": "demo", "prompt": "Tom"}),
        ("/api/show", {"model": "demo"}),
        ("/api/tags", None),
        ("/api/ps", None),
        ("/api/version", None),
        ("/completion", {"prompt": "Tom has", "n_predict": 3, "n_probs": 2, "temperature": 0.0}),
        ("/completions", {"prompt": ["Tom", 5], "n_predict": 3, "logit_bias": {"5": 1.0}}),
        ("/apply-template", {"messages": [{"role": "user", "content": "Tom has 5 pens."}]}),
        ("/props", None),
        ("/v1/models/demo", None),
        ("/health", None),
        ("/ready", None),
        ("/version", None),
        ("/is_sleeping", None),
    ],
)
def test_answers_of_routes_are_what_it_says(
    described: Any, faults: Any, http: httpx.Client, path: str, asked: Any
) -> None:
    if asked is None:
        answer = http.get(path)
        operation = described["paths"][path.replace("demo", "{name}")]["get"]
    else:
        answer = http.post(path, json=asked)
        operation = described["paths"][path]["post"]
        assert faults(asked, shape_of(operation["requestBody"]["content"])) == []
    assert answer.status_code == 200
    assert faults(answer.json(), shape_of(operation["responses"]["200"]["content"])) == []
    for name in operation["responses"]["200"]["headers"]:
        assert name == "X-D3-Ignored-Fields" or name in answer.headers


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": "Tom has 5 pens."}]}),
        ("/api/generate", {"prompt": "Tom has", "raw": True, "logprobs": True, "top_logprobs": 1}),
    ],
)
def test_lines_of_streams_are_what_it_says(
    described: Any, faults: Any, http: httpx.Client, path: str, asked: Any
) -> None:
    answer = http.post(path, json={"model": "demo", "options": {"num_predict": 4}, **asked})
    assert answer.headers["content-type"] == "application/x-ndjson"
    says = described["paths"][path]["post"]["responses"]["200"]["content"]["application/x-ndjson"]["schema"]
    shape, failed = [one["$ref"].rpartition("/")[2] for one in says["anyOf"]]
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert [fault for line in lines for fault in faults(line, shape)] == []
    assert lines[-1]["done"]
    error = http.post(path, json={"model": "demo", "options": {"num_predict": -9}, **asked})
    assert (error.status_code, faults(error.json(), failed)) == (400, [])


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/completion", {"prompt": "Tom has", "n_probs": 1}),
        ("/v1/completions", {"prompt": "Tom has", "logprobs": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Tom has 5 pens."}]}),
        ("/v1/responses", {"input": "Tom has 5 pens.", "max_output_tokens": 5}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Tom has 5 pens."}], "max_tokens": 5}),
    ],
)
def test_events_of_streams_are_what_it_says(
    described: Any, faults: Any, http: httpx.Client, path: str, asked: Any
) -> None:
    text = http.post(path, json=asked | {"stream": True, "return_depths": True}).text
    says = described["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
    data = says["properties"]["data"]
    kinds = data.get("anyOf", [data])
    shapes = [one["$ref"].rpartition("/")[2] for one in kinds[-1]["contentSchema"]["anyOf"]]
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    assert ("[DONE]" in lines) == (len(kinds) == 2)
    seen = set()
    for line in lines:
        if line != "[DONE]":
            fitting = [shape for shape in shapes if not faults(json.loads(line), shape)]
            assert fitting, (line, [faults(json.loads(line), shape) for shape in shapes])
            seen.update(fitting)
    assert len(seen) >= (1 if len(kinds) == 2 or path == "/completion" else 4)


@pytest.mark.parametrize(
    ("path", "asked", "status"),
    [
        ("/v1/completions", {}, 400),
        ("/v1/completions", {"prompt": "a", "model": "gpt"}, 404),
        ("/v1/messages", {}, 400),
        ("/v1/messages", {"messages": [], "max_tokens": 1, "model": "claude"}, 400),
        ("/v1/responses", {"input": "a", "store": True}, 400),
    ],
)
def test_errors_are_what_it_says_by_their_status(
    described: Any, faults: Any, http: httpx.Client, path: str, asked: Any, status: int
) -> None:
    answer = http.post(path, json=asked)
    assert answer.status_code == status
    said = described["paths"][path]["post"]["responses"][str(status)]
    assert faults(answer.json(), shape_of(said["content"])) == []
    assert "default" not in described["paths"][path]["post"]["responses"]


LISTED = {"stop": 16, "stop_token_ids": 256, "bad_words": 256}
MESSAGES = [{"role": "user", "content": "Tom"}]
OLLAMA = {"model": "demo", "stream": False}
FURTHER_LIMITS = ("maximum context length", "room for", "does not think", "unless echo is true")
"""What refuses a value within its bounds: the model's length, the server's room, a model that does not reason, and an
answer without a token that repeats no prompt."""


@pytest.mark.parametrize(
    ("shape", "path", "asked", "place"),
    [
        ("CompletionRequest", "/v1/completions", {"prompt": "Tom", "max_tokens": 2}, None),
        ("ChatRequest", "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2, "logprobs": True}, None),
        ("ResponsesRequest", "/v1/responses", {"input": "Tom", "max_output_tokens": 2}, None),
        ("MessagesRequest", "/v1/messages", {"messages": MESSAGES, "max_tokens": 2}, None),
        ("LlamaCompletionRequest", "/completion", {"prompt": "Tom", "max_tokens": 2}, None),
        ("OllamaOptions", "/api/chat", {**OLLAMA, "messages": MESSAGES}, "options"),
        ("OllamaOptions", "/api/generate", {**OLLAMA, "prompt": "Tom"}, "options"),
        ("OllamaOptions", "/api/generate", {**OLLAMA, "prompt": "Tom", "raw": True}, "options"),
    ],
)
def test_every_bound_that_it_tells_is_one_that_is_kept(
    described: Any, http: httpx.Client, shape: str, path: str, asked: dict[str, Any], place: str | None
) -> None:
    """What is just beyond a bound is refused by its field, and what is just within is not refused for that."""

    def refusal(field: str, value: Any) -> str:
        """What the server says against this value; "" where it takes it."""
        own = {field: value} if place is None else {place: {"num_predict": 2, field: value}}
        rest = {name: value for name, value in asked.items() if name != "max_tokens" or not field.startswith("max_")}
        answer = http.post(path, json=rest | own)
        assert answer.status_code in (200, 400), (field, value, answer.text)
        return "" if answer.status_code == 200 else answer.text

    checked = set()
    for field, schema in described["components"]["schemas"][shape]["properties"].items():
        for kind in schema.get("anyOf", [schema]):
            for bound, step in (("minimum", -1), ("exclusiveMinimum", 0), ("maximum", 1)):
                if bound in kind:
                    assert f"{field} must be" in refusal(field, kind[bound] + step), (field, kind)
                    within = refusal(field, kind[bound]) if step else ""
                    assert field not in within or any(limit in within for limit in FURTHER_LIMITS), (within, kind)
                    checked.add(field)
            if kind.get("type") == "array" and field in LISTED:
                item = "a" if field != "stop_token_ids" else 5
                assert kind["maxItems"] == LISTED[field]
                assert field in refusal(field, [item] * (LISTED[field] + 1))
                checked.add(field)
    assert checked >= {"temperature", "top_p", "top_k"}


def test_infill_has_the_bounds_of_llama_cpps_completion(described: Any) -> None:
    """The bundled model fills in no gap, so that its server refuses every infill; both routes share their sampling."""
    infill, completion = (
        described["components"]["schemas"][f"Llama{name}Request"] for name in ("Infill", "Completion")
    )
    shared = {
        name: schema for name, schema in infill["properties"].items() if not name.startswith(("input_", "prompt"))
    }
    assert shared.items() <= completion["properties"].items()
    assert "temperature" in shared


def test_the_models_own_bounds_are_in_it(described: Any, client: AsyncEngine) -> None:
    kinds = described["components"]["schemas"]["CompletionRequest"]["properties"]["prompt"]["anyOf"]
    ids = next(kind for kind in kinds if kind["type"] == "array" and kind["items"]["type"] == "integer")
    assert (ids["maxItems"], ids["items"]["maximum"]) == (client.max_model_len - 1, client.config.vocab_size - 1)
