"""What a policy that drafts says: who proposes tokens, how many at once, and when to stop earlier.

The one idea: drafting is no schedule. Every token that comes out is full depth's, so the schedule of such a policy is
full depth; beside it stands this rule, which says how the tokens are guessed before full depth judges them.
"""

from __future__ import annotations

from dataclasses import dataclass

from d3engine.depth.schedule import BoolArray, Schedule

MAX_DRAFT_LENGTH = 32
"""Tokens of a draft at most: beyond a few, hardly any is accepted."""


@dataclass(frozen=True)
class DraftRule:
    """How a sequence drafts.

    Attributes:
        length: tokens of a draft at most, 1 .. MAX_DRAFT_LENGTH.
        stop_probability: a draft ends with the first token at whose place the likeliest one had less than this
            probability, by the draft's raw distribution; 0 never ends it.
        adaptive: whether each sequence finds a length of its own, in [1, length] and at first `length`: one more after
            a draft that was accepted whole, one less after any other.
        schedule: the layers of a draft by the same model: those of the step at which it begins, for all its tokens. So
            no token of a draft reads an entry that another left out, whatever the schedule. None: a second model.
        resumes: whether verification starts at the first layer that the draft skipped, from kept hidden states.
        model: the directory of the second model that drafts, or None.
        mlp_schedule: the layers whose MLP a draft runs; `schedule` is then of their attention. None: of whole layers.
        target_acceptance: the part of its drafted tokens that a sequence is to have accepted: its own
            `stop_probability` moves towards that (`request/sequence.py` has how); None: it stays.
    """

    length: int
    stop_probability: float = 0.0
    adaptive: bool = False
    schedule: Schedule | None = None
    resumes: bool = False
    model: str | None = None
    mlp_schedule: Schedule | None = None
    target_acceptance: float | None = None

    def layers(self, step: int) -> BoolArray | None:
        """Bool [L]: the layers of a draft that begins at `step`; None for a second model's, which runs all of its own.

        A draft that skips nothing would be the full model itself: `skips(step)` tells.
        """
        return None if self.schedule is None else self.schedule.active(step)

    def mlps(self, step: int) -> BoolArray | None:
        """Bool [L]: the layers whose MLP such a draft runs; None where they are `layers`."""
        return None if self.mlp_schedule is None else self.mlp_schedule.active(step)

    def skips(self, step: int) -> bool:
        """Whether a draft that begins at `step` costs less than what it drafts for."""
        if self.schedule is None:
            return True
        parts = [self.schedule] if self.mlp_schedule is None else [self.schedule, self.mlp_schedule]
        return any(part.depth_at(step) < part.num_layers for part in parts)
