"""The running sequences as arrays, one row per cache slot, so that planning a step needs no loop over sequences."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from d3engine.depth import NEVER
from d3engine.depth.policy import MAX_DRAFT_LENGTH
from d3engine.request.outputs import Logprob
from d3engine.scheduling.kv_cache import IntArray
from d3engine.scheduling.plan import BoolArray
from d3engine.scheduling.sampling_mode import choice_of
from d3engine.scheduling.sequence import Sequence


class Trait(IntEnum):
    """What a sequence may be beside rows through the layers of a nested schedule; each a bit."""

    FILLS = 1  # its skipped layers get entries (`on_skip` other than "none")
    TABLED = 2  # its schedule is not nested
    EXITS = 4  # its tokens may leave early
    STREAMS = 8  # a caller streams its tokens
    DRAFTS = 16
    SPLITS_LAYERS = 32  # its drafts run one part of a layer without the other
    SECOND_MODEL = 64  # another model drafts for it
    BRIDGED = 128  # some of its rows may cross skipped layers by a map
    GUIDED = 256  # its answer must have a form
    LOOKUP = 512  # drafts are looked up in its text
    STUDENT = 1024  # its generated tokens run other weights than its prompt
    HOOKED = 2048  # its hidden states are captured or changed


class RunningTable:
    """What planning reads of each slot.

    `sequences[slot]` is the sequence there. Arrays are [slots] unless said otherwise: `num_tokens` counts prompt,
    output and draft, `num_computed` the positions whose entries are in the cache. Once `frees_at` positions are
    computed, some layer's blocks can be given back (NEVER: the schedule keeps them). `choice` is what choosing a token
    takes (`SamplingMode`), `traits` what else there is to know of the sequence (`Trait`). `drafting` marks those whose
    next row goes through the layers `draft_layers` [slots, L] of a draft, or through a second model; where the draft
    splits layers, it runs the attention of these and the MLP of `draft_mlps`.
    """

    def __init__(self, max_sequences: int, num_layers: int, max_length: int) -> None:
        self.sequences: list[Sequence | None] = [None] * max_sequences
        self.tokens = np.empty((max_sequences, max_length), dtype=np.int32)
        self.num_tokens = np.zeros(max_sequences, dtype=np.int64)
        self.num_computed = np.zeros(max_sequences, dtype=np.int64)
        self.prompt_length = np.zeros(max_sequences, dtype=np.int64)
        self.cutoffs = np.full((max_sequences, num_layers), NEVER, dtype=np.int32)
        self.frees_at = np.full(max_sequences, NEVER, dtype=np.int64)
        self.max_length = np.zeros(max_sequences, dtype=np.int64)
        self.choice = np.zeros(max_sequences, dtype=np.int8)
        self.traits = np.zeros(max_sequences, dtype=np.uint16)
        self.drafting = np.zeros(max_sequences, dtype=bool)
        self.draft_layers = np.zeros((max_sequences, num_layers), dtype=bool)
        self.draft_mlps = np.zeros((max_sequences, num_layers), dtype=bool)

    def put(self, sequence: Sequence, num_computed: int) -> None:
        """Fill the sequence's slot; `num_computed` positions are in the cache already."""
        slot, schedule = sequence.slot, sequence.schedule
        tokens = sequence.all_token_ids()
        self.sequences[slot] = sequence
        self.tokens[slot, : tokens.size] = tokens
        self.num_tokens[slot] = tokens.size
        self.num_computed[slot] = num_computed
        self.prompt_length[slot] = len(sequence.prompt_token_ids)
        self.cutoffs[slot] = schedule.cutoffs
        traits = traits_of(sequence)
        fills = traits & Trait.FILLS
        self.frees_at[slot] = NEVER if fills else self.computed_before(slot, schedule.first_skipping_step)
        self.choice[slot] = choice_of(sequence)
        self.traits[slot] = traits
        self.max_length[slot] = sequence.max_length
        self.drafting[slot] = False

    def having(self, traits: int, slots: IntArray) -> BoolArray:
        """Bool [slots]: which have one of these traits."""
        having: BoolArray = (self.traits[slots] & traits) != 0
        return having

    def bridges(self, slot: int) -> str | None:
        """The bridges by which the next rows of a slot cross the layers that they leave out."""
        sequence = self.sequence(slot)
        if sequence.draft is None:
            return sequence.schedule.bridges
        # What verification leaves out it has the states of; only a draft skips.
        drafts = self.drafting[slot] and sequence.draft.rule.schedule is not None
        return sequence.draft.rule.schedule.bridges if drafts and sequence.draft.rule.schedule is not None else None

    def of_second_model(self, num_layers: int) -> RunningTable:
        """A table of the same sequences for another model, which has computed other positions, all at full depth."""
        max_sequences, max_length = self.tokens.shape
        table = RunningTable(max_sequences, num_layers, max_length)
        for shared in ("sequences", "tokens", "num_tokens", "prompt_length", "choice"):
            setattr(table, shared, getattr(self, shared))
        return table

    def sequence(self, slot: int) -> Sequence:
        """The sequence that runs in `slot`."""
        sequence = self.sequences[slot]
        assert sequence is not None, "the slot is free"
        return sequence

    def steps(self, slots: IntArray, positions: IntArray) -> IntArray:
        """The generation steps of the tokens at `positions` of `slots`; -1 in the prompt."""
        generated = positions - self.prompt_length[slots]
        return np.where(generated >= 0, generated + 1, -1)

    def computed_before(self, slot: int, step: int) -> int:
        """How many positions of a slot are computed when its generation `step` comes next; NEVER for NEVER."""
        return NEVER if step == NEVER else int(self.prompt_length[slot]) + step - 1

    def active(self, slots: IntArray, steps: IntArray, traits: int) -> BoolArray:
        """Bool [C, L]: the layers that run for each slot, of these traits at most, at its step, if none of its tokens
        leaves early."""
        active: BoolArray = steps[:, None] < self.cutoffs[slots]
        if traits & Trait.TABLED:
            for chunk in self.having(Trait.TABLED, slots).nonzero()[0]:
                active[chunk] = self.sequence(int(slots[chunk])).schedule.active(int(steps[chunk]))
        if traits & Trait.EXITS:
            known = steps < self.num_tokens[slots] - self.prompt_length[slots]
            again = self.having(Trait.EXITS, slots) & known & (steps > 0)
            for chunk in again.nonzero()[0]:  # a replay goes as deep as it once did
                depth = self.sequence(int(slots[chunk])).depths[int(steps[chunk])]
                active[chunk] = np.arange(active.shape[1]) < depth
        if traits & Trait.DRAFTS:
            drafting = self.drafting[slots]
            active[drafting] = self.draft_layers[slots[drafting]]
        return active

    def mlps(self, slots: IntArray, active: BoolArray) -> BoolArray | None:
        """Bool [C, L]: the layers whose MLP runs where `active` says it of the attention; None where all are equal."""
        splits = self.drafting[slots] & self.having(Trait.SPLITS_LAYERS, slots)
        if not splits.any():
            return None
        mlps = active.copy()
        mlps[splits] = self.draft_mlps[slots[splits]]
        return mlps


