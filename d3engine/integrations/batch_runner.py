"""Runs the lines of a batch by the server's routes, concurrently and without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from d3engine.errors import FailedError
from d3engine.integrations.batch_file import LONGEST_LINE, Line, Result
from d3engine.server.app import create_app
from d3engine.server.in_process import post
from d3engine.server.middleware.settings import GuardSettings
from d3engine.server.settings import ServerSettings

if TYPE_CHECKING:
    from d3engine.async_engine.async_engine import AsyncEngine

LINES_PER_SEQUENCE = 2
"""Concurrent lines for each running sequence: the engine tokenizes prompts of some while others run."""

NO_LIMIT = 1_000_000
ENGINE_ENDED = 503
"""The status of a route whose engine has ended: the line is not at fault."""


class BatchRunner:
    """Runs lines of batches on an engine, by the server's app called as a function.

    Args:
        client: the engine, which the caller closes.
        settings: what a line may request, as of a server; its guards are not used.
    """

    def __init__(self, client: AsyncEngine, settings: ServerSettings) -> None:
        self._at_once = LINES_PER_SEQUENCE * client.settings.max_num_seqs
        guards = GuardSettings(max_body_bytes=LONGEST_LINE, max_queue=NO_LIMIT)
        most = max(settings.max_depth_policies, self._at_once)
        self._app: ASGIApp = create_app(
            client, replace(settings, guards=guards, max_depth_policies=most, allow_priority=True)
        )

    def results(self, lines: Iterable[Line]) -> Iterator[Result]:
        """The result of each line as soon as it is complete, in any order.

        `lines` is read only as far as lines run. Closing the iterator cancels these. Raises `FailedError` when the
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
                running |= {asyncio.create_task(self.run_line(line)) for line in new}
                if not running:
                    return
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def run_line(self, line: Line) -> Result:
        """The result of one line. Raises `FailedError` when the engine has ended."""
        if line.fault is not None:
            return Result(line)
        response = await post(self._app, line.url, line.body)
        if response.status == ENGINE_ENDED:
            raise FailedError(f"the batch has stopped at line {line.number}: {response.body.decode()}")
        return Result(line, response.status, response.request_id, response.body)


async def _next(results: AsyncGenerator[Result, None]) -> Result | None:
    return await anext(results, None)
