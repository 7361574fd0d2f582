"""The client: requests over HTTP, one after the other on several streams, or at given times; and what it saw."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from d3engine.depth.policy import policy_from_directory
from d3engine.engine.model_directory import model_directory

TRIES = 5
"""Of a request whose connection ends before the answer begins."""
NAMES = ("Tom", "Ann", "Ben", "Mia")
DEPTHS: dict[str, dict[str, object]] = {
    "full": {"policy": "full"},
    "d3": policy_from_directory(model_directory("demo")).describe(),
}
"""What each request asks for: full depth, or the bundled model's own setting, whichever model is asked."""


def prompt(nth: int) -> str:
    """Every one begins otherwise, so that none can be spared by what was computed for another."""
    name = NAMES[nth % len(NAMES)]
    return (
        f"Question: {name} has {3 + nth} pens. {name} finds 3. {name} buys 2. How many pens does {name} have now?\n"
        "Answer:"
    )


@dataclass(frozen=True)
class Answered:
    """One request: when it was sent, when pieces of its answer came, and how many tokens these were in all."""

    sent: float
    came: list[float]
    tokens: int

    @property
    def first(self) -> float:
        """When its first token came."""
        return self.came[0]

    @property
    def last(self) -> float:
        """When its last token came."""
        return self.came[-1]


@dataclass
class Client:
    """Asks one server, by its name of the model, for a number of tokens; its prompts are never the same twice."""

    url: str
    model: str
    tokens: int
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def streams(self, count: int, seconds: float, depth: str) -> list[Answered]:
        """A number of streams, each of which sends its next request when the last one is answered, for `seconds`."""
        return asyncio.run(self._streams(count, seconds, depth))

    def arrivals(self, gaps: Sequence[float], depth: str) -> list[Answered]:
        """A request after each of the gaps (in seconds), whether or not others are answered."""
        return asyncio.run(self._arrivals(gaps, depth))

    async def _streams(self, count: int, seconds: float, depth: str) -> list[Answered]:
        until = time.perf_counter() + seconds
        async with _session() as session:

            async def stream() -> list[Answered]:
                found = [await self._ask(session, depth)]
                while time.perf_counter() < until:
                    found.append(await self._ask(session, depth))
                return found

            found = await asyncio.gather(*(stream() for _ in range(count)))
        return [answered for one in found for answered in one]

    async def _arrivals(self, gaps: Sequence[float], depth: str) -> list[Answered]:
        async with _session() as session:
            tasks = []
            for gap in gaps:
                if gap:
                    await asyncio.sleep(gap)
                tasks.append(asyncio.create_task(self._ask(session, depth)))
            return list(await asyncio.gather(*tasks))

    async def _ask(self, session: Any, depth: str) -> Answered:
        body = {
            "model": self.model,
            "prompt": prompt(next(self._numbers)),
            "max_tokens": self.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "depth": DEPTHS[depth],
        }
        sent, came, tokens = time.perf_counter(), [], 0
        async with await _posted(session, f"{self.url}/v1/completions", body) as response:
            if response.status != 200:
                raise SystemExit(f"the server answered {response.status}: {await response.text()}")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                came.append(time.perf_counter())
                if b'"usage":{' in line or b'"error"' in line:  # few lines are worth reading
                    tokens = _tokens(line) or tokens
        return Answered(sent, came if len(came) == 1 else came[:-1], tokens)  # the last tells of tokens alone


def _session() -> Any:
    """Connections are kept from one request to the next, as the official clients keep theirs."""
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(600))


async def _posted(session: Any, url: str, body: dict[str, Any]) -> Any:
    """The response to a request; sent again where a server closes a kept connection just as it comes, as llama.cpp's
    does."""
    import aiohttp

    for _ in range(TRIES):
        with contextlib.suppress(aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            return await session.post(url, json=body)
    raise SystemExit(f"the server closed {TRIES} connections in turn without an answer")


def _tokens(line: bytes) -> int | None:
    """What an event says of the number of tokens."""
    event = json.loads(line[len(b"data: ") :])
    if event.get("error"):
        raise SystemExit(f"the server answered with an error: {event['error']}")
    usage = event.get("usage")
    return None if usage is None else int(usage["completion_tokens"])


# -- times of arrival ----------------------------------------------------------------------------------------------


def poisson(rate: float, count: int, seed: int = 1) -> list[float]:
    """Gaps between `count` requests at random times, `rate` a second on average."""
    numbers = random.Random(seed)
    return [numbers.expovariate(rate) for _ in range(count)]


def bursts(rate: float, count: int, size: int = 16, seed: int = 1) -> list[float]:
    """The same rate in bursts: `size` requests at once, the bursts at random times."""
    numbers = random.Random(seed)
    return [numbers.expovariate(rate / size) if nth % size == 0 else 0.0 for nth in range(count)]


# -- figures -------------------------------------------------------------------------------------------------------


def figures(answered: Sequence[Answered]) -> dict[str, float]:
    """Of one round: tokens per second, and percentiles, in seconds, of what the readers waited for."""
    seconds = max(one.last for one in answered) - min(one.sent for one in answered)
    waits = [one.first - one.sent for one in answered]
    whole = [one.last - one.sent for one in answered]
    gaps = [after - before for one in answered for before, after in itertools.pairwise(one.came)] or [0.0]
    paces = [(one.last - one.first) / max(1, one.tokens - 1) for one in answered]
    return {
        "tokens": float(sum(one.tokens for one in answered)),
        "tokens_per_second": sum(one.tokens for one in answered) / seconds,
        "first_token_p50": percentile(waits, 50),
        "first_token_p99": percentile(waits, 99),
        "whole_p50": percentile(whole, 50),
        "whole_p99": percentile(whole, 99),
        "between_tokens_p50": percentile(gaps, 50),
        "between_tokens_p99": percentile(gaps, 99),
        "per_token_p50": percentile(paces, 50),
        "per_token_p99": percentile(paces, 99),
    }


def percentile(values: Sequence[float], percent: int) -> float:
    """The least value that at least `percent` percent do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]
