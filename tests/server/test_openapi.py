"""/openapi.json: every route is in it, and what the official client sends and gets is what it says."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai import OpenAI


@pytest.fixture(scope="module")
def described(http: httpx.Client) -> Any:
    return http.get("/openapi.json").json()


def fits(value: Any, schema: dict[str, Any], schemas: dict[str, Any]) -> bool:
    """Whether a value satisfies a schema, by the few words that these schemas are made of."""
    if "$ref" in schema:
        return fits(value, schemas[schema["$ref"].rpartition("/")[2]], schemas)
    if "anyOf" in schema:
        return any(fits(value, one, schemas) for one in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    match schema.get("type"):
        case "object":
            properties = schema.get("properties", {})
            return (
                isinstance(value, dict)
                and set(schema.get("required", ())) <= set(value)
                and all(fits(value[name], one, schemas) for name, one in properties.items() if name in value)
                and (not properties or set(value) <= set(properties))
            )
        case "array":
            return isinstance(value, list) and all(fits(item, schema.get("items", {}), schemas) for item in value)
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case None:
            return True
    raise AssertionError(schema)


def test_every_route_of_the_app_is_in_it(described: Any) -> None:
    from d3engine.server.app import ROUTES

    there = {(path, method.upper()) for path, item in described["paths"].items() for method in item}
    routes = {(route.path.replace(":path}", "}"), method) for route in ROUTES for method in route.methods or ()}
    assert {(path, method) for path, method in routes if method != "HEAD"} <= there
    posts = [item["post"] for item in described["paths"].values() if "post" in item]
    assert all("requestBody" in post for post in posts)


def test_every_shape_that_it_refers_to_is_in_it(described: Any) -> None:
    import re

    named = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(described)))
    assert named == set(described["components"]["schemas"])


def test_it_says_what_the_official_client_sends_and_gets(described: Any, url: str) -> None:
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
        client.models.list()
    schemas = described["components"]["schemas"]
    for path, sent, got in seen:
        (operation,) = described["paths"][path].values()
        if sent:
            body = operation["requestBody"]["content"]["application/json"]["schema"]
            assert fits(json.loads(sent), body, schemas)
            assert not fits(json.loads(sent) | {"n": "2"}, body, schemas)
        assert fits(json.loads(got), operation["responses"]["200"]["content"]["application/json"]["schema"], schemas)
    assert len(seen) == 3


def test_errors_are_what_it_says(described: Any, http: httpx.Client) -> None:
    error = described["paths"]["/v1/completions"]["post"]["responses"]["default"]["content"]["application/json"]
    assert fits(http.post("/v1/completions", json={}).json(), error["schema"], described["components"]["schemas"])
