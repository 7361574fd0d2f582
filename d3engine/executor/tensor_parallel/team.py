"""The other ranks as rank 0 has them: what it tells them, and how it ends them.

The one idea: a rank is at the other end of a connection that nobody else holds, so its end, however it comes, is the
end of that connection.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from d3engine.errors import EngineDeadError
from d3engine.executor.tensor_parallel.hearing import PATIENCE_SECONDS, VALUE, WorkerChannel
from d3engine.executor.tensor_parallel.packing import pack

END = b"e"
"""What a message begins with that ends a rank: why, or nothing, follows."""
PLAN = b"p"

_LEAVE_SECONDS = 5.0


class Team:
    """Ranks 1, 2 ... of an engine, by their `links`; `processes` are theirs where this process has started them.

    `cleanup` is called when all of them have ended. How long a rank may be silent, `patience` says, in seconds.
    """

    def __init__(
        self,
        links: Sequence[Connection],
        processes: Sequence[subprocess.Popen[bytes]] = (),
        cleanup: Callable[[], None] = lambda: None,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        self.hearing = WorkerChannel(links, processes, patience)
        self._links = list(links)
        self._processes = list(processes)
        self._cleanup = cleanup
        self._is_over = False

    @property
    def size(self) -> int:
        """Ranks, this one among them."""
        return len(self._links) + 1

    def tell(self, value: Any) -> None:
        """Tell all ranks a value that `pack` knows."""
        message = VALUE + pack(value)
        for link in self._links:
            with contextlib.suppress(OSError):  # it has ended, of which `hearing` tells
                link.send_bytes(message)

    def send_plan(self, message: bytes) -> None:
        """Give all ranks a plan; raises `EngineDeadError` where one has ended."""
        self.hearing.check()
        try:
            for link in self._links:
                link.send_bytes(PLAN + message)
        except OSError as error:
            raise EngineDeadError(f"a rank has ended: {error}") from error

    def close(self, reason: str = "") -> None:
        """End all ranks, for this reason; calling it again does nothing. Their processes are gone when it returns."""
        if self._is_over:
            return
        self._is_over = True
        self.hearing.end()
        for link in self._links:
            with contextlib.suppress(OSError):
                link.send_bytes(END + reason.encode())
        deadline = time.monotonic() + _LEAVE_SECONDS
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.wait()
        self.hearing.join(_LEAVE_SECONDS)
        for link in self._links:
            link.close()
        self._cleanup()
