"""Streams, event by event: joined they are the whole answer, and they keep OpenAI's form."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from loops import on_a_loop

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


def test_a_streamed_completion_is_the_whole_one_in_pieces(events: Events, openai: Any, question: str) -> None:
    body: dict[str, Any] = {"model": "demo", "prompt": question, "max_tokens": 40}
    whole = openai.completions.create(**body).choices[0]
    found = events("/v1/completions", body)
    assert "".join(one["choices"][0]["text"] for one in found) == whole.text
    assert found  # how many pieces there are depends on how soon they are read
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


def test_choices_of_several_prompts_come_each_in_its_order(events: Events, openai: Any) -> None:
    """Several choices of several prompts come each in its order."""
    body: dict[str, Any] = {"model": "demo", "prompt": ["Tom has", "Ann"], "n": 2, "temperature": 1, "seed": 4}
    whole = openai.completions.create(**body, max_tokens=12, echo=True, logprobs=1)
    found = events("/v1/completions", body | {"max_tokens": 12, "echo": True, "logprobs": 1})
    assert all(len(one["choices"]) == 1 for one in found)  # some clients look at the first alone
    for choice in whole.choices:
        own = [one["choices"][0] for one in found if one["choices"][0]["index"] == choice.index]
        assert "".join(one["text"] for one in own) == choice.text
        assert [one["finish_reason"] for one in own if one["finish_reason"]] == [choice.finish_reason]
        assert own[-1]["finish_reason"]
        whole_of = choice.logprobs.model_dump()
        found_of = {name: [value for one in own for value in one["logprobs"][name]] for name in whole_of}
        assert found_of["tokens"] == whole_of["tokens"]
        assert found_of["text_offset"] == whole_of["text_offset"]
        assert found_of["token_logprobs"] == pytest.approx(whole_of["token_logprobs"], abs=1e-3)
        keys = [[one and set(one) for one in of["top_logprobs"]] for of in (found_of, whole_of)]
        assert keys[0] == keys[1]


def test_a_stop_string_is_never_seen_in_a_stream(events: Events, question: str) -> None:
    body = {"prompt": question, "max_tokens": 40, "stop": ["5 + 3 = 8"], "logprobs": 0}
    found = [one["choices"][0] for one in events("/v1/completions", body)]
    text = "".join(one["text"] for one in found)
    assert text == " Adding 3 makes "
    assert found[-1]["finish_reason"] == "stop"
    told = "".join(token for one in found for token in one["logprobs"]["tokens"])
    assert told.startswith(text + "5 +")  # tokens are told of although their text is held back


def test_an_answer_without_tokens_is_one_chunk(events: Events) -> None:
    (found,) = events("/v1/completions", {"prompt": "Tom has", "max_tokens": 0, "echo": True})
    assert found["choices"] == [{"index": 0, "text": "Tom has", "logprobs": None, "finish_reason": "length"}]


SHALLOW = {"policy": "d3", "alpha": 0.7, "start": 0.6}
MIXED: list[dict[str, Any]] = [
    {"prompt": "Question: Tom has 5 pens. Tom buys 3.", "max_tokens": 9},
    {"prompt": "Ann has 4 cups", "max_tokens": 7, "depth": "full", "return_depths": True},
    {"prompt": "Tom", "max_tokens": 8, "temperature": 1, "seed": 1, "n": 2, "depth": SHALLOW, "return_depths": True},
    {"prompt": ["Tom has", "Ann has"], "max_tokens": 4, "logprobs": 2, "echo": True},
    {"messages": [{"role": "user", "content": "Tom has 5 pens."}], "max_tokens": 6, "logprobs": True},
    {"messages": [{"role": "user", "content": "Ann"}], "max_tokens": 5, "temperature": 1, "seed": 2, "depth": "full"},
]


@on_a_loop
async def test_64_streams_at_once_are_the_same_requests_alone(url: str) -> None:
    """Each choice's text to the byte, its depths and its end. PyTorch computes prompts, and rounds their
    log-probabilities by the rows that are computed with them."""

    async def read(http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[Any, Any]:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        answer = await http.post(path, json=body | {"stream": True})
        assert answer.status_code == 200, answer.text
        events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
        exact: dict[int, list[Any]] = {}
        logprobs: dict[int, list[float]] = {}
        for choice in (choice for one in events for choice in one["choices"]):
            own = exact.setdefault(choice["index"], ["", [], []])
            own[0] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            own[1] += choice.get("d3ext", {}).get("depths", [])
            own[2] += [choice["finish_reason"]] if choice["finish_reason"] else []
            entries = choice["logprobs"] or {}
            found = entries.get("token_logprobs") or [one["logprob"] for one in entries.get("content") or []]
            logprobs.setdefault(choice["index"], []).extend(value or 0.0 for value in found)
        return exact, logprobs

    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        alone = [await read(http, body) for body in MIXED]
        together = await asyncio.gather(*(read(http, MIXED[nth % len(MIXED)]) for nth in range(64)))
    for nth, (exact, logprobs) in enumerate(together):
        assert exact == alone[nth % len(MIXED)][0]
        for index, values in alone[nth % len(MIXED)][1].items():
            assert logprobs[index] == pytest.approx(values, abs=1e-3)
