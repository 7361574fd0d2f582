"""Policies whose answers are full depth's, drafted at less."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, ClassVar

from d3engine.depth.policy import MAX_DRAFT_LENGTH, MAX_HISTORY, DepthPolicy, DraftRule, option, policy_from_dict
from d3engine.depth.schedule import Schedule, checked_layers, cutoffs_without
from d3engine.depth.skips import D3, FullDepth
from d3engine.errors import require, require_integer, require_number

LENGTH = option("most tokens of a draft [default: 4; draft-and-verify: 8; speculative, lookup: as many as pay]")
STOP = option("probability of a draft's best token below which it ends [default: 0; draft-and-verify: 0.8 at first]")
HISTORY = option("tokens of earlier answers of the same engine that lookups see too, up to 1048576 [default: 0]")
ADAPTIVE = option("true lets each answer adapt the length of its drafts [default: false]")


def check_options(policy: Any) -> None:
    """Check and normalise `draft_length`, which may be open where that is the default, and what a frozen policy has of
    `stop_probability` and `adaptive`."""
    if policy.draft_length is not None or type(policy).draft_length is not None:
        length = require_integer("draft_length", policy.draft_length, 1, MAX_DRAFT_LENGTH)
        object.__setattr__(policy, "draft_length", length)
    if hasattr(policy, "stop_probability"):
        stop = require_number("stop_probability", policy.stop_probability, 0.0, 1.0)
        object.__setattr__(policy, "stop_probability", stop)
    adaptive = getattr(policy, "adaptive", False)
    require(isinstance(adaptive, bool), "adaptive", adaptive, "True or False")


AUTO_LENGTH = 12
"""Tokens of a draft at most where its length is left open."""


class Drafts:
    """What policies that draft have in common; goes before `DepthPolicy`."""

    drafts: ClassVar[bool] = True

    def schedule(self, num_layers: int) -> Schedule:
        """Full depth: that is what every token of the answer has."""
        return FullDepth().schedule(num_layers)


@dataclass(frozen=True)
class SelfSpeculative(Drafts, DepthPolicy):
    """Draft at the depth of another policy, verify at full depth.

    Tokens and log-probabilities are full depth's, of greedy requests and, with the same seed, of those that draw.

    A draft runs the layers of the step at which it begins, of that step's student if there is one. While these are all
    of the model's own, nothing is drafted. A draft also ends with a token that would end the answer.

    Args:
        draft: a scheduled policy (D3, LayerTable, Distilled, one's own ...), or what its `describe` says.
        draft_length: tokens of a draft at most, 1 to 32.
        stop_probability: end a draft with the first token at whose place the draft's likeliest one had less than this
            probability; 0 never does.
        adaptive: let each sequence adapt its length: one more, up to `draft_length`, after a draft that was
            accepted whole; one less, down to 1, after any other.
    """

    draft: DepthPolicy = field(metadata=option("policy whose layers draft, with its own options"))
    draft_length: int = field(default=4, metadata=LENGTH)
    stop_probability: float = field(default=0.0, metadata=STOP)
    adaptive: bool = field(default=False, metadata=ADAPTIVE)

    name: ClassVar[str] = "self-speculative"
    label: ClassVar[str] = "Self-speculative decoding"

    def __post_init__(self) -> None:
        if isinstance(self.draft, Mapping):
            object.__setattr__(self, "draft", policy_from_dict(self.draft))
        require(isinstance(self.draft, DepthPolicy), "draft", self.draft, "a policy whose layers a draft runs")
        require(not self.draft.drafts, "draft", self.draft, "a policy that does not draft itself")
        check_options(self)

    def draft_rule(self, num_layers: int) -> DraftRule:
        """How it drafts; raises `InvalidValueError` if the draft does not fit the model, or fills entries.

        Verification writes the entries of all layers, so there are none to fill in. A table whose layers wake up again
        cannot be written without `on_skip`; there it stands for nothing, because a draft keeps one set of layers.
        """
        schedule = self.draft.schedule(num_layers)
        fills, allowed = schedule.on_skip, "'none' in a draft, since verification writes all layers' entries"
        require(fills == "none" or not schedule.is_nested, "on_skip", fills, allowed)
        return DraftRule(self.draft_length, self.stop_probability, self.adaptive, schedule)


@dataclass(frozen=True)
class DraftAndVerify(Drafts, DepthPolicy):
    """Draft without some attentions and some MLPs, verify at full depth.

    What comes out is full depth's, as with `SelfSpeculative`. All tokens of a draft run the same parts. In `depths` a
    part counts as half a layer. Drafts are run one step at a time, launched by the host.

    Args:
        skip_attention: ids of the layers whose attention a draft leaves out.
        skip_mlp: ids of the layers whose MLP it leaves out; one of the two must name a layer.
        draft_length: tokens of a draft at most, 1 to 32; the authors' 8, or 12.
        stop_probability: a draft ends with the first token at whose place the likeliest one had less than this
            probability. It is where each answer begins.
        target_acceptance: after each verification the answer's own stop probability moves by 0.001, up while less than
            this part of its drafted tokens has been accepted of late, else down. None: it stays.
    """

    skip_attention: Sequence[int] = field(default=(), metadata=option("layers whose attention a draft leaves out"))
    skip_mlp: Sequence[int] = field(default=(), metadata=option("layers whose MLP a draft leaves out"))
    draft_length: int = field(default=8, metadata=LENGTH)
    stop_probability: float = field(default=0.8, metadata=STOP)
    target_acceptance: float | None = field(
        default=0.9, metadata=option("share of a draft that is to be accepted [default: 0.9]")
    )

    name: ClassVar[str] = "draft-and-verify"
    label: ClassVar[str] = "Draft & Verify"

    def __post_init__(self) -> None:
        for name in ("skip_attention", "skip_mlp"):
            object.__setattr__(self, name, checked_layers(name, getattr(self, name)))
        some = bool(self.skip_attention or self.skip_mlp)
        require(some, "skip_attention", [], "layer ids, unless skip_mlp has some: a draft leaves out something")
        check_options(self)
        if self.target_acceptance is not None:
            target = require_number("target_acceptance", self.target_acceptance, 0.0, 1.0)
            object.__setattr__(self, "target_acceptance", target)

    def draft_rule(self, num_layers: int) -> DraftRule:
        """How it drafts; raises `InvalidValueError` for a layer that the model has not."""
        return DraftRule(
            self.draft_length,
            self.stop_probability,
            schedule=Schedule.nested(cutoffs_without("skip_attention", self.skip_attention, num_layers)),
            mlp_schedule=Schedule.nested(cutoffs_without("skip_mlp", self.skip_mlp, num_layers)),
            target_acceptance=self.target_acceptance,
        )


PRESETS: Mapping[str, tuple[int, int]] = {"layerskip": (8, 6)}
"""Lowest layers that draft, all others left out, and tokens of a draft: LayerSkip's for Llama-2 7B (Elhoushi et al.
2024, "LayerSkip"; its authors' own examples run so)."""

AT_ONCE = 0.001
"""An alpha at which D3's window is whole at step 1, unless a model has a thousand layers for each that stays."""


@dataclass(frozen=True)
class Lossless(SelfSpeculative):
    """Full depth's answers, drafted by D3: `Lossless(D3(alpha=0.9, start=0.6))`.

    As `SelfSpeculative`, but of the rows to verify only the last, which no draft has fed, runs the layers below the
    window.
    """

    name: ClassVar[str] = "lossless"
    label: ClassVar[str] = "Lossless D3"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(isinstance(self.draft, D3), "draft", self.draft, "a D3 (SelfSpeculative takes any scheduled policy)")

    @classmethod
    def preset(cls, name: str, num_layers: int) -> Lossless:
        """ "layerskip": drafts of 6 tokens by the lowest 8 of `num_layers` layers, verified from the 9th on.

        That is LayerSkip's self-speculation, made for models that were trained to answer from there.
        """
        require(isinstance(name, str) and name in PRESETS, "preset", name, f"one of {', '.join(PRESETS)}")
        exit_layer, length = PRESETS[name]
        require_integer("num_layers", num_layers, exit_layer + 1)
        return cls(D3(AT_ONCE, Fraction(exit_layer, num_layers)), length)

    def draft_rule(self, num_layers: int) -> DraftRule:
        return replace(super().draft_rule(num_layers), resumes=True)


@dataclass(frozen=True)
class Speculative(Drafts, DepthPolicy):
    """Draft with another model, verify at full depth.

    Tokens and log-probabilities are full depth's, of greedy requests and, with the same seed, of those that draw. The
    engine loads the draft model when it begins, with a KV cache for as many entries as this model's has at full
    depth. So it must be the engine's policy; its requests may ask for the same draft model with other options, or for
    any other policy. `depths` of a token count this model's layers: the draft model's come on top.

    Args:
        draft_model: a Llama model of the same vocabulary, named as `Engine` takes it.
        draft_length: tokens of a draft at most, 1 to 32. None: as many as pay by the measured times of steps and by
            how often drafts were right, or none at all; lookups draft too (see `PromptLookup`) where they promise more.
        stop_probability: end a draft with the first token at whose place the draft's likeliest one had less than this
            probability; 0 never does.
        adaptive: let each sequence adapt its length: one more, up to `draft_length`, after a draft that was
            accepted whole; one less, down to 1, after any other.
    """

    draft_model: str = field(metadata=option("smaller model of the same vocabulary, named as MODEL is"))
    draft_length: int | None = field(default=None, metadata=LENGTH)
    stop_probability: float = field(default=0.0, metadata=STOP)
    adaptive: bool = field(default=False, metadata=ADAPTIVE)

    name: ClassVar[str] = "speculative"
    label: ClassVar[str] = "Speculative decoding"

    def __post_init__(self) -> None:
        is_path = isinstance(self.draft_model, str | os.PathLike) and os.fspath(self.draft_model) != ""
        require(is_path, "draft_model", self.draft_model, "a Llama model, named as the engine's is")
        object.__setattr__(self, "draft_model", os.fspath(self.draft_model))
        check_options(self)

    def draft_rule(self, num_layers: int) -> DraftRule:
        length, is_open = self.draft_length or AUTO_LENGTH, self.draft_length is None
        return DraftRule(
            length, self.stop_probability, self.adaptive, model=self.draft_model, lookup=is_open, by_cost=is_open
        )


@dataclass(frozen=True)
class PromptLookup(Drafts, DepthPolicy):
    """Draft what followed the last tokens earlier in the prompt or answer, verify at full depth.

    Tokens and log-probabilities are full depth's, of greedy requests and, with the same seed, of those that draw. A
    draft costs nothing but its rows in the verification; it pays where answers repeat their prompt: edits, summaries,
    retrieval (Saxena 2023, "Prompt Lookup Decoding").

    Args:
        draft_length: tokens of a draft at most, 1 to 32. None: as many as pay by the measured times of steps and by
            how often such drafts were right, or none at all.
        history: tokens of earlier answers of the same engine, the newest, that are looked up too, 0 to 2^20; 0 keeps
            a request's time free of what others asked. A match in the text itself goes before an equally long one.
            In a batch the lookups of all rows see as many as the row that wants fewest.
    """

    draft_length: int | None = field(default=None, metadata=LENGTH)
    history: int = field(default=0, metadata=HISTORY)

    name: ClassVar[str] = "lookup"
    label: ClassVar[str] = "Prompt lookup"

    def __post_init__(self) -> None:
        check_options(self)
        object.__setattr__(self, "history", require_integer("history", self.history, 0, MAX_HISTORY))

    def draft_rule(self, num_layers: int) -> DraftRule:
        length, is_open = self.draft_length or AUTO_LENGTH, self.draft_length is None
        return DraftRule(length, lookup=True, history=self.history, by_cost=is_open)
