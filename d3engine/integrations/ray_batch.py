"""Batches on Ray: Ray Data distributes the lines of a file to engines (extra `ray`)."""

from __future__ import annotations

import asyncio
import logging
import socket
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import msgspec

from d3engine.async_engine.async_engine import AsyncEngine
from d3engine.errors import FailedError, MissingExtraError, integer_in
from d3engine.integrations.batch_file import Line, Result
from d3engine.integrations.batch_runner import BatchRunner
from d3engine.server.settings import ServerSettings

try:
    import pyarrow
    import ray
    import ray.data
except ImportError:
    raise MissingExtraError("ray[data]", "ray", "d3engine batch --ray") from None

LINES_PER_BLOCK = 64
LINES_PER_CALL = LINES_PER_BLOCK // 4
"""Ray Data makes four of these calls concurrently for each block."""
BLOCKS_AT_ONCE = 3
"""Concurrent blocks of an engine, so that it is not idle during the last line of one."""
CONNECT_SECONDS = 10.0

Arguments: TypeAlias = Callable[[], Mapping[str, Any]]
"""Makes `AsyncEngine`'s arguments in the engine's process; it is pickled."""


class RayBatchRunner:
    """Engines on a Ray cluster, with the interface of `BatchRunner`.

    Args:
        address: of the cluster, as `ray.init` takes it: "auto" for one that runs here, "local" for a new one.
        arguments: of each engine.
        settings: what a line may request.
        num_engines: number of engines.
        actor_options: Ray's, of each engine's process.

    Raises:
        FailedError: for a cluster that cannot be reached.
    """

    def __init__(
        self,
        address: str,
        arguments: Arguments,
        settings: ServerSettings,
        *,
        num_engines: int = 1,
        actor_options: Mapping[str, Any] | None = None,
    ) -> None:
        _check_there(address)
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.WARNING, include_dashboard=False)
        except Exception as error:  # Ray raises this class when its start takes too long
            raise FailedError(f"cannot reach Ray at {address!r}: {error}") from None
        self._arguments = arguments, settings
        self._num_engines = num_engines
        self._options = {"num_cpus": 1, "max_concurrency": BLOCKS_AT_ONCE, **(actor_options or {})}

    def close(self) -> None:
        """Leave the cluster; a "local" one ends."""
        ray.shutdown()

    def results(self, lines: Iterable[Line]) -> Iterator[Result]:
        """The result of each line, block by block as they complete; all lines are read first."""
        logging.getLogger("ray.data").setLevel(logging.WARNING)
        ray.data.DataContext.get_current().enable_progress_bars = False
        rows = [{"line": msgspec.msgpack.encode(line)} for line in lines]
        blocks = -(-len(rows) // LINES_PER_BLOCK)
        pool = ray.data.ActorPoolStrategy(size=self._num_engines, max_tasks_in_flight_per_actor=BLOCKS_AT_ONCE + 1)
        with warnings.catch_warnings(action="ignore"):  # `max_concurrency` will get another place in Ray 2.64
            found = ray.data.from_items(rows, override_num_blocks=blocks).map_batches(
                _Engine,
                fn_constructor_args=self._arguments,
                batch_size=LINES_PER_CALL,
                batch_format="pyarrow",
                compute=pool,
                **self._options,
            )
        try:
            for row in found.iter_rows():
                yield msgspec.msgpack.decode(row["result"], type=Result)
        except ray.exceptions.RayError as error:
            raise FailedError(f"the batch has stopped: {error}") from None


def _check_there(address: str) -> None:
    """Raise `FailedError` for an unreachable machine: Ray would try for minutes and then end the process."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or (number := integer_in(port)) is None:
        return  # a keyword of Ray's
    try:
        socket.create_connection((host, number), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise FailedError(f"cannot reach Ray at {address!r}: {error}") from None


class _Engine:
    """One engine, in a process of Ray's."""

    def __init__(self, arguments: Arguments, settings: ServerSettings) -> None:
        self._runner = BatchRunner(AsyncEngine(**arguments()), settings)

    async def __call__(self, batch: pyarrow.Table) -> pyarrow.Table:
        lines = [msgspec.msgpack.decode(line, type=Line) for line in batch["line"].to_pylist()]
        results = await asyncio.gather(*map(self._runner.run_line, lines))
        return pyarrow.table({"result": pyarrow.array(map(msgspec.msgpack.encode, results), pyarrow.binary())})
