"""Rank 0's executor: every plan goes to the other ranks first, and then all run their parts of it together."""

from __future__ import annotations

import weakref

from d3engine.executor.interface import Computed, Executor
from d3engine.executor.tensor_parallel.group import Team
from d3engine.executor.tensor_parallel.plan_message import PlanSender
from d3engine.kernels.kv_pool import KVPool
from d3engine.model.llama import Llama
from d3engine.scheduling.plan import ExecutorCapabilities, Plan


class TensorParallelExecutor:
    """Runs plans by `own`, which has rank 0's part of the model, and by the ranks of `team`.

    A fault on any rank, this one included, ends all of them; `run` raises `EngineDeadError` for another rank's.
    """

    def __init__(self, own: Executor, team: Team, block_size: int) -> None:
        self._own = own
        self._team = team
        self._sender = PlanSender(block_size)
        self.stats = own.stats
        self.stats.executor += f", on {team.size} ranks"
        weakref.finalize(self, team.close)  # for callers that forget to close it

    @property
    def model(self) -> Llama:
        """Rank 0's part of the model."""
        return self._own.model

    @property
    def pool(self) -> KVPool:
        """The KV pool of rank 0's heads."""
        return self._own.pool

    @property
    def max_steps(self) -> int:
        """As of each rank's own executor."""
        return self._own.max_steps

    @property
    def capabilities(self) -> ExecutorCapabilities:
        """As of each rank's own executor."""
        return self._own.capabilities

    def take_largest(self) -> None:
        """Nothing: each rank's own executor has been measured by itself."""

    def prepare_next(self) -> bool:
        """Nothing: the other ranks wait for plans alone."""
        return False

    def run(self, plan: Plan) -> Computed:
        try:
            self._team.send_plan(self._sender.message(plan))
            computed = self._own.run(plan)
            self._team.hearing.check()
        except BaseException as fault:
            cause = self._team.hearing.explain(fault)
            self._team.close(str(cause))
            if cause is fault:
                raise
            raise cause from fault
        return computed

    def close(self) -> None:
        """End all other ranks."""
        self._team.close()
        self._own.close()
