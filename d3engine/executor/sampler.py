"""From logits to tokens, one batched call a step.

A batch in which everybody wants the likeliest token is one reduction. Otherwise each row's logits are adjusted (bias,
allowed tokens, bad words, minimum length, penalties), divided by the temperature, cut (top-n-sigma, min-p, top-k,
top-p, typical-p, XTC), and the token is the argmax after Gumbel noise, which is a draw from the distribution. Every row
is treated alone, with randomness that depends on its own seed and step, so no row depends on its neighbours.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from d3engine.kernels.reference import gumbel, uniform
from d3engine.kernels.sampling import cut_min_p_, cut_top, cut_top_choices_, cut_top_n_sigma_, cut_typical_
from d3engine.request.outputs import Logprob
from d3engine.request.params import ALL_LOGPROBS, num_arguments
from d3engine.scheduling.plan import Chosen, Plan, Sampled
from d3engine.scheduling.sequence import Ahead, Sequence


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


ROWS_AT_ONCE = 64
"""Rows of which log-probabilities are held at once: those of a long prompt would take as much as its logits."""


def logprobs_of(logits: Tensor, tokens: list[int], count: int) -> list[dict[int, Logprob]]:
    """Log-probability and rank of each of `tokens`, and of the `count` likeliest (-1: all), from `logits` [T, V]."""
    parts = (slice(first, first + ROWS_AT_ONCE) for first in range(0, len(tokens), ROWS_AT_ONCE))
    return [found for part in parts for found in _logprobs_of(logits[part], tokens[part], count)]


def _logprobs_of(logits: Tensor, tokens: list[int], count: int) -> list[dict[int, Logprob]]:
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


FAULT = "the model's logits were not finite, or every token was excluded"

Rows: TypeAlias = list[Sequence | Ahead]
"""What each row is for: a sequence as it stands, or as it would be with drafted tokens accepted."""


class Sampler:
    """Callable: `sampler(logits, plan)`, with float32 `logits` [plan.logit_rows, V], or what the device has chosen."""

    def __call__(self, logits: Tensor | Chosen, plan: Plan) -> Sampled:
        if isinstance(logits, Chosen):
            return _of_run(logits, [plan.sequences[chunk] for chunk in plan.sampled.tolist()])
        count = len(plan.sampled)
        if plan.greedy:
            return _chosen(logits)
        sequences: Rows = [plan.sequences[chunk] for chunk in plan.sampled.tolist()]
        raw, prompt = logits[:count], logits[count:]
        sampled = _chosen(with_noise(scores_of(raw, sequences), sequences)) if count else Sampled([])
        sampled.faults.update({row: fault_of(sequences[row]) for row in sampled.faults})
        logprobs = _sampled_logprobs(raw, sequences, sampled.token_ids)
        return Sampled(sampled.token_ids, logprobs, prompt_logprobs(prompt, plan), sampled.faults)


def _chosen(scores: Tensor) -> Sampled:
    """The best token of each row; a row whose best score is not finite is a fault of its own."""
    if not len(scores):
        return Sampled([])
    tokens, sound = best_of(scores)
    faults = {row: FAULT for row, is_sound in enumerate(sound) if not is_sound}
    return Sampled([[] if row in faults else [token] for row, token in enumerate(tokens)], faults=faults)


def fault_of(sequence: Sequence | Ahead) -> str:
    """Why a row has no token of use."""
    if sequence.rules is not None and sequence.rules.fault is not None:
        return sequence.rules.fault
    constraint = sequence.constraint
    return FAULT if constraint is None or constraint.fault is None else constraint.fault


def best_of(scores: Tensor) -> tuple[list[int], list[bool]]:
    """The best token of each row, and whether its score is finite: otherwise the row's logits were of no use."""
    tokens = scores.argmax(dim=-1)
    best = scores.gather(1, tokens.unsqueeze(1)).flatten().tolist()  # NaN wins an argmax, so it is seen here
    return tokens.tolist(), [math.isfinite(score) for score in best]


