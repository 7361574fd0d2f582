"""Two models, one step: the plan's rows through the first, those of its nested plan through the one that drafts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from d3engine.executor.interface import Computed, Executor
from d3engine.kernels.kv_pool import KVPool
from d3engine.model.llama import Llama
from d3engine.scheduling.plan import ExecutorCapabilities, Plan


class DraftTargetExecutor:
    """`run(plan)` computes the logits of the plan's `logit_rows`, then of the nested plan's."""

    def __init__(self, first: Executor, second: Executor) -> None:
        self.first = first
        self.second = second
        self.stats = first.stats

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

    def take_largest(self) -> None:
        """As the first executor does; the second's steps are small."""
        self.first.take_largest()

    def prepare_next(self) -> bool:
        """As the first executor does: the second's steps take no graphs."""
        return self.first.prepare_next()

    def close(self) -> None:
        """Close both."""
        self.first.close()
        self.second.close()

    @torch.inference_mode()
    def run(self, plan: Plan) -> Computed:
        nested = None if plan.drafts is None else plan.drafts.model
        if nested is None:
            return self.first.run(plan)
        drafted = self.second.run(nested)
        if not plan.num_rows:
            return drafted
        own = self.first.run(plan)
        assert isinstance(own.logits, Tensor), "a plan with drafts is run step by step"
        assert isinstance(drafted.logits, Tensor)
        return replace(own, logits=torch.cat((own.logits, drafted.logits)))
