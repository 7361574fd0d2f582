"""The collectives of ranks by torch.distributed, gloo or NCCL, in a group apart from the
process's default one, which a program may use itself."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from d3engine.errors import EngineDeadError

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
