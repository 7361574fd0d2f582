"""The collectives of ranks by torch.distributed, gloo or NCCL, in a group apart from the
process's default one, which a program may use itself."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from d3engine.errors import EngineDeadError
from d3engine.executor.tensor_parallel.plan_message import pack
from d3engine.executor.tensor_parallel.worker_channel import PATIENCE_SECONDS, VALUE, WorkerChannel

dist: Any = torch.distributed
"""As its own types know it, half of what is used here is not in it."""

Store = Any
"""A `torch.distributed.Store`: where ranks find each other."""

_PATIENCE = timedelta(minutes=30)
"""So long may one sum take. A rank that has died or been stopped is noticed earlier, by its connections to rank 0."""


class GroupCollectives:
    """The collectives of a process group; between GPUs they wait on the stream, not on the host.

    Raises `EngineDeadError` where the other ranks cannot be reached any more.
    """

    def __init__(self, group: Any, *, waits_on_device: bool) -> None:
        self._group = group
        self._waits_on_device = waits_on_device
        self._size: int = group.size()

    def sum_(self, tensor: Tensor) -> None:
        self._wait(lambda: self._group.allreduce([tensor]))

    def gather(self, tensor: Tensor) -> Tensor:
        every = tensor.new_empty((self._size, *tensor.shape))
        self._wait(lambda: self._group.allgather([list(every)], [tensor.contiguous()]))
        return every

    def agree_(self, tensor: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._wait(lambda: self._group.broadcast([tensor], options))

    def abort(self) -> None:
        """Wake waiting collectives with an error, from any thread; the group cannot be used afterwards."""
        if self._waits_on_device:
            self._group.abort()

    def _wait(self, begin: Any) -> None:
        try:
            begin().wait()
        except RuntimeError as error:
            raise EngineDeadError(f"other ranks cannot be reached: {error}") from error


def join_group(store: Store, rank: int, size: int, device: torch.device, *, is_local: bool) -> GroupCollectives:
    """Join the other ranks, which call this too; with `is_local` all are on this machine, and use its loopback.

    Raises `EngineDeadError` where they cannot be reached.
    """
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
            between_gpus = dist.ProcessGroupNCCL.Options()
            between_gpus._timeout = _PATIENCE
            return GroupCollectives(dist.ProcessGroupNCCL(store, rank, size, between_gpus), waits_on_device=True)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = _PATIENCE
        create, default = dist.ProcessGroupGloo.create_device, dist.ProcessGroupGloo.create_default_device
        options._devices = [create(hostname="127.0.0.1") if is_local else default()]
        return GroupCollectives(dist.ProcessGroupGloo(store, rank, size, options), waits_on_device=False)
    except RuntimeError as error:
        raise EngineDeadError(f"other ranks cannot be reached: {error}") from error


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
