"""Rank 0's executor: every plan goes to the other ranks first, and then all run their parts of it together."""

from __future__ import annotations

import weakref

from d3engine.executor.interface import Computed, Executor
from d3engine.executor.tensor_parallel.plan_message import PlanSender
from d3engine.executor.tensor_parallel.worker_channel import WorkerChannel
from d3engine.scheduling.plan import Plan


class TensorParallelExecutor(Executor):
    """Runs plans by `own`, which has rank 0's part of the model, and by the ranks of `workers`.

    A fault on any rank, this one included, ends all of them; `run` raises `EngineDeadError` for another rank's.
    Nothing is made ahead: each rank's own executor has been measured by itself, and the others wait for plans alone.
    """

    def __init__(self, own: Executor, workers: WorkerChannel, block_size: int) -> None:
        self._own = own
        self._workers = workers
        self._sender = PlanSender(block_size)
        self.stats, self.model, self.pool = own.stats, own.model, own.pool  # of rank 0
        self.max_steps, self.capabilities = own.max_steps, own.capabilities  # as those of each rank
        self.stats.executor += f", on {workers.size} ranks"
        weakref.finalize(self, workers.close)  # for callers that forget to close it

    def run(self, plan: Plan) -> Computed:
        try:
            self._workers.send_plan(self._sender.message(plan))
            computed = self._own.run(plan)
            self._workers.check()
        except BaseException as fault:
            cause = self._workers.explain(fault)
            self._workers.close(str(cause))
            if cause is fault:
                raise
            raise cause from fault
        return computed

    def close(self) -> None:
        """End all other ranks."""
        self._workers.close()
        self._own.close()
