"""Requests to an asynchronous engine, and what tests look at when they have been read."""

from collections.abc import Callable
from typing import Any

from stepping import greedy

from d3engine import AsyncEngine, Engine, RequestOutputKind

PROMPT, OTHER = [11, 12, 13], [21, 22]
DELTA = RequestOutputKind.DELTA
Make = Callable[..., AsyncEngine]


async def last_of(stream: Any) -> Any:
    """The last output of a request."""
    last = None
    async for output in stream:
        last = output
    return last


def answer_of(engine: Engine, prompt: list[int], max_tokens: int = 8) -> Any:
    """What an engine of one's own answers."""
    return engine.generate(prompt, greedy(max_tokens), use_tqdm=False)[0].outputs


async def nothing_runs(engine: AsyncEngine) -> bool:
    """Whether the engine holds nothing of any request, as it says now, before any further step."""
    stats = await engine.stats()
    return (stats.num_running, stats.num_waiting, stats.kv_blocks_in_use) == (0, 0, 0)
