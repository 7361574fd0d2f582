"""How far a prompt is computed, told in a stream before its first token."""

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from demo_server import serving_demo

from d3engine import AsyncEngine, Engine, SamplingParams
from d3engine.server.responses import running

STEP_TOKENS, NUM_HELD = 32, 3
SIZES: dict[str, Any] = {"device": "cpu", "kv_cache_memory_bytes": 2**24, "max_num_seqs": 4}
SIZES["max_num_batched_tokens"] = STEP_TOKENS


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where an engine answers that computes 32 tokens of a prompt a step, and that is asked after each of three."""
    asked, num_steps = threading.Event(), itertools.count()

    def before_step() -> None:
        if next(num_steps) < NUM_HELD:
            assert asked.wait(60)
            asked.clear()

    made = Engine("demo", **SIZES)
    client = AsyncEngine.from_engine(made, before_step=before_step)
    stats = client.stats

    async def noted() -> Any:
        asking = asyncio.ensure_future(stats())
        await asyncio.sleep(0)  # it is in the engine's inbox
        asked.set()
        return await asking

    monkeypatch.setattr(client, "stats", noted)
    monkeypatch.setattr(running, "PROGRESS_SECONDS", 0)
    with serving_demo(client) as found:
        yield found
    asyncio.run(client.close())


def events(address: str, path: str, **body: Any) -> list[dict[str, Any]]:
    text = httpx.post(address + path, json={"stream": True, "max_tokens": 4, **body}, timeout=60).text
    return [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]


def text_of(events: list[dict[str, Any]]) -> str:
    """The text of all choices, however many tokens each event has."""
    choices = [choice for one in events for choice in one["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_tells_how_far_its_prompt_is_read(address: str, path: str) -> None:
    words = "Tom has 5 pens. " * 40
    asked = {"prompt": words} if path == "/v1/completions" else {"messages": [{"role": "user", "content": words}]}
    found = events(address, path, return_progress=True, stream_options={"include_usage": True}, **asked)
    told = [one["prompt_progress"] for one in found if "prompt_progress" in one]
    assert found[-1].get("usage"), found
    total = found[-1]["usage"]["prompt_tokens"]
    assert {(one["total"], one["cache"]) for one in told} == {(total, 0)}
    done = [one["processed"] for one in told]
    assert done == sorted(set(done))
    assert done
    assert set(done) <= set(range(STEP_TOKENS, total, STEP_TOKENS))  # a busy server may miss a step
    assert [one["choices"] for one in found[: len(told)]] == [[]] * len(told)
    again = events(address, path, stream_options={"include_usage": True}, **asked)  # of a cached prompt, and not asked
    assert not any("prompt_progress" in one for one in again)
    assert text_of(found) == text_of(again) != ""


def test_stats_have_the_prompts_under_way() -> None:
    with Engine("demo", **SIZES) as engine:
        ids = list(range(10, 90))
        engine.add_request("a", ids, SamplingParams(max_tokens=2, temperature=0))
        engine.step()
        assert engine.stats().prompts == {"a": (80, 0, 32)}
        while engine.has_unfinished_requests():
            engine.step()
        assert engine.stats().prompts == {}
        engine.add_request("b", ids, SamplingParams(max_tokens=2, temperature=0))
        engine.add_request("c", list(range(100, 180)), SamplingParams(max_tokens=2, temperature=0))
        engine.step()
        found = engine.stats().prompts
        assert found["c"][:2] == (80, 0)
        assert "b" not in found or found["b"][1] == 64
