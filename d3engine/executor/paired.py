"""Two models, one step: the plan's rows through the first, those of its nested plan through the one that drafts."""

from __future__ import annotations

import torch
from torch import Tensor

from d3engine.executor.computed import Computed
from d3engine.executor.cuda_graph import GraphExecutor
from d3engine.executor.eager import EagerExecutor
from d3engine.plan import Plan


class PairedExecutor:
    """`run(plan)` computes the logits of the plan's `logit_rows`, then of the nested plan's."""

    def __init__(self, first: EagerExecutor | GraphExecutor, second: EagerExecutor) -> None:
        self.first = first
        self.second = second

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
        return Computed(torch.cat((own.logits, drafted.logits)), own.depths)
