"""Lines are answered by an engine's own routes, many at once; leaving ends what is under way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import count, islice
from typing import TYPE_CHECKING, Any

import pytest

from d3engine.integrations.batch_file import Line, line_of

if TYPE_CHECKING:
    from d3engine import AsyncEngine
    from d3engine.integrations.batch_runner import BatchRunner

QUESTION = "Question: Tom has {} pens. Tom finds 3. How many pens does Tom have now?\nAnswer:"
D3 = {"policy": "d3", "alpha": 0.9, "start": 0.6}


def line(name: str, url: str = "/v1/completions", **body: Any) -> Line:
    asked = {"custom_id": name, "method": "POST", "url": url, "body": body}
    return line_of(1, json.dumps(asked).encode())


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    from d3engine import AsyncEngine

    engine = AsyncEngine("demo", device="cpu", num_threads=1, max_num_seqs=4, kv_cache_memory_bytes=2**25)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture
def answers(engine: AsyncEngine) -> BatchRunner:
    from d3engine.integrations.batch_runner import BatchRunner
    from d3engine.server.settings import ServerSettings

    return BatchRunner(engine, ServerSettings(model_names=("demo",), max_depth_policies=1))


def test_each_line_is_answered_alike_and_a_bad_one_hurts_none(answers: BatchRunner, engine: AsyncEngine) -> None:
    """Each line is answered as by the engine, and a bad one hurts no other."""
    from d3engine import SamplingParams
    from d3engine.depth.policy import policy_from_dict

    asked: list[tuple[str, dict[str, Any]]] = [
        (QUESTION.format(nth), {"depth": {**D3, "alpha": alpha}})
        for nth, alpha in enumerate([0.7, 0.75, 0.8, 0.85, 0.9, 0.95] * 2)  # more policies than a server would take
    ]
    lines = [line(str(nth), prompt=prompt, max_tokens=12, **body) for nth, (prompt, body) in enumerate(asked)]
    messages = [{"role": "user", "content": "Tom has 5 pens. How many?"}]
    chat = line("chat", "/v1/chat/completions", messages=messages, max_tokens=12)
    response = line("response", "/v1/responses", input="Tom has 5 pens. How many?", max_output_tokens=12)
    bad = line("bad", prompt="x", depth={**D3, "alpha": 2})
    broken = line_of(9, b"no JSON")
    found = {result.line: result for result in answers.results([broken, *lines, bad, chat, response])}

    assert len(found) == len(lines) + 4
    for one, (prompt, body) in zip(lines, asked, strict=True):
        params = SamplingParams(temperature=0, max_tokens=12, depth=policy_from_dict(body["depth"]))
        (own,) = list(engine.sync().generate(prompt, params))[-1].outputs
        assert found[one].status == 200
        (choice,) = json.loads(found[one].body)["choices"]
        assert (choice["text"], choice["finish_reason"]) == (own.text, own.finish_reason)
    assert json.loads(found[chat].body)["choices"][0]["message"]["content"]
    assert (found[bad].status, found[broken].status) == (400, 0)
    assert "alpha" in json.loads(found[bad].body)["error"]["message"]
    assert json.loads(found[response].body)["status"] in ("completed", "incomplete")


def test_batch_keeps_the_engine_full_and_leaving_ends_it(answers: BatchRunner, engine: AsyncEngine) -> None:
    """As many requests run as keep the engine full, and leaving ends them."""
    taken = []

    def endless() -> Iterator[Line]:
        for nth in count():
            taken.append(nth)
            yield line(str(nth), prompt=QUESTION.format(nth), max_tokens=4 + 3 * nth)

    found = answers.results(endless())
    assert len(list(islice(found, 5))) == 5
    assert len(taken) <= 2 * 4 + 5
    found.close()

    async def idle() -> None:
        stats = await engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_blocks_in_use) == (0, 0, 0)
        assert max(place for place, rows in enumerate(stats.step_rows.counts) if rows) > 0

    asyncio.run(idle())


def test_an_engine_that_ends_ends_the_batch_and_not_its_lines() -> None:
    from d3engine import AsyncEngine
    from d3engine.errors import FailedError
    from d3engine.integrations.batch_runner import BatchRunner
    from d3engine.server.settings import ServerSettings

    engine = AsyncEngine("demo", device="cpu", num_threads=1, kv_cache_memory_bytes=2**22)
    ended = BatchRunner(engine, ServerSettings(model_names=("demo",)))
    asyncio.run(engine.close())
    with pytest.raises(FailedError, match=r"the batch has stopped at line 1: .*about to end"):
        list(ended.results([line("a", prompt="x")]))
