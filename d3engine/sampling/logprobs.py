"""Log-probabilities of tokens, of the raw logits: before bias, penalties, temperature and cuts."""

from __future__ import annotations

import torch
from torch import Tensor

from d3engine.plan import Plan
from d3engine.request.outputs import Logprob
from d3engine.request.params import ALL_LOGPROBS


def prompt_logprobs(logits: Tensor, plan: Plan) -> list[list[dict[int, Logprob]]]:
    """The log-probabilities of each prompt token that the plan's prompt rows predict."""
    found, first = [], 0
    for prompt in plan.prompt_rows:
        count = prompt.sequence.params.prompt_logprobs
        assert count is not None
        rows = logits[first : first + len(prompt.rows)]
        tokens = prompt.sequence.prompt_token_ids[prompt.position + 1 :][: len(rows)]
        found.append(logprobs_of(rows, tokens, count))
        first += len(prompt.rows)
    return found


def logprobs_of(logits: Tensor, tokens: list[int], count: int) -> list[dict[int, Logprob]]:
    """Log-probability and rank of each of `tokens`, and of the `count` likeliest (-1: all), from `logits` [T, V]."""
    if not tokens:
        return []
    logprobs = logits.log_softmax(dim=-1)
    own = logprobs.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1))
    ranks = ((logprobs > own).sum(dim=1) + 1).tolist()
    found = [
        {token: Logprob(value, rank)} for token, value, rank in zip(tokens, own.flatten().tolist(), ranks, strict=True)
    ]
    if count:
        size = logprobs.shape[1]
        values, others = logprobs.topk(size if count == ALL_LOGPROBS else min(count, size))
        for entries, row, ids in zip(found, values.tolist(), others.tolist(), strict=True):
            for place, (value, other) in enumerate(zip(row, ids, strict=True)):
                entries.setdefault(other, Logprob(value, place + 1))
    return found
