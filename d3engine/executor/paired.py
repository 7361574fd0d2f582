"""Two models, one step: the plan's rows through the first, those of its nested plan through the one that drafts."""

from __future__ import annotations

import torch
from torch import Tensor

from d3engine.executor.eager import EagerExecutor
from d3engine.plan import Plan


class PairedExecutor:
    """`run(plan)` returns float32 logits for the plan's `logit_rows`, then for the nested plan's."""

    def __init__(self, first: EagerExecutor, second: EagerExecutor) -> None:
        self.first = first
        self.second = second

    @torch.inference_mode()
    def run(self, plan: Plan) -> Tensor:
        nested = None if plan.drafts is None else plan.drafts.model
        if nested is None:
            return self.first.run(plan)
        drafted = self.second.run(nested)
        return torch.cat((self.first.run(plan), drafted)) if plan.num_rows else drafted
