"""Two models, one step: the plan's rows through the first, those of its nested plan through the one that drafts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from d3engine.executor.cuda_graph import GraphExecutor
from d3engine.executor.interface import Computed, Drafted, Executor, ExecutorStats
from d3engine.kernels.kv_pool import KVPool
from d3engine.model.llama import Llama
from d3engine.scheduling.plan import ExecutorCapabilities, Plan


class DraftTargetExecutor:
    """`run(plan)` computes the logits of the plan's `logit_rows`, then of the nested plan's, or drafts by these."""

    def __init__(self, first: Executor, second: Executor) -> None:
        self.first = first
        self.second = second

    @property
    def stats(self) -> ExecutorStats:
        """Those of the first model, with the graphs of both."""
        first, second = self.first.stats, self.second.stats
        return replace(
            first,
            graphs_captured=first.graphs_captured + second.graphs_captured,
            graph_capture_seconds=first.graph_capture_seconds + second.graph_capture_seconds,
            graph_memory_bytes=first.graph_memory_bytes + second.graph_memory_bytes,
        )

    @property
    def model(self) -> Llama:
        """The first model."""
        return self.first.model

    @property
    def pool(self) -> KVPool:
        """The KV pool of the first model."""
        return self.first.pool

    @property
    def max_steps(self) -> int:
        """Steps that a plan without a nested one may stand for."""
        return self.first.max_steps

    @property
    def capabilities(self) -> ExecutorCapabilities:
        """That of the first model."""
        return self.first.capabilities

    @property
    def draft_rows(self) -> int:
        """Rows at most of a nested plan behind which the second model drafts without the host; 0: behind none."""
        return self.second.logit_rows if isinstance(self.second, GraphExecutor) else 0

    def take_largest(self) -> None:
        """As both executors do."""
        for executor in executors_of(self):
            executor.take_largest()

    def prepare_next(self) -> bool:
        """As the first executor does, then the second."""
        return any(executor.prepare_next() for executor in executors_of(self))

    def close(self) -> None:
        """Close both."""
        self.first.close()
        self.second.close()

    @torch.inference_mode()
    def run(self, plan: Plan) -> Computed:
        drafts = plan.drafts
        if drafts is None or drafts.model is None:
            return self.first.run(plan)
        if drafts.lengths is not None:
            return self._run_and_draft(plan)
        drafted = self.second.run(drafts.model)
        if not plan.num_rows:
            return drafted
        own = self.first.run(plan)
        assert isinstance(own.logits, Tensor), "a plan with drafts is run step by step"
        assert isinstance(drafted.logits, Tensor)
        return replace(own, logits=torch.cat((own.logits, drafted.logits)))

    def _run_and_draft(self, plan: Plan) -> Computed:
        assert isinstance(self.second, GraphExecutor), "only graphs draft without the host"
        assert plan.drafts is not None
        assert plan.drafts.model is not None
        assert plan.drafts.lengths is not None
        model = self.model
        own = Computed(torch.empty(0, model.config.vocab_size))
        if plan.num_rows:
            own = self.first.run(plan)  # first, since drafting waits for the device
        assert isinstance(own.logits, Tensor), "a plan with drafts is run step by step"
        return replace(own, logits=Drafted(own.logits, self.second.draft(plan.drafts.model, plan.drafts.lengths)))


def executors_of(executor: Executor) -> tuple[Executor, ...]:
    """The executors of single models."""
    return (executor.first, executor.second) if isinstance(executor, DraftTargetExecutor) else (executor,)
