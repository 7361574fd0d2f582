"""Choosing tokens where sequences draft: drafted ones to be judged later, and the judgement.

The token at a step is a function of the logits there and of random numbers that follow from (seed, index, step): the
largest of logit / temperature + Gumbel noise. Full depth chooses so at each drafted position, and drafted tokens are
accepted as long as they are the chosen ones. So a request gets the very tokens that it gets without drafts, greedy or
drawn. Drafts use the same noise, which makes two similar distributions agree often (Daliri et al. 2024, "Coupling
without Communication and Drafter-Invariant Speculative Decoding").
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from d3engine.executor.interface import Drafted
from d3engine.executor.sampler import (
    Rows,
    Sampler,
    best_of,
    fault_of,
    logprobs_of,
    prompt_logprobs,
    scores_of,
    with_noise,
)
from d3engine.request.outputs import Logprob
from d3engine.scheduling.plan import Chosen, Cycled, DraftWork, Plan, Sampled
from d3engine.scheduling.sequence import Ahead, Cycle, Proposal, Sequence

FloatArray: TypeAlias = npt.NDArray[np.float32]


class VerifyingSampler(Sampler):
    """The sampler for steps in which some sequences draft or verify; it leaves all others to the plain one."""

    def __call__(self, logits: Tensor | Chosen | Cycled | Drafted, plan: Plan) -> Sampled:
        if isinstance(logits, Drafted):
            return _with_drafts(logits, plan)
        if isinstance(logits, Cycled):
            return Sampled([], cycles=_cycles(logits, plan))
        if plan.drafts is None or isinstance(logits, Chosen):
            return super().__call__(logits, plan)
        return _choose(logits, plan, plan.drafts)


def _cycles(found: Cycled, plan: Plan) -> list[list[Cycle]]:
    """What the sequences of a run of cycles have drafted, and what came of it, one list of each."""
    of_rows = (numbers.swapaxes(0, 1).tolist() for numbers in (found.drafted, found.counts))
    return [
        [
            _cycle(
                sequence,
                tokens,
                numbers,
                None if found.logits is None else found.logits[nth, row],
                found.faults.get(row),
            )
            for nth, (tokens, numbers) in enumerate(zip(drafted, counts, strict=True))
            if numbers[0] >= 0
        ]
        for row, (sequence, drafted, counts) in enumerate(zip(plan.sequences, *of_rows, strict=True))
    ]


def _cycle(
    sequence: Sequence, drafted: list[int], counts: list[int], logits: FloatArray | None, fault: str | None
) -> Cycle:
    """A draft, those of its tokens that were accepted and full depth's next one, which is -1 for none, perhaps by a
    `fault` that is known; `logits` [tokens + 1, V] are full depth's there."""
    count, accepted, last, _, computed = counts
    tokens = drafted[:accepted] if last < 0 else [*drafted[:accepted], last]
    asked, logprobs = sequence.params.logprobs, None
    if asked is not None and logits is not None:
        logprobs = logprobs_of(torch.from_numpy(logits[: len(tokens)]), tokens, asked)
    return Cycle(drafted[:count], tokens, (fault or fault_of(sequence)) if last < 0 else None, computed, logprobs)


def cycle_of(plan: Plan, given: list[list[int]], drafted: Chosen, verified: Chosen) -> Cycled:
    """The cycle of each of the plan's C chunks, which was drafted and verified without the host.

    Its draft is the tokens `given`, then as many of `drafted` [S, C] as `plan.drafts.lengths` has. What follows
    a chunk's tokens stands together in `verified` [1, R].
    """
    assert plan.drafts is not None
    assert plan.drafts.model is not None
    assert plan.drafts.lengths is not None
    lengths, stops = plan.drafts.lengths, plan.drafts.model.stops + plan.drafts.lengths - 1
    count, last_row = len(given), 0
    counts = np.zeros((1, count, 5), dtype=np.int64)
    tokens = np.zeros((1, count, int(max(map(len, given)) + lengths.max())), dtype=np.int64)
    for chunk, (sequence, before, length) in enumerate(zip(plan.sequences, given, lengths.tolist(), strict=True)):
        sound = _first_false(np.isfinite(drafted.scores[:length, chunk]).tolist())
        draft = [*before, *drafted.token_ids[:sound, chunk].tolist()]
        goes_on = (not sequence.would_end(token, after=nth) for nth, token in enumerate(draft, start=1))
        draft = draft[: _first_false(goes_on) + 1]
        first_row, last_row = last_row, last_row + 1 + len(before) + length
        own = verified.token_ids[0, first_row:last_row].tolist()
        sound = _first_false(np.isfinite(verified.scores[0, first_row:last_row]).tolist())
        accepted = _first_false(token == mine for token, mine in zip(draft, own, strict=False))
        last = own[accepted] if accepted < sound else -1
        tokens[0, chunk, : len(draft)] = draft
        counts[0, chunk, :3] = len(draft), min(accepted, sound), last
    counts[0, :, 4] = np.minimum(stops, plan.stops + counts[0, :, 1])
    return Cycled(tokens, counts)