def _of_run(chosen: Chosen, sequences: list[Sequence]) -> Sampled:
    """The tokens of each row of a run, and the log-probabilities of those who want them."""
    sampled = _until_faults(chosen)
    sampled.faults.update({row: chosen.faults.get(row, FAULT) for row in sampled.faults})
    if chosen.logits is None:
        return sampled
    logprobs: list[list[dict[int, Logprob]] | None] = [None] * len(sequences)
    reporting = [row for row, sequence in enumerate(sequences) if sequence.params.logprobs is not None]
    for row, logits in zip(reporting, torch.from_numpy(chosen.logits).unbind(1), strict=True):
        count = sequences[row].params.logprobs
        assert count is not None
        logprobs[row] = logprobs_of(logits[: len(sampled.token_ids[row])], sampled.token_ids[row], count)
    return replace(sampled, logprobs=logprobs)


def _until_faults(chosen: Chosen) -> Sampled:
    """The tokens of each row, up to the first one whose score was not finite: there the row ends by a fault."""
    if math.isfinite(chosen.scores.sum(dtype=np.float64)):  # all of them are: no sum of so few float32 leaves float64
        return Sampled(chosen.token_ids.T.tolist(), opened=chosen.opened)
    healthy = np.isfinite(chosen.scores)
    counts = np.where(healthy.all(axis=0), len(healthy), healthy.argmin(axis=0)).tolist()
    tokens = [row[:count] for row, count in zip(chosen.token_ids.T.tolist(), counts, strict=True)]
    faults = {row: FAULT for row, count in enumerate(counts) if count < len(healthy)}
    return Sampled(tokens, faults=faults, opened=chosen.opened)


def scores_of(logits: Tensor, sequences: Rows) -> Tensor:
    """What each row makes of its logits before any noise: a copy with all that it asks for applied.

    In rows that sample, the softmax of the scores is the distribution that they draw from; greedy rows take the best.
    """
    logits = logits.clone()
    for row, sequence in zip(logits, sequences, strict=True):
        _process_(row, sequence)
        _restrict_(row, sequence)
        _penalise_(row, sequence)
    _keep_to_form_(logits, sequences)
    return _scaled_(logits, sequences)


def _keep_to_form_(logits: Tensor, sequences: Rows) -> None:
    """Exclude what the forms of answers do not allow next, in all rows that have one at once, in place."""
    asked = ((row, sequence.allowed()) for row, sequence in enumerate(sequences))
    found = {row: allowed for row, allowed in asked if allowed is not None}
    if not found:
        return
    packed = torch.from_numpy(np.stack(list(found.values()))).to(logits.device)
    places = torch.arange(8, dtype=torch.uint8, device=logits.device)
    allowed = ((packed.unsqueeze(-1) >> places) & 1).flatten(1)[:, : logits.shape[1]].bool()
    rows = list(found)
    logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)


def _process_(row: Tensor, sequence: Sequence | Ahead) -> None:
    """Put a row through the functions of its request, in place; what they raise is a fault of this request alone."""
    for function in sequence.params.logits_processors or ():
        known = [list(sequence.prompt_token_ids), list(sequence.token_ids)][3 - num_arguments(function) :]
        try:
            row.copy_(function(*known, row.clone()).detach().expand_as(row))
        except Exception as error:
            assert sequence.rules is not None
            sequence.rules.fault = f"a function of logits_processors raised {type(error).__name__}: {error}"
            row.fill_(-torch.inf)


def _restrict_(row: Tensor, sequence: Sequence | Ahead) -> None:
    """Bias, and exclude the tokens that may not come now, in place."""
    params = sequence.params
    rules, banned = sequence.rules, list[int]()
    if rules is not None:
        if params.logit_bias:
            tokens, biases = rules.bias_on(row.device)
            row[tokens] += biases
        if (excluded := rules.excluded(row.device, len(row))) is not None:
            row.masked_fill_(excluded, -torch.inf)
        banned += rules.bad_words.banned(sequence.token_ids)
    if sequence.step < params.min_tokens:
        banned += [*sequence.eos_token_ids, *(params.stop_token_ids or ())]
    if banned:
        row[torch.tensor(banned, device=row.device)] = -torch.inf


def _penalise_(row: Tensor, sequence: Sequence | Ahead) -> None:
    """Repetition (prompt and output), frequency and presence (output) penalties, in place."""
    params = sequence.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*sequence.prompt_token_ids, *sequence.token_ids}), device=row.device)
        scores = row[seen]
        row[seen] = torch.where(scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty)
    if sequence.token_ids and (params.frequency_penalty or params.presence_penalty):
        generated = torch.tensor(sequence.token_ids, device=row.device)
        counts = torch.bincount(generated, minlength=row.numel())
        row -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    if params.dry_multiplier:
        tokens, penalties = repetitions(sequence)
        row[torch.from_numpy(tokens).to(row.device)] -= torch.from_numpy(penalties).to(row.device)


