"""What rank 0 and the other ranks say to each other. Silence counts only while the reading thread runs,
so a machine that stood still has lost no rank."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any, TypeVar

from d3engine.errors import D3EngineError, EngineDeadError, ModelFormatError
from d3engine.executor.tensor_parallel.plan_message import pack, unpack

END = b"e"
"""What a message begins with that ends a rank: why, or nothing, follows."""
PLAN = b"p"
VALUE = b"v"
"""What a message begins with that holds a value, for either side."""
BEAT = b"b"
"""The message of a rank that lives and has nothing to say."""
BEAT_SECONDS = 1.0

PATIENCE_SECONDS = 300.0
"""So long may a rank be silent: many times what a starting process, or one that a loaded machine starves, is."""

_LOOK_SECONDS = 0.2
_LOOKS = 50
"""So often is looked for the reason of a failure: a process that was stopped meanwhile has its looks still to come."""
_GATHER_SECONDS = 1.0
"""So long is waited, after the first rank has gone, for what others say: the first is not always the cause."""

_LEAVE_SECONDS = 5.0

T = TypeVar("T")

_FAILED, _LOST_OTHERS = 1, 2
"""How little a rank's last words explain: nothing beats the end of its process, which is 0."""


class WorkerChannel:
    """Ranks 1, 2 ... of an engine, by their `links`; `processes` are theirs where this process has started them.

    A rank that ends or fails, or that says nothing for `patience` seconds, is the failure of all. `cleanup` is called
    when all of them have ended.
    """

    def __init__(
        self,
        links: Sequence[Connection],
        processes: Sequence[subprocess.Popen[bytes]] = (),
        cleanup: Callable[[], None] = lambda: None,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        self._links = dict(enumerate(links, 1))
        self._processes = dict(enumerate(processes, 1))
        self._cleanup = cleanup
        self._patience = patience
        self._said: dict[int, SimpleQueue[Any]] = {rank: SimpleQueue() for rank in self._links}
        self._failure: D3EngineError | None = None
        self._is_known = threading.Event()
        self._is_over = threading.Event()
        self._on_failure: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._listen, name="d3engine-ranks", daemon=True)
        self._thread.start()

    @property
    def size(self) -> int:
        """Ranks, this one among them."""
        return len(self._links) + 1

    def tell(self, value: Any) -> None:
        """Tell all ranks a value that `pack` knows."""
        message = VALUE + pack(value)
        for link in self._links.values():
            with contextlib.suppress(OSError):  # it has ended, of which `hear` tells
                link.send_bytes(message)

    def send_plan(self, message: bytes) -> None:
        """Give all ranks a plan; raises `EngineDeadError` where one has ended."""
        self.check()
        try:
            for link in self._links.values():
                link.send_bytes(PLAN + message)
        except OSError as error:
            raise EngineDeadError(f"a rank has ended: {error}") from error

    def close(self, reason: str = "") -> None:
        """End all ranks, for this reason; calling it again does nothing. Their processes are gone when it returns."""
        if self._is_over.is_set():
            return
        self._is_over.set()
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.send_bytes(END + reason.encode())
        deadline = time.monotonic() + _LEAVE_SECONDS
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.wait()
        if self._thread is not threading.current_thread():
            self._thread.join(_LEAVE_SECONDS)
        for link in self._links.values():
            link.close()
        self._cleanup()

    def hear(self) -> list[Any]:
        """What each rank says next; raises as `check` does, and for a failure that comes meanwhile."""
        self.check()
        values = []
        for queue in self._said.values():
            values.append(queue.get())
            self.check()
        return values

    def check(self) -> None:
        """Raise `ModelFormatError` where that is what a rank has met, `EngineDeadError` for any other failure."""
        if self._failure is not None:
            raise _again(self._failure)

    def call(self, wait_for_others: Callable[[], T]) -> T:
        """What it returns, by a thread of its own: it is left to itself as soon as `check` would raise."""
        found: list[T | BaseException] = []
        thread = threading.Thread(target=_keep, args=(wait_for_others, found), daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_LOOK_SECONDS)
            self.check()
        (outcome,) = found
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def free_by(self, on_failure: Callable[[], None]) -> None:
        """From now on a failure calls this, from another thread, to wake calls that wait for a rank."""
        self._on_failure = on_failure
        if self._failure is not None:
            on_failure()

    def explain(self, fault: BaseException) -> BaseException:
        """Why `fault` came: an error that names the rank that ended, or itself where all others still live."""
        if not isinstance(fault, EngineDeadError) and self._failure is None:
            return fault
        for _ in range(_LOOKS):
            if self._is_known.wait(_LOOK_SECONDS):
                break
        if self._failure is None or str(fault) == str(self._failure):
            return fault
        return _again(self._failure)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        silence = dict.fromkeys(self._links, 0.0)
        before = time.monotonic()
        while not self._is_over.is_set():
            ready = wait(list(self._links.values()), timeout=_LOOK_SECONDS)
            now = time.monotonic()
            passed, before = min(now - before, 2 * _LOOK_SECONDS), now
            last_words = {}
            for rank, link in self._links.items():
                silence[rank] = 0.0 if link in ready else silence[rank] + passed
                if link in ready and (words := self._take(rank)):
                    last_words[rank] = words
            if self._is_over.is_set():
                return
            if last_words:
                self._fail(self._find_failure(last_words))
                return
            if max(silence.values(), default=0.0) > self._patience:
                self._give_up(max(silence, key=lambda rank: silence[rank]))
                return

    def _take(self, rank: int) -> tuple[int, D3EngineError] | None:
        """Read what a rank says; returns how little it explains, and the error, where those are its last words."""
        try:
            message = self._links[rank].recv_bytes()
        except (EOFError, OSError):
            return 0, EngineDeadError(f"{self._name(rank)} has ended {self._how(rank)}")
        if message == BEAT:
            return None
        said = unpack(message[1:], {})
        if not (isinstance(said, dict) and "error" in said):
            self._said[rank].put(said)
            return None
        if said["kind"] == ModelFormatError.__name__:
            return _FAILED, ModelFormatError(said["error"])
        explains = _LOST_OTHERS if said["kind"] == EngineDeadError.__name__ else _FAILED
        return explains, EngineDeadError(f"{self._name(rank)}: {said['error']}")

    def _find_failure(self, found: dict[int, tuple[int, D3EngineError]]) -> D3EngineError:
        """What the ranks that have something to say come to: one that died says most, one that lost others least."""
        deadline = time.monotonic() + _GATHER_SECONDS
        while silent := {link: rank for rank, link in self._links.items() if rank not in found}:
            ready = wait(list(silent), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for link in ready:
                rank = silent[link]  # type: ignore[index]
                if words := self._take(rank):
                    found[rank] = words
        return min(found.items(), key=lambda item: (item[1][0], item[0]))[1][1]

    def _give_up(self, rank: int) -> None:
        self._fail(
            EngineDeadError(
                f"{self._name(rank)} has said nothing for {self._patience:g} seconds: its process is stopped, or its"
                " machine cannot be reached"
            )
        )
        if self._processes:  # its end wakes calls that wait for it
            self._processes[rank].kill()

    def _fail(self, failure: D3EngineError) -> None:
        self._failure = failure
        self._is_known.set()
        for queue in self._said.values():
            queue.put(None)
        self._on_failure()

    def _name(self, rank: int) -> str:
        return f"rank {rank} of {self.size}"

    def _how(self, rank: int) -> str:
        if not self._processes:
            return "or cannot be reached"
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._processes[rank].wait(timeout=_GATHER_SECONDS)
            return f"by signal {-status}" if status < 0 else f"with status {status}"
        return "or lets go of its connection"


def _again(failure: D3EngineError) -> D3EngineError:
    """The same for another caller, since who raises an error writes into it where that was."""
    return type(failure)(str(failure))


def _keep(call: Callable[[], T], found: list[T | BaseException]) -> None:
    try:
        found.append(call())
    except BaseException as error:
        found.append(error)


def first_value(link: Connection) -> Any:
    """The first value that comes over a connection without a reader yet."""
    while (message := link.recv_bytes()) == BEAT:
        pass
    return unpack(message[1:], {})
