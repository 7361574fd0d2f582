"""What a server says of drafts: a request's usage as OpenAI names it, and vLLM's metrics."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from demo_server import demo_server, openai_of

REPEATS = "one two three four five one two three four five one two three four five one two three"


@pytest.fixture(scope="module")
def drafting() -> Iterator[str]:
    """The address of a server whose engine looks up its drafts."""
    with demo_server(speculative_config={"method": "ngram", "num_speculative_tokens": 3}) as address:
        yield address


def metrics(address: str) -> dict[str, float]:
    """The metrics of drafts by their names, and by their position where they have one."""
    text = httpx.get(f"{address}/metrics").text
    found = re.findall(
        r'^\w+?:spec_decode_num_(\w+)_total(?:{.*?position="(\d+)".*?}|{.*?})? (\S+)$', text, re.MULTILINE
    )
    return {name + position: float(value) for name, position, value in found}


def test_draft_usage_and_metrics_count_the_same_tokens(drafting: str) -> None:
    """The usage of a request counts its drafted tokens, and the metrics count those of all."""
    before = metrics(drafting)
    with openai_of(drafting) as client:
        asked: dict[str, Any] = {"model": "demo", "prompt": [REPEATS, REPEATS + " four"], "max_tokens": 30}
        sampled: dict[str, Any] = asked | {"n": 2, "temperature": 0.5, "seed": 1}
        whole = client.completions.create(**sampled)
        *_, last = client.completions.create(**sampled, stream=True, stream_options={"include_usage": True})
        plain = client.completions.create(**asked, extra_body={"depth": "full"})
    details = whole.usage.completion_tokens_details
    accepted, rejected = details.accepted_prediction_tokens, details.rejected_prediction_tokens
    assert 0 < accepted < whole.usage.completion_tokens
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.completion_tokens_details == details
    assert plain.usage.completion_tokens_details is None
    after = metrics(drafting)
    gained = {name: after[name] - before[name] for name in after}
    assert gained["accepted_tokens"] == 2 * accepted
    assert gained["draft_tokens"] == 2 * (accepted + rejected)
    assert sum(gained[f"accepted_tokens_per_pos{place}"] for place in range(3)) == 2 * accepted
    assert gained["accepted_tokens_per_pos0"] >= gained["accepted_tokens_per_pos2"]
    assert 0 < gained["drafts"] <= gained["draft_tokens"]
    assert gained["accepted_tokens_per_pos3"] == 0


def test_the_other_interfaces_answer_where_drafts_are_counted(drafting: str) -> None:
    messages = {"model": "demo", "max_tokens": 20, "messages": [{"role": "user", "content": REPEATS}]}
    chat = httpx.post(f"{drafting}/v1/chat/completions", json=messages).json()
    assert set(chat["usage"]["completion_tokens_details"]) == {
        "accepted_prediction_tokens",
        "rejected_prediction_tokens",
    }
    assert httpx.post(f"{drafting}/v1/messages", json=messages).status_code == 200
    response = httpx.post(f"{drafting}/v1/responses", json={"model": "demo", "input": REPEATS, "max_output_tokens": 20})
    assert response.status_code == 200
