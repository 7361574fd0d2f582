"""What choosing a sequence's next token takes: how much of it a device can do by itself."""

from __future__ import annotations

from enum import IntEnum

from d3engine.scheduling.sequence import Sequence


class SamplingMode(IntEnum):
    """How a token is chosen; each kind includes those before it, and HOST is what only the host can do."""

    GREEDY = 0  # the likeliest
    DRAW = 1  # a draw at some temperature
    CUT = 2  # a draw from the likeliest: min-p, top-k, top-p
    PENALISE = 3  # after penalties for what was there before
    RESTRICT = 4  # after rules of what may come: bias, allowed tokens, bans, a form
    REPORT = 5  # and its log-probabilities are wanted
    HOST = 6  # more is wanted than a token of each row, or it is chosen as no device does


def choice_of(sequence: Sequence) -> SamplingMode:
    """The kind that a sequence's sampling parameters ask for."""
    choice = choice_of_token(sequence)
    return max(choice, SamplingMode.REPORT) if sequence.params.logprobs is not None else choice


def choice_of_token(sequence: Sequence) -> SamplingMode:
    """The same of the token alone, whether its log-probability is wanted or not."""
    params = sequence.params
    if params.has_other_samplers:
        return SamplingMode.HOST
    if is_restricted(sequence):
        return SamplingMode.RESTRICT
    if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1:
        return SamplingMode.PENALISE
    if params.greedy:
        return SamplingMode.GREEDY
    return SamplingMode.CUT if params.top_k or params.top_p < 1 or params.min_p else SamplingMode.DRAW


def is_restricted(sequence: Sequence) -> bool:
    """Whether there are rules of which tokens may come, or how their logits are shifted."""
    params = sequence.params
    return bool(sequence.rules is not None or params.min_tokens or sequence.constraint is not None)
