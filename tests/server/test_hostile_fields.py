"""Every field of every route with values that nobody should send: refused or honoured, never a fault of the server's.
The fields are those of /openapi.json, so one that is added later is tried too."""

import json
from typing import Any

import httpx
import pytest
from demo_server import LEAST, TURNS

JSON = {"content-type": "application/json"}
ASKED = LEAST | {
    "/v1/messages/count_tokens": {"messages": TURNS},
    "/tokenize": {"prompt": "Tom"},
    "/detokenize": {"tokens": [5]},
}
HOSTILE: list[Any] = [True, 2**64, "\ud800\x00", [None, "a", {}], {"type": "json_schema", "a": [[{}]]}]


@pytest.mark.parametrize("path", ASKED)
def test_no_value_of_any_field_is_a_fault_of_the_servers(http: httpx.Client, path: str) -> None:
    described = http.get("/openapi.json").json()
    operation = described["paths"][path]["post"]
    shape = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    refused = 0
    for field in described["components"]["schemas"][shape]["properties"]:
        if field in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            continue  # of which the largest is honoured, and takes its time
        for value in HOSTILE:
            body = json.dumps(ASKED[path] | {field: value}).encode()
            answer = http.post(path, content=body, headers=JSON)
            assert str(answer.status_code) in operation["responses"], (field, value)
            assert answer.status_code in (200, 400, 404), (field, value, answer.text)
            refused += answer.status_code != 200
    assert refused > 5


def test_every_number_at_its_bound_is_answered(http: httpx.Client) -> None:
    """A penalty of nearly nothing once made logits that were no numbers, and so a fault of what could be foreseen."""
    shape = http.get("/openapi.json").json()["components"]["schemas"]["CompletionRequest"]["properties"]
    asked = {"prompt": "Tom has <unk>", "max_tokens": 3, "temperature": 1, "seed": 1}
    tried = 0
    for field, schema in shape.items():
        for kind in schema.get("anyOf", ()):
            bounds = {name: kind[name] for name in ("minimum", "maximum", "exclusiveMinimum") if name in kind}
            if field in ("n", "best_of", "max_tokens", "min_tokens"):
                continue  # whose bounds depend on each other, and on the room that there is
            for name, bound in bounds.items():
                value = 5e-324 if name == "exclusiveMinimum" else bound
                answer = http.post("/v1/completions", json=asked | {field: value})
                assert answer.status_code == 200, (field, value, answer.text)
                tried += 1
    assert tried > 15


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "frequency_penalty", "repetition_penalty"])
def test_what_is_no_finite_number_is_refused(http: httpx.Client, field: str, number: str) -> None:
    """Row 5 of the security list: JSON has no such number, and one too large for a float is none either."""
    for body in (f'{{"prompt": "Tom", "{field}": {number}}}', f'{{"prompt": "Tom", "logit_bias": {{"5": {number}}}}}'):
        answer = http.post("/v1/completions", content=body, headers=JSON)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
