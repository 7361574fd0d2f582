"""Streams, event by event: joined they are the whole answer, and they keep OpenAI's form."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai import OpenAI

Events = Any


@pytest.fixture
def events(http: httpx.Client) -> Events:
    """`events(path, body)`: the events of a stream, the last of which must be [DONE]."""

    def read(path: str, body: dict[str, Any]) -> list[Any]:
        with http.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["cache-control"] == "no-cache"
            assert answer.headers["x-accel-buffering"] == "no"
            text = "".join(answer.iter_text())
        *found, last, end = text.split("\n\n")
        assert (last, end) == ("data: [DONE]", "")
        return [json.loads(one.removeprefix("data: ")) for one in found]

    return read


def test_a_streamed_completion_is_the_whole_one_in_pieces(events: Events, openai: OpenAI, question: str) -> None:
    body: dict[str, Any] = {"model": "demo", "prompt": question, "max_tokens": 40}
    whole = openai.completions.create(**body).choices[0]
    found = events("/v1/completions", body)
    assert "".join(one["choices"][0]["text"] for one in found) == whole.text
    assert len(found) > 1
    assert len({(one["id"], one["created"], one["model"], one["object"]) for one in found}) == 1
    assert [one["choices"][0]["finish_reason"] for one in found] == [None] * (len(found) - 1) + ["stop"]
    assert not any("usage" in one or "d3ext" in one for one in found)


@pytest.mark.parametrize("continuous", [False, True])
def test_usage_comes_where_it_is_asked_for(events: Events, http: httpx.Client, question: str, continuous: bool) -> None:
    body = {"prompt": question, "max_tokens": 40}
    http.post("/v1/completions", json=body)  # so that as much is cached for each of the two that count
    whole = http.post("/v1/completions", json=body).json()["usage"]
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    *chunks, last = events("/v1/completions", body | {"stream_options": options})
    assert (last["choices"], last["usage"]) == ([], whole)
    counts = [chunk["usage"] and chunk["usage"]["completion_tokens"] for chunk in chunks]
    if continuous:
        assert counts == sorted(counts)
        assert counts[-1] == whole["completion_tokens"]
    else:
        assert set(counts) == {None}


def test_several_choices_of_several_prompts_come_each_in_its_order(events: Events, openai: OpenAI) -> None:
    body: dict[str, Any] = {"model": "demo", "prompt": ["Tom has", "Ann"], "n": 2, "temperature": 1, "seed": 4}
    whole = openai.completions.create(**body, max_tokens=12, echo=True, logprobs=1)
    found = events("/v1/completions", body | {"max_tokens": 12, "echo": True, "logprobs": 1})
    assert all(len(one["choices"]) == 1 for one in found)  # some clients look at the first alone
    for choice in whole.choices:
        own = [one["choices"][0] for one in found if one["choices"][0]["index"] == choice.index]
        assert "".join(one["text"] for one in own) == choice.text
        assert [one["finish_reason"] for one in own if one["finish_reason"]] == [choice.finish_reason]
        assert own[-1]["finish_reason"]
        assert choice.logprobs is not None
        for name, values in choice.logprobs.model_dump().items():
            assert [value for one in own for value in one["logprobs"][name]] == values


def test_a_stop_string_is_never_seen_in_a_stream(events: Events, question: str) -> None:
    body = {"prompt": question, "max_tokens": 40, "stop": ["5 + 3 = 8"], "logprobs": 0}
    found = [one["choices"][0] for one in events("/v1/completions", body)]
    text = "".join(one["text"] for one in found)
    assert text == " Adding 3 makes "
    assert found[-1]["finish_reason"] == "stop"
    held = [one for one in found if not one["text"] and one["logprobs"]["tokens"]]
    assert held  # tokens are told of while their text is held back


def test_an_answer_without_tokens_is_one_chunk(events: Events) -> None:
    (found,) = events("/v1/completions", {"prompt": "Tom has", "max_tokens": 0, "echo": True})
    assert found["choices"] == [{"index": 0, "text": "Tom has", "logprobs": None, "finish_reason": "length"}]
