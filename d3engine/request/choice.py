"""What choosing a sequence's next token takes: how much of it a device can do by itself."""

from __future__ import annotations

from enum import IntEnum

from d3engine.request.sequence import Sequence


class Choice(IntEnum):
    """How a token is chosen; each kind includes those before it, and HOST is what only the host can do."""

    GREEDY = 0  # the likeliest
    DRAW = 1  # a draw at some temperature
    CUT = 2  # a draw from the likeliest: min-p, top-k, top-p
    PENALISE = 3  # after penalties for what was there before
    HOST = 4  # log-probabilities are wanted, or which tokens may come depends on more than their logits


def choice_of(sequence: Sequence) -> Choice:
    """The kind that a sequence's sampling parameters ask for."""
    params = sequence.params
    wants_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
    if wants_logprobs or params.logit_bias or params.allowed_token_ids or sequence.bad_word_ids or params.min_tokens:
        return Choice.HOST
    if sequence.constraint is not None:
        return Choice.HOST  # what may come next depends on the token before it
    if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1:
        return Choice.PENALISE
    if params.greedy:
        return Choice.GREEDY
    return Choice.CUT if params.top_k or params.top_p < 1 or params.min_p else Choice.DRAW
