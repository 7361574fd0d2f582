"""Sampling in plain Python, one number at a time, and rows of logits to sample."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from d3engine import FullDepth, SamplingParams
from d3engine.plan import Plan, Sampled
from d3engine.request.sequence import Sequence
from d3engine.request.token_rules import BadWords, TokenRules
from d3engine.sampling.sampler import Sampler

MASK = 0xFFFFFFFF
EOS = 9


def slow_philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox-4x32-10 word by word, from the paper's description."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second & MASK, (first >> 32) ^ c3 ^ k1, first & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


def slow_gumbel(seed: int, index: int, step: int, token: int) -> float:
    word = slow_philox((seed & MASK, seed >> 32), (token // 4, step, index, 0))[token % 4]
    return -math.log(-math.log(((word >> 9) + 0.5) / 2**23))


def slow_scores(logits: list[float], sequence: Sequence) -> list[float]:
    """What a row's logits become before the noise, one token after the other."""
    params, generated = sequence.params, sequence.token_ids
    scores = [logit + (params.logit_bias or {}).get(token, 0.0) for token, logit in enumerate(logits)]
    for token in range(len(scores)):
        excluded = params.allowed_token_ids is not None and token not in params.allowed_token_ids
        for word in sequence.rules.bad_words.words if sequence.rules else ():
            before = list(word[:-1])
            excluded |= word[-1] == token and generated[len(generated) - len(before) :] == before
        if len(generated) < params.min_tokens:
            excluded |= token in sequence.eos_token_ids or token in (params.stop_token_ids or ())
        if excluded:
            scores[token] = -math.inf
        if token in sequence.prompt_token_ids or token in generated:
            scores[token] *= 1 / params.repetition_penalty if scores[token] > 0 else params.repetition_penalty
        scores[token] -= params.frequency_penalty * generated.count(token)
        scores[token] -= params.presence_penalty * (token in generated)
    if params.greedy:
        return scores
    return slow_cut([score / params.temperature for score in scores], params)


def slow_softmax(scores: list[float]) -> list[float]:
    highest = max(scores)
    weights = [math.exp(score - highest) for score in scores]
    return [weight / sum(weights) for weight in weights]


def slow_cut(scores: list[float], params: SamplingParams) -> list[float]:
    probabilities = slow_softmax(scores)
    kept = {token for token, p in enumerate(probabilities) if p >= params.min_p * max(probabilities)}
    by_rank = sorted(kept, key=lambda token: -scores[token])[: params.top_k or len(scores)]
    left = slow_softmax([score if token in by_rank else -math.inf for token, score in enumerate(scores)])
    reached, chosen = 0.0, set()
    for token in by_rank:
        if reached >= params.top_p and params.top_p < 1 and chosen:
            break
        chosen.add(token)
        reached += left[token]
    return [score if token in chosen else -math.inf for token, score in enumerate(scores)]


def slow_token(logits: list[float], sequence: Sequence) -> int:
    scores = slow_scores(logits, sequence)
    if not sequence.params.greedy:
        noise = [slow_gumbel(sequence.seed, sequence.index, sequence.step, t) for t in range(len(scores))]
        scores = [score + more for score, more in zip(scores, noise, strict=True)]
    return max(range(len(scores)), key=lambda token: scores[token])


# -- rows to sample ------------------------------------------------------------------------------------------------


def sequence_of(
    params: SamplingParams,
    *,
    prompt: list[int] | None = None,
    generated: list[int] | None = None,
    bad_words: tuple[tuple[int, ...], ...] = (),
    index: int = 0,
) -> Sequence:
    return Sequence(
        request_id="r",
        index=index,
        prompt_token_ids=prompt or [0],
        params=params,
        schedule=FullDepth().schedule(2),
        eos_token_ids=frozenset() if params.ignore_eos else frozenset({EOS}),
        rules=TokenRules(params, BadWords(bad_words)),
        seed=params.seed or 0,
        priority=0,
        arrival=0,
        max_length=10**6,
        token_ids=list(generated or []),
    )


def sample(logits: torch.Tensor, sequences: list[Sequence], **plan: Any) -> Sampled:
    fields: dict[str, Any] = {"sequences": sequences, "sampled": np.arange(len(sequences)), "prompt_rows": ()}
    fields["greedy"] = False
    return Sampler()(logits, cast(Plan, SimpleNamespace(**(fields | plan))))


def tokens_of(sampled: Sampled) -> list[int]:
    """The token of each row, where every row has one."""
    return [token for (token,) in sampled.token_ids]


def random_logits(rows: int, tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, tokens, generator=torch.Generator().manual_seed(seed)) * 2.5
