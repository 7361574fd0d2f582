"""A sequence: one growing list of token ids with its own generation step, schedule and cache slot.

A request of n sequences becomes n of these; the scheduler knows nothing of requests. The prefix cache spares the
others the prompt that the first has computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from itertools import takewhile
from typing import TypeAlias

import numpy as np

from d3engine.cache.kv_cache import IntArray
from d3engine.depth import ExitRule, Schedule
from d3engine.request.constraint import FAULT_PREFIX, Allowed, Constraint
from d3engine.request.draft import Draft
from d3engine.request.outputs import FinishReason
from d3engine.request.params import SamplingParams
from d3engine.request.token_rules import TokenRules, names_tokens


class Status(Enum):
    """Where a sequence stands; PREEMPTED waits again, with all it has generated."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


NO_SLOT = -1
Flow: TypeAlias = tuple[str, str]
"""Whose work it is, as fair queueing calls it: an API key, and a request of it."""


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
        """The largest end such that the tokens of steps [step, end) run the same layers.

        Tokens that may leave early are replayed as deep as they once went; how deep the next one goes is open, so it
        stands alone.
        """
        if self.exit_rule is None:
            return self.schedule.same_layers_until(step)
        again = takewhile(lambda depth: depth == self.depths[step], self.depths[step:])
        return step + max(1, sum(1 for _ in again))

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
            if self.constraint is not None and (end := self.end_of_form(token)) is not None:
                return end
            if len(self.token_ids) - first >= room:
                return FinishReason.LENGTH, None
        return None

    def end_of_form(self, token: int) -> tuple[FinishReason, str | None] | None:
        """How the sequence ends with its new `token`, by its form: complete, or at fault; None where it goes on."""
        if self.constraint is None:
            return None
        self.constraint.take(token)
        if self.constraint.fault is not None:
            return FinishReason.ABORT, self.constraint.fault
        return (FinishReason.STOP, None) if self.constraint.is_over() else None

    def own_fault(self, fault: str) -> str:
        """A fault of its step, named as the request's where what it excludes may leave no token of its form."""
        excludes = self.params.allowed_token_ids is not None or bool(self.params.bad_words)
        if self.constraint is None or not excludes or fault.startswith(FAULT_PREFIX):
            return fault
        return f"{FAULT_PREFIX}allowed_token_ids and bad_words leave none of the tokens that may come next"

    def would_end(self, token: int | None, *, after: int) -> bool:
        """Whether `token`, as the `after`-th from now, ends the answer: by itself, not by a stop string."""
        may_stop = self.step + after >= self.params.min_tokens
        return may_stop and (token in self.eos_token_ids or token in (self.params.stop_token_ids or ()))

    def all_token_ids(self) -> IntArray:
        return np.array(self.prompt_token_ids + self.token_ids, dtype=np.int32)
