"""The running sequences as arrays, one row per cache slot, so that planning a step needs no loop over sequences."""

from __future__ import annotations

import numpy as np

from d3engine.cache.kv_cache import IntArray
from d3engine.depth import NEVER
from d3engine.plan import BoolArray
from d3engine.request.choice import choice_of
from d3engine.request.sequence import Sequence


class RunningTable:
    """What planning reads of each slot.

    `sequences[slot]` is the sequence there. Arrays are [slots] unless said otherwise: `num_tokens` counts prompt,
    output and draft, `num_computed` the positions whose entries are in the cache. Once `frees_at` positions are
    computed, some layer's blocks can be given back (NEVER: the schedule keeps them). `fills` marks schedules whose
    skipped layers get entries (`on_skip` other than "none"), `exits` sequences whose tokens may leave early; `choice`
    is what choosing a token takes (`Choice`). `drafts` marks sequences that draft at all, `drafting` those whose next
    row goes through the layers `draft_layers` [slots, L] of a draft, or, where `by_second_model` says so, through
    another model; where `splits_layers`, a draft runs the attention of these layers and the MLP of `draft_mlps`.
    `bridged` marks sequences some of whose rows may cross skipped layers by a map.
    """

    def __init__(self, max_sequences: int, num_layers: int, max_length: int) -> None:
        self.sequences: list[Sequence | None] = [None] * max_sequences
        self.tokens = np.empty((max_sequences, max_length), dtype=np.int32)
        self.num_tokens = np.zeros(max_sequences, dtype=np.int64)
        self.num_computed = np.zeros(max_sequences, dtype=np.int64)
        self.prompt_length = np.zeros(max_sequences, dtype=np.int64)
        self.cutoffs = np.full((max_sequences, num_layers), NEVER, dtype=np.int32)
        self.frees_at = np.full(max_sequences, NEVER, dtype=np.int64)
        self.fills = np.zeros(max_sequences, dtype=bool)
        self.tabled = np.zeros(max_sequences, dtype=bool)
        self.choice = np.zeros(max_sequences, dtype=np.int8)
        self.streams = np.zeros(max_sequences, dtype=bool)
        self.max_length = np.zeros(max_sequences, dtype=np.int64)
        self.exits = np.zeros(max_sequences, dtype=bool)
        self.drafts = np.zeros(max_sequences, dtype=bool)
        self.drafting = np.zeros(max_sequences, dtype=bool)
        self.draft_layers = np.zeros((max_sequences, num_layers), dtype=bool)
        self.splits_layers = np.zeros(max_sequences, dtype=bool)
        self.draft_mlps = np.zeros((max_sequences, num_layers), dtype=bool)
        self.by_second_model = np.zeros(max_sequences, dtype=bool)
        self.bridged = np.zeros(max_sequences, dtype=bool)

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
        self.fills[slot] = schedule.on_skip != "none"
        self.tabled[slot] = not schedule.is_nested
        self.exits[slot] = sequence.exit_rule is not None
        self.frees_at[slot] = NEVER if self.fills[slot] else self.computed_before(slot, schedule.first_skipping_step)
        self.choice[slot] = choice_of(sequence)
        self.streams[slot] = sequence.streams
        self.max_length[slot] = sequence.max_length
        self.drafts[slot] = sequence.draft is not None
        self.drafting[slot] = False
        self.splits_layers[slot] = sequence.draft is not None and sequence.draft.rule.mlp_schedule is not None
        self.by_second_model[slot] = sequence.draft is not None and sequence.draft.rule.model is not None

        draft = None if sequence.draft is None else sequence.draft.rule.schedule
        self.bridged[slot] = any(given is not None and given.bridges is not None for given in (schedule, draft))

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

    def active(self, slots: IntArray, steps: IntArray) -> BoolArray:
        """Bool [C, L]: the layers that run for each slot at its step, if none of its tokens leaves early."""
        active: BoolArray = steps[:, None] < self.cutoffs[slots]
        for chunk in self.tabled[slots].nonzero()[0]:
            active[chunk] = self.sequence(int(slots[chunk])).schedule.active(int(steps[chunk]))
        exits = self.exits[slots]
        if exits.any():
            known = steps < self.num_tokens[slots] - self.prompt_length[slots]
            for chunk in (exits & known & (steps > 0)).nonzero()[0]:  # a replay goes as deep as it once did
                depth = self.sequence(int(slots[chunk])).depths[int(steps[chunk])]
                active[chunk] = np.arange(active.shape[1]) < depth
        drafting = self.drafting[slots]
        if drafting.any():
            active[drafting] = self.draft_layers[slots[drafting]]
        return active

    def mlps(self, slots: IntArray, active: BoolArray) -> BoolArray | None:
        """Bool [C, L]: the layers whose MLP runs where `active` says it of the attention; None where all are equal."""
        splits = self.drafting[slots] & self.splits_layers[slots]
        if not splits.any():
            return None
        mlps = active.copy()
        mlps[splits] = self.draft_mlps[slots[splits]]
        return mlps

    def may_exit(self, slots: IntArray, steps: IntArray) -> BoolArray:
        """Bool [C]: whether the chunks' tokens may leave early, which only new ones after step 0 do."""
        new = steps == self.num_tokens[slots] - self.prompt_length[slots]
        may: BoolArray = self.exits[slots] & new & (steps > 0)
        return may
