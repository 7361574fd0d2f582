"""A sequence as it would be with some of its draft accepted: what sampling sees when it judges or continues a draft."""

from __future__ import annotations

from d3engine.request.constraint import Allowed
from d3engine.request.params import MAX_N
from d3engine.request.sequence import Sequence

ACCEPTANCE, DRAFTING = 1, 2
"""Streams of random numbers beside that of the tokens, 0, in the counter's word above the index, which is below MAX_N.

A draft that begins at step b draws from DRAFTING + b: its tokens are fresh even where an earlier draft, since rejected,
has looked at the same step.
"""


class Ahead:
    """A sequence as sampling would see it after `drafted` tokens more, with random numbers of the given stream."""

    def __init__(self, sequence: Sequence, drafted: list[int], stream: int = 0) -> None:
        self.params = sequence.params
        self.prompt_token_ids = sequence.prompt_token_ids
        self.token_ids = sequence.token_ids + drafted
        self.eos_token_ids = sequence.eos_token_ids
        self.rules = sequence.rules
        self.seed = sequence.seed
        self.index = sequence.index + MAX_N * stream
        self.step = len(self.token_ids)
        self.constraint = sequence.constraint
        self._drafted = drafted

    def allowed(self) -> Allowed | None:
        """The tokens that the sequence's form allows next; None where it allows any."""
        return None if self.constraint is None else self.constraint.allowed(self._drafted)
