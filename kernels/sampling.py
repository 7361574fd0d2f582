"""What each row of a batch asks of `sample`, as tensors, and its rules in plain torch.

Everything is a tensor [T] with one number per row and lies on the device of the logits, so a captured graph serves rows
that ask for other things every time. What no row in the batch asks for is None: that, the launch knows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Cuts:
    """Which tokens may be drawn at all: min-p first, then top-k of what is left, then top-p of that."""

    min_p: Tensor  # float32 [T] in [0, 1]: less likely than this times the likeliest goes; 0 keeps all
    top_k: Tensor  # int64 [T]: the number of the likeliest that stay; 0 keeps all
    top_p: Tensor  # float32 [T] in (0, 1]: the smallest set of likeliest that reaches this stays; 1 keeps all


@dataclass(frozen=True, slots=True, eq=False)
class Penalties:
    """What tokens lose for having been there before."""

    repetition: Tensor  # float32 [T] > 0: divides positive, multiplies negative logits of prompt and output; 1 is none
    presence: Tensor  # float32 [T]: subtracted once from the tokens of the output
    frequency: Tensor  # float32 [T]: subtracted for each time a token is in the output
    prompt_seen: Tensor  # uint8 [T, V]: 1 where the token is in the row's prompt
    output_counts: Tensor  # int32 [T, V]: how often the token is in the row's output; see `count_tokens`


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRows:
    """How every row chooses its token. A row of temperature 0 takes the likeliest: it is never cut, and draws nothing.

    The random numbers of a row depend on its seed, its index and the step that it is called with: see `gumbel`.
    """

    temperature: Tensor  # float32 [T]; a caller whose users may write 1e-30 makes that 0, or logits overflow
    seeds: Tensor  # int64 [T]
    indices: Tensor  # int64 [T] in [0, 2**32): which sequence of its request a row is
    cuts: Cuts | None = None  # None: no row cuts
    penalties: Penalties | None = None  # None: no row has penalties


def penalised(logits: Tensor, penalties: Penalties) -> Tensor:
    """The logits [T, V] after repetition, and then frequency and presence penalties: a copy."""
    counts = penalties.output_counts
    repetition = penalties.repetition.unsqueeze(1)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    scores = torch.where((penalties.prompt_seen != 0) | (counts > 0), repeated, logits)
    return scores - (penalties.frequency.unsqueeze(1) * counts + penalties.presence.unsqueeze(1) * (counts > 0))


def cut_min_p_(scores: Tensor, min_p: Tensor) -> Tensor:
    """Set to -inf, in place, what is less likely than `min_p` [T] times the likeliest of its row; returns `scores`."""
    # p < min_p * p_max says the same of logits, which need no normalisation.
    floor = scores.max(dim=-1, keepdim=True).values + min_p.unsqueeze(1).log()
    return scores.masked_fill_(scores < floor, -torch.inf)


def cut_top(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """A copy of `scores` [T, V], -inf beyond the `top_k` likeliest, and then beyond the smallest set to reach `top_p`.

    `top_k` int64 [T], 0 for all, and `top_p` float32 [T]. Of equal scores the lower token is the likelier.
    """
    top_k, top_p = top_k.unsqueeze(1), top_p.unsqueeze(1)
    ordered, tokens = scores.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(scores.shape[1], device=scores.device)
    ordered.masked_fill_((ranks >= top_k) & (top_k > 0), -torch.inf)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    beyond = (before >= top_p) & (ranks > 0) & (top_p < 1)  # the likeliest always stays
    ordered.masked_fill_(beyond, -torch.inf)
    return torch.empty_like(scores).scatter_(1, tokens, ordered)


def cut_top_n_sigma_(scores: Tensor, most: Tensor) -> Tensor:
    """Set to -inf, in place, what is more than `most` [T] standard deviations below the highest of its row.

    What is -inf already counts for neither mean nor deviation; `most` 0 keeps all. Returns `scores`.
    """
    known = scores.isfinite()
    count = known.sum(dim=-1, keepdim=True)
    mean = scores.where(known, 0).sum(dim=-1, keepdim=True) / count
    deviation = ((scores - mean).where(known, 0).square().sum(dim=-1, keepdim=True) / count).sqrt()
    floor = scores.max(dim=-1, keepdim=True).values - most.unsqueeze(1) * deviation
    return scores.masked_fill_((scores < floor) & (most.unsqueeze(1) > 0), -torch.inf)


def cut_typical_(scores: Tensor, typical_p: Tensor) -> Tensor:
    """Set to -inf, in place, what is beyond the smallest set of tokens, those of the most typical surprise first, that
    reaches the probability `typical_p` [T]; 1 keeps all. Returns `scores` (Meister et al. 2022)."""
    logprobs = scores.log_softmax(dim=-1)
    probabilities = logprobs.exp()
    entropy = -(probabilities * logprobs).nansum(dim=-1, keepdim=True)
    distance = (-logprobs - entropy).abs()
    ordered, tokens = distance.sort(dim=-1, stable=True)
    reached = probabilities.gather(1, tokens).cumsum(dim=-1) < typical_p.unsqueeze(1)
    last = reached.sum(dim=-1, keepdim=True).clamp_(max=scores.shape[1] - 1)
    beyond = distance > ordered.gather(1, last)
    return scores.masked_fill_(beyond & (typical_p.unsqueeze(1) < 1), -torch.inf)


def cut_top_choices_(scores: Tensor, threshold: Tensor, happens: Tensor) -> Tensor:
    """Set to -inf, in place, all but the least likely of the tokens whose probability reaches `threshold` [T], in rows
    where it `happens` (bool [T]). Returns `scores`."""
    above = scores.softmax(dim=-1) >= threshold.unsqueeze(1)
    backwards = scores.masked_fill(~above, torch.inf).flip(-1)  # of equal scores the higher token is the less likely
    least = scores.shape[1] - 1 - backwards.argmin(dim=-1, keepdim=True)
    kept = torch.zeros_like(above).scatter_(1, least, value=True)
    return scores.masked_fill_(above & ~kept & happens.unsqueeze(1), -torch.inf)
