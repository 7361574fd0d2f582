"""What one sequence has drafted and not yet verified.

A draft depends on the sequence alone: it begins where the last verification ended, and its length follows from the
rule, from the sequence's own past and from what it drafts. Preemption drops it, and it comes again as it was. So
neither batch mates nor memory change what a sequence draws.

How a sequence moves its stop probability is that of "Draft & Verify" (Zhang et al. 2023, section 3.4, and the constants
of its code): towards fewer drafted tokens where too few were accepted of late, else towards more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from d3engine.depth.draft_rule import DraftRule
from d3engine.depth.schedule import BoolArray

STOP_CHANGE = 0.001
"""By which a stop probability moves after a verification: the authors' step of 0.01, of which a tenth is taken."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """One drafted token, with the draft's probability of its likeliest token, and the distribution it was drawn from.

    `token_id` is None if the draft's logits were of no use: the draft ends before it. `distribution` is a tensor [V]
    where the sequence samples, else None; `top_probability` is None where the rule does not ask.
    """

    token_id: int | None
    top_probability: float | None = None
    distribution: Any = None


@dataclass(frozen=True, slots=True)
class Cycle:
    """A whole draft, the tokens that came of its verification, and what was wrong with full depth's logits, if
    anything."""

    drafted: list[int]
    tokens: list[int]
    fault: str | None = None


@dataclass(eq=False, slots=True)
class Draft:
    """The draft of one sequence: empty, growing, or `ended` and to be verified; and what came of earlier ones.

    `work` counts the layers run for it since the last verification, over all rows, a part of a layer as a half.
    `layers` are those of the draft now growing, `mlps` those whose MLP it runs, if these are others; of them follow
    `depth`, the layers that a drafted token runs, a part of one as a half (0 for a second model's), and `first_asleep`,
    the first of those that it leaves out. `stop_probability`
    is the rule's at first, `recent_acceptance` a mean of the shares accepted in which later ones weigh more.
    Verification may go on beyond the token that ends the answer: `num_discarded` tokens, `discarded_layers`.
    """

    rule: DraftRule
    length: int = 0
    most: int = 0
    begins_at: int = 0
    depth: float = 0
    first_asleep: int = 0
    layers: BoolArray | None = None
    mlps: BoolArray | None = None
    token_ids: list[int] = field(default_factory=list)
    distributions: list[Any] = field(default_factory=list)
    ended: bool = False
    work: float = 0
    stop_probability: float = 0.0
    recent_acceptance: float = 0.0
    num_drafted: int = 0
    num_accepted: int = 0
    num_verifications: int = 0
    num_discarded: int = 0
    discarded_layers: int = 0

    def __post_init__(self) -> None:
        self.length = self.rule.length
        self.stop_probability = self.rule.stop_probability

    @property
    def resume_layer(self) -> int:
        """The layer at which the verification of drafted rows begins; below it they have run all layers already."""
        return self.first_asleep if self.rule.resumes and self.token_ids else 0

    def begin(self, step: int, room: int) -> None:
        """Begin a draft at `step` of a sequence that may have `room` tokens more.

        It is at once `ended`, and empty, where none is worth while.
        """
        self.begins_at = step
        # Verification adds a token of its own, which must have room too.
        self.most = min(self.length, room - 1) if self.rule.skips(step) else 0
        self.layers, self.mlps = self.rule.layers(step), self.rule.mlps(step)
        if self.layers is not None:
            self.first_asleep = int(self.layers.argmin())
            self.depth = int(self.layers.sum() + (self.layers if self.mlps is None else self.mlps).sum()) / 2
        self.ended = self.most == 0

    def grow(self, proposal: Proposal, *, ends_answer: bool) -> None:
        """Take in the next drafted token, and end the draft where that says so, or where the token ends the answer."""
        if proposal.token_id is None:
            self.ended = True
            return
        self.token_ids.append(proposal.token_id)
        if proposal.distribution is not None:
            self.distributions.append(proposal.distribution)
        unsure = proposal.top_probability is not None and proposal.top_probability < self.stop_probability
        self.ended = unsure or len(self.token_ids) >= self.most or ends_answer

    def verified(self, num_accepted: int) -> None:
        """Count a verification, and adapt the length of the next draft, or where it stops, to it."""
        count = len(self.token_ids)
        if count:
            self.num_drafted += count
            self.num_accepted += num_accepted
            self.num_verifications += 1
            if self.rule.adaptive:
                change = 1 if num_accepted == count else -1
                self.length = min(max(self.length + change, 1), self.rule.length)
            if self.rule.target_acceptance is not None:
                self._move_stop(num_accepted / count, self.rule.target_acceptance)
        self.drop()

    def _move_stop(self, accepted: float, target: float) -> None:
        """Move the stop probability: a draft as long as allowed cannot become longer, and so changes nothing."""
        self.recent_acceptance = (self.recent_acceptance + accepted) / 2
        if self.recent_acceptance < target:
            self.stop_probability += STOP_CHANGE
        elif len(self.token_ids) < self.rule.length:
            self.stop_probability -= STOP_CHANGE

    def discard(self, shares: list[int]) -> None:
        """Count tokens that came after the answer's end, each with its share of the layers run."""
        self.num_discarded += len(shares)
        self.discarded_layers += sum(shares)

    def drop(self) -> None:
        """Forget the draft."""
        self.token_ids, self.distributions = [], []
        self.ended = False
        self.layers = self.mlps = None
        self.work = 0
