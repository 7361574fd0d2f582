"""A request that has been read and checked, and is not queued yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from d3engine.depth import Schedule
from d3engine.depth.policy import DraftRule
from d3engine.request.constraint import Form
from d3engine.request.params import SamplingParams
from d3engine.request.token_rules import TokenRules

if TYPE_CHECKING:
    from d3engine.model.adapters import Adapter  # which needs torch

Flow: TypeAlias = tuple[str, str]
"""Whose work it is, as fair queueing calls it: an API key, and a request of it."""


@dataclass(frozen=True)
class EngineRequest:
    """What `Engine.prepare` makes and `Engine.add` takes; it holds nothing of the engine's, and may be forgotten.

    What depends on the order of requests is not in here (their arrival, and the seed of those that bring none): the
    order is that of `add`.

    Attributes:
        request_id: the caller's name for it; None: the engine gives one.
        prompt: its text, where it came as one.
        prompt_token_ids: at least one; not to be changed.
        params: how to sample, and when to stop.
        priority: lower runs first.
        schedule: layers by generation step.
        draft_rule: how its sequences draft, if they do.
        rules: which tokens may come, where it says so.
        form: what its answers must be, compiled; None: anything.
        owner: whose engine's limits it was checked against.
        flow: what it takes turns as with other flows; None: as a request of its own.
        adapter: whose maps its rows add to products; it stays loaded as long as this refers to it.
    """

    request_id: str | None
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int
    schedule: Schedule
    draft_rule: DraftRule | None
    rules: TokenRules | None
    form: Form | None = field(repr=False)
    owner: object = field(repr=False, compare=False)
    flow: Flow | None = None
    adapter: Adapter | None = field(default=None, repr=False)
