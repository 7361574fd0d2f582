"""Sampling in plain Python, one number at a time, and rows of logits to sample."""

import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from sequences import new_sequence

from d3engine import SamplingParams
from d3engine.executor.sampler import Sampler
from d3engine.request.token_rules import BadWords, TokenRules
from d3engine.scheduling.plan import Plan, Sampled
from d3engine.scheduling.sequence import Sequence

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
    if params.dry_multiplier:
        breakers = sequence.rules.breakers if sequence.rules else frozenset()
        scores = slow_dry(scores, [*sequence.prompt_token_ids, *generated], params, breakers)
    if params.greedy:
        return scores
    scores = slow_top_n_sigma([score / params.temperature for score in scores], params.top_n_sigma)
    scores = slow_typical(slow_cut(scores, params), params.typical_p)
    word = slow_philox((sequence.seed & MASK, sequence.seed >> 32), (0, sequence.step, sequence.index, 1))[0]
    happens = (word >> 8) / 2**24 < params.xtc_probability
    return slow_xtc(scores, params.xtc_threshold) if happens else scores


def slow_dry(scores: list[float], known: list[int], params: SamplingParams, breakers: frozenset[int]) -> list[float]:
    """A repetition is the longest end of the text that stood before a token, without a breaker in it."""
    known = known if params.dry_penalty_last_n < 0 else known[max(0, len(known) - params.dry_penalty_last_n) :]
    found = list(scores)
    for token in set(known) - breakers:
        longest = 0
        for place in (place for place in range(1, len(known)) if known[place] == token):
            for length in range(1, place + 1):
                end = known[len(known) - length :]
                if end != known[place - length : place] or breakers.intersection(end):
                    break
                longest = max(longest, length)
        if longest >= params.dry_allowed_length:
            found[token] -= params.dry_multiplier * params.dry_base ** (longest - params.dry_allowed_length)
    return found


def slow_top_n_sigma(scores: list[float], most: float) -> list[float]:
    known = [score for score in scores if score > -math.inf]
    mean = sum(known) / len(known)
    deviation = math.sqrt(sum((score - mean) ** 2 for score in known) / len(known))
    return [score if not most or score >= max(known) - most * deviation else -math.inf for score in scores]


def slow_typical(scores: list[float], typical_p: float) -> list[float]:
    if typical_p == 1:
        return scores
    probabilities = slow_softmax(scores)
    entropy = -sum(p * math.log(p) for p in probabilities if p)
    known = [token for token, p in enumerate(probabilities) if p]
    reached, kept = 0.0, set()
    for token in sorted(known, key=lambda token: abs(-math.log(probabilities[token]) - entropy)):
        kept.add(token)
        reached += probabilities[token]
        if reached >= typical_p:
            break
    return [score if token in kept else -math.inf for token, score in enumerate(scores)]


def slow_xtc(scores: list[float], threshold: float) -> list[float]:
    above = [token for token, p in enumerate(slow_softmax(scores)) if p >= threshold]
    out = set(sorted(above, key=lambda token: scores[token])[1:])
    return [-math.inf if token in out else score for token, score in enumerate(scores)]


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
    breakers: frozenset[int] = frozenset(),
    index: int = 0,
) -> Sequence:
    ends = frozenset() if params.ignore_eos else frozenset({EOS})
    rules = TokenRules(params, BadWords(bad_words), breakers)
    own = {"index": index, "seed": params.seed or 0, "max_length": 10**6, "token_ids": list(generated or [])}
    return new_sequence(prompt or [0], params, eos_token_ids=ends, rules=rules, **own)


def sample(logits: torch.Tensor, sequences: list[Sequence], **plan: Any) -> Sampled:
    fields: dict[str, Any] = {"sequences": sequences, "sampled": np.arange(len(sequences)), "prompt_rows": ()}
    fields["greedy"] = False
    return Sampler()(logits, cast(Plan, SimpleNamespace(**(fields | plan))))


def tokens_of(sampled: Sampled) -> list[int]:
    """The token of each row, where every row has one."""
    return [token for (token,) in sampled.token_ids]


def random_logits(rows: int, tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, tokens, generator=torch.Generator().manual_seed(seed)) * 2.5
