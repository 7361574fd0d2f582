"""A rank that does what rank 0 plans. A thread only listens, so the end of rank 0 ends it
anywhere; each second it says that this process lives."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from d3engine.errors import EngineDeadError
from d3engine.executor.interface import Executor
from d3engine.executor.tensor_parallel.plan_message import PlanReceiver, pack, unpack
from d3engine.executor.tensor_parallel.worker_channel import BEAT, BEAT_SECONDS, END, VALUE

_PATIENCE_SECONDS = 5.0


class Leader:
    """Rank 0 at the other end of `link`; `parent` is its process where that has started this one."""

    def __init__(self, link: Connection, parent: int | None = None) -> None:
        self._link = link
        self._parent = parent
        self._inbox: SimpleQueue[bytes] = SimpleQueue()
        self._ends_process = False
        self._saying = threading.Lock()
        self._last_beat = 0.0
        threading.Thread(target=self._listen, name="d3engine-leader", daemon=True).start()

    def hear(self) -> Any:
        """The next value that rank 0 tells; raises `EngineDeadError` where it has ended."""
        return unpack(self._next()[1:], {})

    def say(self, value: Any) -> None:
        """Answer rank 0."""
        self._send(VALUE + pack(value))

    def fail(self, error: BaseException) -> None:
        """Say why this rank ends."""
        try:
            self.say({"kind": type(error).__name__, "error": str(error) or repr(error)})
        except OSError:  # rank 0 has gone
            return

    def follow(self, executor: Executor) -> None:
        """Run every plan that comes, until rank 0 is done; raises `EngineDeadError` where it has ended by a fault."""
        receiver = PlanReceiver()
        while True:
            message = self._next()
            if message == END:
                return
            executor.run(receiver.plan(message[1:]))

    def _next(self) -> bytes:
        message = self._inbox.get()
        if message[:1] == END and len(message) > 1:
            raise EngineDeadError(message[1:].decode())
        return message

    def _listen(self) -> None:
        message = b""
        while message[:1] != END:
            try:
                message = self._receive()
            except (EOFError, OSError):
                message = END + b"rank 0 has ended"
            self._inbox.put(message)
        threading.Event().wait(_PATIENCE_SECONDS)
        if self._ends_process:  # the other threads still wait where rank 0 should have met them
            os._exit(1)

    def _receive(self) -> bytes:
        while not self._link.poll(BEAT_SECONDS):
            self._beat()
            if self._parent is not None and os.getppid() != self._parent:
                raise EOFError
        self._beat()
        return self._link.recv_bytes()

    def _beat(self) -> None:
        """Say that this process lives, once a second at most."""
        if time.monotonic() - self._last_beat >= BEAT_SECONDS:
            self._last_beat = time.monotonic()
            with contextlib.suppress(OSError):  # what rank 0 has said before it ended is still to be read
                self._send(BEAT)

    def _send(self, message: bytes) -> None:
        with self._saying:
            self._link.send_bytes(message)

    def rely_on(self) -> None:
        """From now on the end of rank 0 ends this process, a few seconds later, unless it leaves before."""
        self._ends_process = True

    def leave(self) -> None:
        """Let go of rank 0."""
        self._ends_process = False
        self._link.close()
