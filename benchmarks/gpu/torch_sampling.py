"""How a user of plain torch chooses tokens: the rival of `sample` and `lm_head_sample`, of which the time counts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from d3engine.kernels.sampling import Cuts, Penalties, SamplingRows, cut_min_p_, cut_top, penalised


def sampling_rows(inputs: Any) -> SamplingRows:
    """What each row asks for, by the names of its tensors; those of cuts or penalties may be missing."""
    cuts = Cuts(*(inputs[name] for name in ("min_p", "top_k", "top_p"))) if "top_p" in inputs else None
    names = ("repetition", "presence", "frequency", "prompt_seen", "output_counts")
    penalties = Penalties(*(inputs[name] for name in names)) if "repetition" in inputs else None
    return SamplingRows(inputs["temperature"], inputs["seeds"], inputs["indices"], cuts, penalties)


def sample(inputs: Any) -> Tensor:
    """A token int64 [T] of each row of `logits` float32 [T, V]."""
    rows = sampling_rows(inputs)
    logits = inputs["logits"] if rows.penalties is None else penalised(inputs["logits"], rows.penalties)
    scores = logits / rows.temperature[:, None]
    if rows.cuts is not None:
        scores = cut_top(cut_min_p_(scores, rows.cuts.min_p), rows.cuts.top_k, rows.cuts.top_p)
    return _draw(scores)


def lm_head_sample(inputs: Any, eps: float) -> Tensor:
    """A token int64 [T] of each row of `x` [T, H]: norm, product by `weight` [V, H], and a draw."""
    x, norm = inputs["x"], inputs["norm"]
    logits = F.linear(F.rms_norm(x, norm.shape, norm, eps), inputs["weight"]).float()
    return _draw(logits / inputs["temperature"][:, None])


def _draw(scores: Tensor) -> Tensor:
    """As torch.multinomial draws a single token, but without asking the device whether it can: a graph may hold it."""
    probabilities = scores.softmax(dim=-1)
    return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(dim=-1)
