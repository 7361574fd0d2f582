"""A sequence: a growing list of token ids with its generation step, schedule and cache
slot. A request of n becomes n of these."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from d3engine.depth import ExitRule, Schedule
from d3engine.depth.policy import DraftRule
from d3engine.depth.schedule import BoolArray
from d3engine.request.constraint import FAULT_PREFIX, Allowed, Constraint
from d3engine.request.engine_request import Flow
from d3engine.request.outputs import FinishReason, Logprob
from d3engine.request.params import SamplingParams
from d3engine.request.token_rules import TokenRules, names_tokens
from d3engine.scheduling.kv_cache import IntArray
from d3engine.scheduling.prefix_cache import Salt

if TYPE_CHECKING:
    from d3engine.model.adapters import Adapter  # which needs torch

STOP_CHANGE = 0.001
"""By which a stop probability moves after a verification: the authors' step of 0.01, of which a tenth is taken."""


FIRST_LENGTH = 4
"""Tokens of a first draft whose length is left open, where no executor finds a better one."""

USUAL_LENGTH = 3
"""Tokens that a draft has as a rule whose length is left open: most it has seldom."""

NEW_WEIGHT = 0.1
"""Of the newest draft in the mean length of drafts."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """One drafted token, with the draft's probability of its likeliest token.

    `token_id` is None if the draft's logits were of no use: the draft ends before it. `top_probability` is None where
    the rule does not ask.
    """

    token_id: int | None
    top_probability: float | None = None


@dataclass(frozen=True, slots=True)
class Cycle:
    """A whole draft, the tokens that came of its verification, and what was wrong with full depth's logits, if
    anything. A second model has then computed `num_computed` positions."""

    drafted: list[int]
    tokens: list[int]
    fault: str | None = None
    num_computed: int = 0
    logprobs: list[dict[int, Logprob]] | None = None


@dataclass(eq=False, slots=True)
class Draft:
    """The draft of one sequence: empty, growing, or `ended` and to be verified; and what came of earlier ones.

    `work` counts the layers run for it since the last verification, over all rows, a part of a layer as a half.
    `layers` are those of the draft now growing, `mlps` those whose MLP it runs, if these are others; of them follow
    `depth`, the layers that a drafted token runs, a part of one as a half (0 for a second model's), and `first_asleep`,
    the first of those that it leaves out. `stop_probability`
    is the rule's at first, `recent_acceptance` a mean of the shares accepted in which later ones weigh more,
    `recent_length` such a mean of the tokens drafted, empty drafts included.
    Verification may go on beyond the token that ends the answer: `num_discarded` tokens, `discarded_layers`.
    """

    rule: DraftRule
    length: int = 0
    most: int = 0
    depth: float = 0
    first_asleep: int = 0
    layers: BoolArray | None = None
    mlps: BoolArray | None = None
    token_ids: list[int] = field(default_factory=list)
    ended: bool = False
    work: float = 0
    stop_probability: float = 0.0
    recent_acceptance: float = 0.0
    recent_length: float = USUAL_LENGTH
    num_drafted: int = 0
    num_accepted: int = 0
    num_verifications: int = 0
    num_discarded: int = 0
    discarded_layers: int = 0

    def __post_init__(self) -> None:
        self.length = min(FIRST_LENGTH, self.rule.length) if self.rule.by_cost else self.rule.length
        self.stop_probability = self.rule.stop_probability

    @property
    def resume_layer(self) -> int:
        """The layer at which the verification of drafted rows begins; below it they have run all layers already."""
        return self.first_asleep if self.rule.resumes and self.token_ids else 0

    def begin(self, step: int, room: int) -> None:
        """Begin a draft at `step` of a sequence that may have `room` tokens more.

        It is at once `ended`, and empty, where none is worth while.
        """
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
        unsure = proposal.top_probability is not None and proposal.top_probability < self.stop_probability
        self.ended = unsure or len(self.token_ids) >= self.most or ends_answer

    def verified(self, num_accepted: int) -> None:
        """Count a verification, and adapt the length of the next draft, or where it stops, to it."""
        count = len(self.token_ids)
        self.recent_length += NEW_WEIGHT * (count - self.recent_length)
        if count:
            self.num_drafted += count
            self.num_accepted += num_accepted
            self.num_verifications += 1
            if self.rule.adaptive or self.rule.by_cost:
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
        self.token_ids = []
        self.ended = False
        self.layers = self.mlps = None
        self.work = 0


class Ahead:
    """A sequence as sampling would see it after `drafted` tokens more."""

    def __init__(self, sequence: Sequence, drafted: list[int]) -> None:
        self.params = sequence.params
        self.prompt_token_ids = sequence.prompt_token_ids
        self.token_ids = sequence.token_ids + drafted
        self.eos_token_ids = sequence.eos_token_ids
        self.rules = sequence.rules
        self.seed = sequence.seed
        self.index = sequence.index
        self.step = len(self.token_ids)
        self.constraint = sequence.constraint
        self._drafted = drafted

    def allowed(self) -> Allowed | None:
        """The tokens that the sequence's form allows next; None where it allows any."""
        return None if self.constraint is None else self.constraint.allowed(self._drafted)


class Status(Enum):
    """Where a sequence stands; PREEMPTED waits again, with all it has generated."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


NO_SLOT = -1


@dataclass(eq=False, slots=True)
class Sequence:
    """Everything the core knows of one sequence.

    Args:
        request_id: the request it belongs to.
        index: which of the request's n sequences it is.
        prompt_token_ids: the prompt.
        params: how to sample, and when to stop.
        schedule: its layers by generation step.
        exit_rule: when its tokens may leave before the last of these layers; None: never.
        eos_token_ids: the ids that end it; empty when they are to be ignored.
        seed: its random numbers depend on (seed, index, step) alone.
        priority: lower runs first; among equals flows take turns, and within a flow the one that arrived first.
        arrival: a number that grows with each sequence.
        max_length: tokens of prompt and output at most.
        shares_prompt: whether its prompt may come from the prefix cache and go there.
        prefix_keys: the prefix cache's keys of its prompt, set by the scheduler; empty when it may not share.
        streams: whether each token is wanted as soon as it is there, rather than the whole answer at the end.
        draft: what it has drafted, if it drafts; its answer, `token_ids`, holds verified tokens alone.
        constraint: what form its answer must have, and how far it has come in it; None: any.
        rules: which tokens its request allows, where it says so; shared by the request's sequences.
        flow: what it takes turns as with other flows.
        adapter: whose maps its rows add to products; None: those of the model alone.

    Attributes:
        depths: how many layers each generated token took.
        scheduled_time: when it first entered the batch, on the monotonic clock.
    """

    request_id: str
    index: int
    prompt_token_ids: list[int]
    params: SamplingParams
    schedule: Schedule
    eos_token_ids: frozenset[int]
    seed: int
    priority: int
    arrival: int
    max_length: int
    shares_prompt: bool = True
    prefix_keys: list[bytes] = field(default_factory=list)
    streams: bool = True
    exit_rule: ExitRule | None = None
    draft: Draft | None = None
    constraint: Constraint | None = None
    rules: TokenRules | None = None
    flow: Flow = ("", "")
    adapter: Adapter | None = None

    token_ids: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    slot: int = NO_SLOT
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    scheduled_time: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def __post_init__(self) -> None:
        if self.rules is None and names_tokens(self.params):
            self.rules = TokenRules(self.params)

    @property
    def cache_salt(self) -> Salt:
        """Sequences of other salts share no prompt blocks with it."""
        salt: Salt = self.params.cache_salt
        steer = self.params.steered
        if steer is not None and (key := steer.salt(len(self.prompt_token_ids))) is not None:
            salt = (key, salt)
        return salt if self.adapter is None else (self.adapter.number, salt)

    @property
    def sharable_prompt(self) -> list[int]:
        """What of its prompt may come from the prefix cache: states that are captured must be computed."""
        prompt, capture = self.prompt_token_ids, self.params.captured
        return prompt if capture is None else prompt[: capture.at(len(prompt)).start + 1]

    @property
    def order(self) -> tuple[int, int]:
        """Its place among the sequences of its flow."""
        return (self.priority, self.arrival)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.token_ids)

    @property
    def max_tokens(self) -> int:
        """Tokens to generate at most: what the request asked for, or else as many as there is room for."""
        asked = self.params.max_tokens
        return self.max_length - len(self.prompt_token_ids) if asked is None else asked

    @property
    def room(self) -> int:
        """How many tokens more it may have."""
        return self.max_length - self.num_tokens

    @property
    def grows_by_single_tokens(self) -> bool:
        """Whether each new token is looked at before the next: to be passed on, or since it may end the answer where
        the sequence itself does not see it."""
        is_read = self.streams or self.params.logprobs is not None
        return is_read or self.constraint is not None or bool(self.params.stop_strings)

    @property
    def step(self) -> int:
        """The index of the generated token that comes next."""
        return len(self.token_ids)

    def same_layers_until(self, step: int) -> int:
        """The largest end such that the tokens of steps [step, end) run the same layers of the same weights.

        Tokens that may leave early are replayed as deep as they once went; how deep the next one goes is open, so it
        stands alone.
        """
        end = self.schedule.same_layers_until(step)
        if self.exit_rule is None:
            return end
        again = takewhile(lambda depth: depth == self.depths[step], self.depths[step:])
        return min(end, step + max(1, sum(1 for _ in again)))

    def allowed(self) -> Allowed | None:
        """The tokens that its form allows next; None where it allows any."""
        return None if self.constraint is None else self.constraint.allowed()

    def grow(self, token_ids: list[int], depths: list[int]) -> tuple[FinishReason, str | int | None] | None:
        """Take these tokens, and the layers that each took, up to the one that ends the answer; returns how it does."""
        params, first, room = self.params, len(self.token_ids), self.room
        for token, depth in zip(token_ids, depths, strict=True):
            self.token_ids.append(token)
            self.depths.append(depth)
            may_stop = len(self.token_ids) >= params.min_tokens
            if may_stop and token in self.eos_token_ids:
                return FinishReason.STOP, None
            if may_stop and params.stop_token_ids and token in params.stop_token_ids:
                return FinishReason.STOP, token
            if self.constraint is not None:
                self.constraint.take(token)
                if self.constraint.fault is not None:
                    return FinishReason.ABORT, self.constraint.fault
                if self.constraint.is_over():
                    return FinishReason.STOP, None
            if len(self.token_ids) - first >= room:
                return FinishReason.LENGTH, None
        return None

    def own_fault(self, fault: str) -> str:
        """A fault of its step, named as the request's where what it excludes may leave no token of its form."""
        params = self.params
        excludes = params.allowed_token_ids is not None or bool(params.bad_words or params.stop_token_ids)
        if self.constraint is None or not excludes or fault.startswith(FAULT_PREFIX):
            return fault
        names = "allowed_token_ids, bad_words and stop_token_ids"
        return f"{FAULT_PREFIX}{names} leave none of the tokens that may come next"

    def would_end(self, token: int | None, *, after: int) -> bool:
        """Whether `token`, as the `after`-th from now, ends the answer: by itself, not by a stop string."""
        may_stop = self.step + after >= self.params.min_tokens
        return may_stop and (token in self.eos_token_ids or token in (self.params.stop_token_ids or ()))

    def all_token_ids(self) -> IntArray:
        return np.array(self.prompt_token_ids + self.token_ids, dtype=np.int32)
