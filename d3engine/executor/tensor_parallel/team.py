"""The other ranks as rank 0 has them: what it tells them, what they say, and how it hears of their end.

The one idea: a rank is at the other end of a connection that nobody else holds, so its end, however it comes, is the
end of that connection. After their engine is ready ranks say nothing any more, so whatever comes is bad news.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from d3engine.errors import EngineDeadError, ModelFormatError
from d3engine.executor.tensor_parallel.packing import pack, unpack

END = b"e"
"""What a message begins with that ends a rank: why, or nothing, follows."""
PLAN = b"p"
VALUE = b"v"

_LOOK_SECONDS = 0.2
_LOOKS = 50
"""So often is looked for the reason of a failure: a process that was stopped meanwhile has its looks still to come."""

_GATHER_SECONDS = 1.0
"""So long is waited, after the first rank has gone, for what others say: the first is not always the cause."""
_LEAVE_SECONDS = 5.0


class Team:
    """Ranks 1, 2 ... of an engine, by their `links`; `processes` are theirs where this process has started them.

    `cleanup` is called when all of them have ended.
    """

    def __init__(
        self,
        links: Sequence[Connection],
        processes: Sequence[subprocess.Popen[bytes]] = (),
        cleanup: Callable[[], None] = lambda: None,
    ) -> None:
        self._links = list(links)
        self._processes = list(processes)
        self._cleanup = cleanup
        self._failure: str | None = None
        self._is_known = threading.Event()
        self._is_over = threading.Event()
        self._watcher: threading.Thread | None = None

    @property
    def size(self) -> int:
        """Ranks, this one among them."""
        return len(self._links) + 1

    # -- while the engine is made ----------------------------------------------------------------------------------

    def tell(self, value: Any) -> None:
        """Tell all ranks a value that `pack` knows."""
        message = VALUE + pack(value)
        for link in self._links:
            with contextlib.suppress(OSError):  # it has ended, of which `hear` tells
                link.send_bytes(message)

    def hear(self) -> list[Any]:
        """What each rank says next.

        Raises `ModelFormatError` where that is what a rank has met, `EngineDeadError` for anything else, and for a rank
        that has ended.
        """
        return [self._hear(rank, link) for rank, link in enumerate(self._links, 1)]

    def _hear(self, rank: int, link: Connection) -> Any:
        try:
            said = unpack(link.recv_bytes(), {})
        except (EOFError, OSError):
            raise EngineDeadError(f"{self._name(rank)} has ended {self._how(rank)} before it was ready") from None
        if isinstance(said, dict) and "error" in said:
            if said["kind"] == ModelFormatError.__name__:
                raise ModelFormatError(said["error"])
            raise EngineDeadError(f"{self._name(rank)} could not begin: {said['error']}")
        return said

    # -- while it runs ---------------------------------------------------------------------------------------------

    def watch(self, on_failure: Callable[[], None]) -> None:
        """From now on a thread looks for ranks that end; `on_failure` frees who waits for them."""
        self._watcher = threading.Thread(target=self._watch, args=(on_failure,), name="d3engine-ranks", daemon=True)
        self._watcher.start()

    def send_plan(self, message: bytes) -> None:
        """Give all ranks a plan; raises `EngineDeadError` where one has ended."""
        self.check()
        try:
            for link in self._links:
                link.send_bytes(PLAN + message)
        except OSError as error:
            raise EngineDeadError(f"a rank has ended: {error}") from error

    def check(self) -> None:
        """Raise `EngineDeadError`, with the reason, if a rank has ended."""
        if self._failure is not None:
            raise EngineDeadError(self._failure)

    def explain(self, fault: BaseException) -> BaseException:
        """Why `fault` came: an error that names the rank that ended, or itself where all others still live."""
        if not isinstance(fault, EngineDeadError) and self._failure is None:
            return fault
        for _ in range(_LOOKS):
            if self._is_known.wait(_LOOK_SECONDS):
                break
        return fault if self._failure is None else EngineDeadError(self._failure)

    def close(self, reason: str = "") -> None:
        """End all ranks, for this reason; calling it again does nothing. Their processes are gone when it returns."""
        if self._is_over.is_set():
            return
        self._is_over.set()
        for link in self._links:
            with contextlib.suppress(OSError):
                link.send_bytes(END + reason.encode())
        deadline = time.monotonic() + _LEAVE_SECONDS
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.wait()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(_LEAVE_SECONDS)
        for link in self._links:
            link.close()
        self._cleanup()

    def _watch(self, on_failure: Callable[[], None]) -> None:
        while not self._is_over.is_set():
            if wait(self._links, timeout=_LOOK_SECONDS) and not self._is_over.is_set():
                self._failure = self._find_failure()
                self._is_known.set()
                on_failure()
                return

    def _find_failure(self) -> str:
        """What the ranks that have something to say come to: one that died says most, one that lost others least."""
        deadline = time.monotonic() + _GATHER_SECONDS
        found: dict[int, tuple[int, str]] = {}
        while silent := [link for rank, link in enumerate(self._links, 1) if rank not in found]:
            ready = wait(silent, timeout=max(0.0, deadline - time.monotonic()))
            for link in ready:
                rank = self._links.index(link) + 1  # type: ignore[arg-type]
                found[rank] = self._last_words(rank)
            if not ready:
                break
        return min(found.values())[1]

    def _last_words(self, rank: int) -> tuple[int, str]:
        try:
            said = unpack(self._links[rank - 1].recv_bytes(), {})
        except (EOFError, OSError):
            return 0, f"{self._name(rank)} has ended {self._how(rank)}"
        return (2 if said["kind"] == EngineDeadError.__name__ else 1), f"{self._name(rank)}: {said['error']}"

    def _name(self, rank: int) -> str:
        return f"rank {rank} of {self.size}"

    def _how(self, rank: int) -> str:
        if not self._processes:
            return "or cannot be reached"
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._processes[rank - 1].wait(timeout=_GATHER_SECONDS)
            return f"by signal {-status}" if status < 0 else f"with status {status}"
        return "or lets go of its connection"
