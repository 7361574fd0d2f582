"""Two models, one step: the plan's rows through the first, those of its nested plan through the one that drafts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from d3engine.executor.cuda_graph import GraphExecutor
from d3engine.executor.interface import Computed, Drafted, Executor, ExecutorStats
from d3engine.executor.verification import cycle_of
from d3engine.scheduling.kv_cache import IntArray
from d3engine.scheduling.plan import Plan


class DraftTargetExecutor(Executor):
    """`run(plan)` computes the logits of the plan's `logit_rows`, then of the nested plan's, or drafts by these."""

    def __init__(self, first: Executor, second: Executor) -> None:
        self.first = first
        self.second = second
        self.model, self.pool = first.model, first.pool
        self.max_steps, self.capabilities = first.max_steps, first.capabilities  # of plans without a nested one

    @property
    def stats(self) -> ExecutorStats:  # type: ignore[override]
        """Those of the first model, with the graphs of both."""
        first, second = self.first.stats, self.second.stats
        return replace(
            first,
            graphs_captured=first.graphs_captured + second.graphs_captured,
            graph_capture_seconds=first.graph_capture_seconds + second.graph_capture_seconds,
            graph_memory_bytes=first.graph_memory_bytes + second.graph_memory_bytes,
        )

    @property
    def draft_rows(self) -> int:
        """Rows at most of a nested plan behind which the second model drafts without the host; 0: behind none."""
        if isinstance(self.first, GraphExecutor) and isinstance(self.second, GraphExecutor):
            return self.second.logit_rows
        return 0

    def make_students(self) -> None:
        """Those of the first model."""
        self.first.make_students()

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
            return self._draft(plan, drafts.model, drafts.lengths)
        drafted = self.second.run(drafts.model)
        if not plan.num_rows:
            return drafted
        own = self.first.run(plan)
        assert isinstance(own.logits, Tensor), "a plan with drafts is run step by step"
        assert isinstance(drafted.logits, Tensor)
        return replace(own, logits=torch.cat((own.logits, drafted.logits)))

    def _draft(self, plan: Plan, model: Plan, lengths: IntArray) -> Computed:
        """Draft without the host; the plan's own rows are others, or the last tokens before drafts of equal order that
        this very step verifies."""
        assert isinstance(self.first, GraphExecutor), "only graphs draft without the host"
        assert isinstance(self.second, GraphExecutor)
        draft = self.second.draft(model, lengths)
        if plan.multi_step is not None:
            given = [[] if one.draft is None else one.draft.token_ids for one in plan.sequences]
            known = [[token, *tokens] for token, tokens in zip(plan.token_ids.tolist(), given, strict=True)]
            verified = self.first.verify(plan, plan.multi_step, known, draft)
            return Computed(cycle_of(plan, given, draft.chosen(), verified.chosen()))
        own = self.first.run(plan) if plan.num_rows else Computed(torch.empty(0, self.model.config.vocab_size))
        assert isinstance(own.logits, Tensor), "a plan with drafts is run step by step"
        return replace(own, logits=Drafted(own.logits, draft.chosen()))


def executors_of(executor: Executor) -> tuple[Executor, ...]:
    """The executors of single models; an EAGLE-3 head is none, and has the pool of its target."""
    if not isinstance(executor, DraftTargetExecutor):
        return (executor,)
    first, second = executor.first, executor.second
    return (first,) if second.pool is first.pool else (first, second)
