"""Answers the lines of a batch by the server's own routes, many at once, without a socket.

The one idea: a body means in a batch what it means to the server, so the server's app answers it, called as a function.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import replace
from itertools import islice

from starlette.types import ASGIApp

from d3engine.async_engine.client import EngineClient
from d3engine.batch.batch_file import LONGEST_LINE, Line, Result
from d3engine.errors import FailedError
from d3engine.server.app import create_app
from d3engine.server.guards.settings import GuardSettings
from d3engine.server.in_process import post
from d3engine.server.settings import ServerSettings

LINES_PER_SEQUENCE = 2
"""Lines under way for each sequence that runs: their prompts are read while others run."""

NO_LIMIT = 1_000_000
ENDED = 503
"""The status of routes whose engine has ended: nothing is wrong with the line."""


class Answers:
    """An engine that answers the lines of batches.

    Args:
        client: the engine, which the caller closes.
        settings: what a line may ask for, as of a server; its guards have nobody to guard against, and play no part.
    """

    def __init__(self, client: EngineClient, settings: ServerSettings) -> None:
        self._at_once = LINES_PER_SEQUENCE * client.settings.max_num_seqs
        guards = GuardSettings(max_body_bytes=LONGEST_LINE, max_queue=NO_LIMIT)
        most = max(settings.max_depth_policies, self._at_once)
        self._app: ASGIApp = create_app(
            client, replace(settings, guards=guards, max_depth_policies=most, allow_priority=True)
        )

    def results(self, lines: Iterable[Line]) -> Iterator[Result]:
        """What comes of each line, as soon as it has come: not in their order.

        Of `lines` no more are taken than are under way. Leaving the iterator ends those. Raises `FailedError` when the
        engine has ended.
        """
        with asyncio.Runner() as runner:
            found = self._results(lines)
            try:
                while (result := runner.run(_next(found))) is not None:
                    yield result
            finally:
                runner.run(found.aclose())

    async def _results(self, lines: Iterable[Line]) -> AsyncGenerator[Result, None]:
        waiting = iter(lines)
        running: set[asyncio.Task[Result]] = set()
        try:
            while True:
                new = islice(waiting, self._at_once - len(running))
                running |= {asyncio.create_task(self.answer(line)) for line in new}
                if not running:
                    return
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def answer(self, line: Line) -> Result:
        """What comes of one line. Raises `FailedError` when the engine has ended."""
        if line.fault is not None:
            return Result(line)
        answered = await post(self._app, line.url, line.body)
        if answered.status == ENDED:
            raise FailedError(f"the batch has stopped at line {line.number}: {answered.body.decode()}")
        return Result(line, answered.status, answered.request_id, answered.body)


async def _next(results: AsyncGenerator[Result, None]) -> Result | None:
    return await anext(results, None)
