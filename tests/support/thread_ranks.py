"""The ranks of a model as threads of one process: real parts and real messages, with sums taken in shared memory.
What processes, sockets and torch.distributed add to it is tested with fewer models, since each process takes seconds
to begin."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from d3engine import Engine
from d3engine.engine.executors import build_executor
from d3engine.executor.interface import Computed, Executor
from d3engine.executor.tensor_parallel.plan_message import PlanReceiver, PlanSender
from d3engine.model.shard import Part, Ranks, shard_of
from d3engine.model.weights import load_weights
from d3engine.scheduling.plan import Plan

HANG_GUARD_SECONDS = 300


class Meeting:
    """Where `size` threads bring their tensors."""

    def __init__(self, size: int) -> None:
        self.tensors: list[Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size)


class ThreadCollectives:
    """The collectives of one rank; the sum is taken in the order of ranks, so it is the same bits for all."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self._rank = rank
        self.num_sums = 0

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        meeting = self._meeting
        meeting.tensors[self._rank] = tensor.clone()
        meeting.barrier.wait(HANG_GUARD_SECONDS)
        found = list(meeting.tensors)
        meeting.barrier.wait(HANG_GUARD_SECONDS)
        assert all(one.shape == tensor.shape and one.dtype == tensor.dtype for one in found)
        return found

    def sum_(self, tensor: Tensor) -> None:
        self.num_sums += 1
        first, *others = self._exchange(tensor)
        tensor.copy_(sum(others, first.clone()))

    def gather(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._exchange(tensor))

    def agree_(self, tensor: Tensor) -> None:
        tensor.copy_(self._exchange(tensor)[0])


class ThreadRanks:
    """An engine's executor whose ranks are threads; rank 0's answer is the engine's."""

    def __init__(self, engine: Engine, size: int, num_blocks: int) -> None:
        settings = engine.settings
        meeting = Meeting(size)
        self.parts: list[Part] = [shard_of(settings.config, rank, size) for rank in range(size)]
        self._executors: list[Executor] = []
        self._collectives: list[ThreadCollectives] = []
        for part in self.parts:
            weights = load_weights(
                settings.directory,
                settings.config,
                dtype=settings.dtype,
                weight_dtype=settings.weight_dtype,
                device="cpu",
                show_progress=False,
                part=part,
            )
            local = replace(settings, config=part.config(settings.config))
            self._collectives.append(ThreadCollectives(meeting, part.rank))
            ranks = Ranks(part, self._collectives[-1])
            self._executors.append(build_executor(local, weights, num_blocks, ranks))
        self._sender = PlanSender(settings.block_size)
        self._receivers = [PlanReceiver() for _ in self.parts[1:]]
        self._meeting = meeting
        self._threads = ThreadPoolExecutor(size)
        self.stats = self._executors[0].stats
        self.bytes_sent: list[int] = []
        self.sums: list[int] = []  # of each step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executors[0], name)

    def run(self, plan: Plan) -> Computed:
        message = self._sender.message(plan)
        self.bytes_sent.append(len(message))
        plans = [plan, *(receiver.plan(message) for receiver in self._receivers)]
        before = self._collectives[0].num_sums
        first, *_ = self._threads.map(self._run_one, self._executors, plans)
        self.sums.append(self._collectives[0].num_sums - before)
        return first

    def _run_one(self, executor: Executor, plan: Plan) -> Computed:
        try:
            return executor.run(plan)
        except BaseException:
            self._meeting.barrier.abort()
            raise

    def close(self) -> None:
        self._threads.shutdown()


def over_threads(engine: Engine, size: int) -> Engine:
    """The engine, whose model is spread over `size` threads from here on; it has run nothing yet."""
    num_blocks = engine.scheduler.cache.pool.num_blocks
    engine.executor = ThreadRanks(engine, size, num_blocks)  # type: ignore[assignment]
    return engine
