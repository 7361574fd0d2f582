"""What one sequence has drafted and not yet verified.

A draft depends on the sequence alone: it begins where the last verification ended, and its length follows from the
rule, from the sequence's own past and from what it drafts. Preemption drops it, and it comes again as it was. So
neither batch mates nor memory change what a sequence draws.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from d3engine.depth.draft_rule import DraftRule
from d3engine.depth.schedule import BoolArray


@dataclass(frozen=True, slots=True)
class Proposal:
    """One drafted token, with the draft's probability of its likeliest token, and the distribution it was drawn from.

    `token_id` is None if the draft's logits were of no use: the draft ends before it. `distribution` is a tensor [V]
    where the sequence samples, else None; `top_probability` is None where the rule does not ask.
    """

    token_id: int | None
    top_probability: float | None = None
    distribution: Any = None


@dataclass(eq=False, slots=True)
class Draft:
    """The draft of one sequence: empty, growing, or `ended` and to be verified; and what came of earlier ones.

    `work` counts the layers run for it since the last verification, over all rows. `layers` are those of the draft now
    growing. Verification may go on beyond the token that ends the answer: `num_discarded` tokens, `discarded_layers`.
    """

    rule: DraftRule
    length: int = 0
    most: int = 0
    begins_at: int = 0
    layers: BoolArray | None = None
    token_ids: list[int] = field(default_factory=list)
    distributions: list[Any] = field(default_factory=list)
    ended: bool = False
    work: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_verifications: int = 0
    num_discarded: int = 0
    discarded_layers: int = 0

    def __post_init__(self) -> None:
        self.length = self.rule.length

    @property
    def resume_layer(self) -> int:
        """The layer at which the verification of drafted rows begins; below it they have run all layers already."""
        if not self.rule.resumes or self.layers is None or not self.token_ids:
            return 0
        return int(self.layers.argmin())

    def begin(self, step: int, room: int) -> None:
        """Begin a draft at `step` of a sequence that may have `room` tokens more.

        It is at once `ended`, and empty, where none is worth while.
        """
        self.begins_at = step
        # Verification adds a token of its own, which must have room too.
        self.most = min(self.length, room - 1) if self.rule.skips(step) else 0
        self.layers = self.rule.layers(step)
        self.ended = self.most == 0

    def grow(self, proposal: Proposal, *, ends_answer: bool) -> None:
        """Take in the next drafted token, and end the draft where that says so, or where the token ends the answer."""
        if proposal.token_id is None:
            self.ended = True
            return
        self.token_ids.append(proposal.token_id)
        if proposal.distribution is not None:
            self.distributions.append(proposal.distribution)
        unsure = proposal.top_probability is not None and proposal.top_probability < self.rule.stop_probability
        self.ended = unsure or len(self.token_ids) >= self.most or ends_answer

    def verified(self, num_accepted: int) -> None:
        """Count a verification, and adapt the length of the next draft to it."""
        count = len(self.token_ids)
        if count:
            self.num_drafted += count
            self.num_accepted += num_accepted
            self.num_verifications += 1
            if self.rule.adaptive:
                change = 1 if num_accepted == count else -1
                self.length = min(max(self.length + change, 1), self.rule.length)
        self.drop()

    def discard(self, shares: list[int]) -> None:
        """Count tokens that came after the answer's end, each with its share of the layers run."""
        self.num_discarded += len(shares)
        self.discarded_layers += sum(shares)

    def drop(self) -> None:
        """Forget the draft."""
        self.token_ids, self.distributions = [], []
        self.ended = False
        self.layers = None
        self.work = 0