def _choose(logits: Tensor, plan: Plan, drafts: DraftWork) -> Sampled:
    """The tokens of a plan with drafts, from float32 `logits` [plan.logit_rows, V]."""
    nested = _sampled_sequences(drafts.model)
    sequences = _sampled_sequences(plan)
    count, judging = len(sequences), drafts.judging_rows.size
    own, prompt, judged, drafted = torch.split(
        logits, [count, len(logits) - count - judging - len(nested), judging, len(nested)]
    )
    plain = plan.greedy and (drafts.model is None or drafts.model.greedy)
    proposing = drafts.proposing | frozenset(range(count, count + len(nested)))
    step = _Step(drafts, sequences + nested, torch.cat((own, drafted, judged)), plain=plain)
    sampled = Sampled([], logprobs=[], prompt_logprobs=prompt_logprobs(prompt, plan))
    assert sampled.logprobs is not None
    for place in proposing:
        sampled.proposals[place] = [step.proposal(place)]
    for place, sequence in enumerate(sequences):
        tokens: list[int] = []
        if place not in proposing:
            tokens, is_sound = step.tokens(place)
            if not is_sound:
                sampled.faults[place] = fault_of(sequence)
        sampled.token_ids.append(tokens)
        sampled.logprobs.append(step.logprobs(place, tokens) if sequence.params.logprobs is not None else None)
    return sampled


def _with_drafts(computed: Drafted, plan: Plan) -> Sampled:
    """The tokens of a plan, and those that its draft model has drafted without the host."""
    drafts = plan.drafts
    assert drafts is not None
    sampled = _choose(computed.logits, plan, replace(drafts, model=None))
    tokens, are_sound = computed.tokens.token_ids.T.tolist(), np.isfinite(computed.tokens.scores).T.tolist()
    # A draft takes in no more of these than it may have.
    for place, steps in enumerate(map(zip, tokens, are_sound), start=len(plan.sampled)):
        sampled.proposals[place] = [Proposal(token if is_sound else None) for token, is_sound in steps]
    return sampled


def _sampled_sequences(plan: Plan | None) -> list[Sequence]:
    return [] if plan is None else [plan.sequences[chunk] for chunk in plan.sampled.tolist()]


class _Step:
    """All rows of a step that choose or judge a token: the sampled ones by place, then those that judge drafts."""

    def __init__(self, drafts: DraftWork, sequences: list[Sequence], raw: Tensor, *, plain: bool) -> None:
        self._raw = raw
        self._sequences = sequences
        contexts: Rows = [after_draft(sequence) for sequence in sequences]
        self._rows: dict[int, list[int]] = {}  # the rows of a verification, the one that adds a token last
        for place in drafts.judging:
            drafted = _draft_of(sequences[place])
            first = len(contexts)
            contexts += [Ahead(sequences[place], drafted[:nth]) for nth in range(len(drafted))]
            self._rows[place] = [*range(first, len(contexts)), place]
        scores = raw if plain else scores_of(raw, contexts)
        self._chosen, self._sound = best_of(with_noise(scores, contexts))
        self._accepted = {place: self._matches(place) for place in self._rows}

    def proposal(self, place: int) -> Proposal:
        """The token that continues the draft of the sequence at `place`."""
        if not self._sound[place]:
            return Proposal(None)
        sequence = self._sequences[place]
        assert sequence.draft is not None
        asks = sequence.draft.stop_probability > 0
        top = float(self._raw[place].softmax(dim=-1).max()) if asks else None
        return Proposal(self._chosen[place], top)

    def tokens(self, place: int) -> tuple[list[int], bool]:
        """The tokens of the sequence at `place`, and whether the logits were sound as far as they were needed."""
        rows, accepted = self._rows.get(place, [place]), self._accepted.get(place, 0)
        drafted = _draft_of(self._sequences[place])[:accepted] if accepted else []
        sound = [self._sound[row] for row in rows[: accepted + 1]]
        if not all(sound):
            return drafted[: sound.index(False)], False
        return [*drafted, self._chosen[rows[accepted]]], True

    def logprobs(self, place: int, tokens: list[int]) -> list[dict[int, Logprob]]:
        """The log-probabilities of these tokens, of full depth's raw distribution."""
        rows = self._rows.get(place, [place])
        count = self._sequences[place].params.logprobs
        assert count is not None
        return logprobs_of(self._raw[rows[: len(tokens)]], tokens, count)

    def _matches(self, place: int) -> int:
        """How many of a sequence's drafted tokens are full depth's own."""
        mine = [self._chosen[row] for row in self._rows[place]]
        return _first_false(token == own for token, own in zip(_draft_of(self._sequences[place]), mine, strict=False))


def _first_false(flags: Iterable[bool]) -> int:
    """How many flags come before the first False."""
    return sum(1 for _ in itertools.takewhile(bool, flags))


def after_draft(sequence: Sequence) -> Sequence | Ahead:
    """The sequence as its sampled row sees it: after all that it has drafted, if anything."""
    return sequence if sequence.draft is None else Ahead(sequence, sequence.draft.token_ids)


def _draft_of(sequence: Sequence) -> list[int]:
    assert sequence.draft is not None
    return sequence.draft.token_ids
