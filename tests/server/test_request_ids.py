"""Ids that clients give: they come back, and steer nothing."""

import json
from typing import Any

import httpx

ID = {"X-Request-Id": "mine-1"}


def asked(prompt: str, **more: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True} | more


def test_repeated_id_in_flight_ends_its_request_alone(http: httpx.Client) -> None:
    """Row 18 of the security list: an id that is repeated in flight ends with its own request alone."""
    body = asked("Tom has 5 pens.", max_tokens=80)
    whole = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    with http.stream("POST", "/v1/completions", json=body | {"stream": True}, headers=ID) as first:
        lines = first.iter_lines()
        next(lines)  # it is in flight
        second = http.post("/v1/completions", json=asked("Ann has 3 cups."), headers=ID)
        with http.stream("POST", "/v1/completions", json=body | {"stream": True}, headers=ID) as third:
            next(third.iter_lines())  # and leaves: the first must not go with it
        rest = [line for line in lines if line]
    assert second.status_code == 200
    assert second.headers["x-request-id"] == "mine-1"
    assert rest[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in rest[:-1]]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert whole.endswith("".join(chunk["choices"][0]["text"] for chunk in chunks))
    assert second.json()["id"] != chunks[0]["id"]