LONGEST_REPETITION = 64
"""Tokens of a repetition that are followed: a penalty for more is beyond every logit anyway."""


def repetitions(sequence: Sequence | Ahead) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """The tokens that would go on with a repetition (DRY), and what each loses."""
    params = sequence.params
    breakers = frozenset[int]() if sequence.rules is None else sequence.rules.breakers
    known = np.array([*sequence.prompt_token_ids, *sequence.token_ids], np.int64)
    known = known if params.dry_penalty_last_n < 0 else known[len(known) - params.dry_penalty_last_n :]
    end, lengths = len(known) - 1, dict[int, int]()
    places = np.arange(end)  # of tokens that may be the last one of a repetition
    for length in range(min(LONGEST_REPETITION, end + 1)):
        if int(known[end - length]) in breakers:
            break
        places = places[places >= length]
        places = places[known[places - length] == known[end - length]]
        if not places.size:
            break
        lengths.update(dict.fromkeys(known[places + 1].tolist(), length + 1))
    found = {
        token: params.dry_multiplier * params.dry_base ** min(length - params.dry_allowed_length, LONGEST_REPETITION)
        for token, length in lengths.items()
        if length >= params.dry_allowed_length and token not in breakers
    }
    return np.array(list(found), np.int64), np.array(list(found.values()), np.float32)


def _scaled_(logits: Tensor, sequences: Rows) -> Tensor:
    """Divide by the temperature and cut (min-p, top-k, top-p) in rows that sample, in place."""
    rows = [row for row, sequence in enumerate(sequences) if not sequence.params.greedy]
    if not rows:
        return logits
    chosen = [sequences[row] for row in rows]

    def each(values: list[float]) -> Tensor:
        return torch.tensor(values, device=logits.device)

    scores = logits[rows] / each([s.params.temperature for s in chosen]).unsqueeze(1)
    if any(s.params.top_n_sigma for s in chosen):
        cut_top_n_sigma_(scores, each([s.params.top_n_sigma for s in chosen]))
    if any(s.params.min_p for s in chosen):
        cut_min_p_(scores, each([s.params.min_p for s in chosen]))
    if any(s.params.top_k or s.params.top_p < 1 for s in chosen):
        scores = cut_top(scores, each([s.params.top_k for s in chosen]), each([s.params.top_p for s in chosen]))
    if any(s.params.typical_p < 1 for s in chosen):
        cut_typical_(scores, each([s.params.typical_p for s in chosen]))
    if any(s.params.xtc_probability for s in chosen):
        happens = uniform(*_counters(chosen, logits.device)) < each([s.params.xtc_probability for s in chosen])
        cut_top_choices_(scores, each([s.params.xtc_threshold for s in chosen]), happens)
    logits[rows] = scores
    return logits


def _counters(sequences: Rows, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Seeds, indices and steps, which random numbers follow from."""
    integers = torch.tensor([(s.seed, s.index, s.step) for s in sequences], device=device)
    return integers[:, 0], integers[:, 1], integers[:, 2]


def with_noise(scores: Tensor, sequences: Rows) -> Tensor:
    """Scores whose argmax is a draw: with Gumbel noise in rows that sample, a copy; greedy rows as they are."""
    rows = [row for row, sequence in enumerate(sequences) if not sequence.params.greedy]
    if not rows:
        return scores
    noisy = scores.clone()
    noisy[rows] += gumbel(*_counters([sequences[row] for row in rows], scores.device), scores.shape[1])
    return noisy


def _sampled_logprobs(
    logits: Tensor, sequences: Rows, token_ids: list[list[int]]
) -> list[list[dict[int, Logprob]] | None] | None:
    """The log-probabilities of the rows that asked for them."""
    if all(sequence.params.logprobs is None for sequence in sequences):
        return None
    return [
        None
        if sequence.params.logprobs is None
        else logprobs_of(logits[row : row + len(tokens)], tokens, sequence.params.logprobs)
        for row, (sequence, tokens) in enumerate(zip(sequences, token_ids, strict=True))
    ]