def traits_of(sequence: Sequence) -> int:
    """What a sequence is."""
    schedule, draft = sequence.schedule, sequence.draft
    its = {
        Trait.FILLS: schedule.on_skip != "none",
        Trait.TABLED: not schedule.is_nested,
        Trait.EXITS: sequence.exit_rule is not None,
        Trait.STREAMS: sequence.streams,
        Trait.BRIDGED: schedule.bridges is not None,
        Trait.GUIDED: sequence.constraint is not None,
        Trait.STUDENT: bool(schedule.students),
        Trait.HOOKED: sequence.params.is_hooked,
    }
    if draft is not None:
        drafts = draft.rule.schedule
        its |= {Trait.DRAFTS: True, Trait.SPLITS_LAYERS: draft.rule.mlp_schedule is not None}
        its |= {Trait.SECOND_MODEL: draft.rule.model is not None, Trait.LOOKUP: draft.rule.lookup}
        its[Trait.BRIDGED] |= drafts is not None and drafts.bridges is not None
    return sum(trait for trait, has in its.items() if has)


@dataclass(frozen=True, slots=True)
class Chunks:
    """C chunks; each is a run of tokens of one slot that all run the same layers.

    No slot has a trait that is not among `traits`, so that a step of plain sequences need not look for any.
    """

    slots: IntArray  # [C]
    starts: IntArray  # [C] the first position
    stops: IntArray  # [C] the position after the last
    steps: IntArray  # [C] the generation step of the first token; -1 in the prompt
    active: BoolArray  # [C, L]
    traits: int

    def deepest_first(self) -> Chunks:
        """The same chunks, those that run more layers before those that run fewer; of one depth, the youngest first.

        Chunks of one schedule keep this order at every later step.
        """
        if self.slots.size == 1:
            return self
        return self.take(np.lexsort((self.steps, -self.active.sum(axis=1))))

    def take(self, which: IntArray | BoolArray) -> Chunks:
        """The chunks at these indices, or where a mask is True."""
        starts, stops, steps = self.starts[which], self.stops[which], self.steps[which]
        return Chunks(self.slots[which], starts, stops, steps, self.active[which], self.traits)


@dataclass(slots=True)
class Counters:
    """What has happened since the engine began."""

    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    generated_layers: int = 0  # layers run, summed over generated tokens, and over the rows of drafts and verifications
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    verifications: int = 0
    accepted_at: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT_LENGTH)  # by place in the draft
    token_layers: list[int] = field(default_factory=list)  # [L + 1] tokens by the layers they took; the last: or more
    blocks_saved: int = 0  # at the end of each finished sequence, against full depth


class NewTokens(NamedTuple):
    """Tokens by which a step has made a sequence longer, the layers that each took, and their log-probabilities if they
    were asked for.

    A sequence that ends by a fault has a last one without tokens.
    """

    sequence: Sequence
    token_ids: list[int]
    depths: list[int]
    logprobs: list[dict[int, Logprob]] | None
