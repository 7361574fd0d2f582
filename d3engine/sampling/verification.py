"""Choosing tokens where sequences draft: drafted ones to be judged later, and the judgement.

Greedy: the drafted tokens are accepted as long as each is the one that full depth takes; full depth's next token is
added. Drawn: a drafted token d is accepted with probability min(1, p(d) / q(d)), p full depth's distribution and q
the one it was drawn from, both after all that the request asks for; the first rejected one is replaced by a draw from
max(0, p - q), normalised, and if none is rejected, a draw from p is added. So every token follows p (Leviathan et al.
2023, "Fast Inference from Transformers via Speculative Decoding", theorem 3.5; Chen et al. 2023, "Accelerating Large
Language Model Decoding with Speculative Sampling").

Whatever is random comes from (seed, index, step) and what it is for, so no row depends on its neighbours.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

from d3engine.kernels.reference import gumbel
from d3engine.plan import Chosen, Cycled, DraftWork, Plan, Sampled
from d3engine.request.outputs import Logprob
from d3engine.request.params import MAX_N
from d3engine.request.sequence import ACCEPTANCE, DRAFTING, Ahead, Cycle, Proposal, Sequence
from d3engine.sampling.sampler import (
    Rows,
    Sampler,
    best_of,
    fault_of,
    logprobs_of,
    prompt_logprobs,
    scores_of,
    with_noise,
)


class VerifyingSampler(Sampler):
    """The sampler for steps in which some sequences draft or verify; it leaves all others to the plain one."""

    def __call__(self, logits: Tensor | Chosen | Cycled, plan: Plan) -> Sampled:
        if isinstance(logits, Cycled):
            return Sampled([], cycles=_cycles(logits, plan))
        if plan.drafts is None or isinstance(logits, Chosen):
            return super().__call__(logits, plan)
        return _choose(logits, plan, plan.drafts)


def _cycles(found: Cycled, plan: Plan) -> list[list[Cycle]]:
    """What the sequences of a run of cycles have drafted, and what came of it, one list of each."""
    of_rows = (numbers.swapaxes(0, 1).tolist() for numbers in (found.drafted, found.counts))
    return [
        [_cycle(sequence, tokens, *numbers) for tokens, numbers in zip(drafted, counts, strict=True) if numbers[0] >= 0]
        for sequence, drafted, counts in zip(plan.sequences, *of_rows, strict=True)
    ]


def _cycle(sequence: Sequence, drafted: list[int], count: int, accepted: int, last: int) -> Cycle:
    """A draft of `count` tokens, those that were accepted and full depth's `last`, which is -1 for none."""
    if last < 0:
        return Cycle(drafted[:count], drafted[:accepted], fault_of(sequence))
    return Cycle(drafted[:count], [*drafted[:accepted], last])


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
    step = _Step(drafts, proposing, sequences + nested, torch.cat((own, drafted, judged)), plain=plain)
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


def _sampled_sequences(plan: Plan | None) -> list[Sequence]:
    return [] if plan is None else [plan.sequences[chunk] for chunk in plan.sampled.tolist()]


class _Step:
    """All rows of a step that choose or judge a token: the sampled ones by place, then those that judge drafts."""

    def __init__(
        self, drafts: DraftWork, proposing: frozenset[int], sequences: list[Sequence], raw: Tensor, *, plain: bool
    ) -> None:
        self._raw = raw
        self._sequences = sequences
        contexts: Rows = [_context(sequence, place in proposing) for place, sequence in enumerate(sequences)]
        self._rows: dict[int, list[int]] = {}  # the rows of a verification, the one that adds a token last
        for place in drafts.judging:
            drafted = _draft_of(sequences[place])
            first = len(contexts)
            contexts += [Ahead(sequences[place], drafted[:nth]) for nth in range(len(drafted))]
            self._rows[place] = [*range(first, len(contexts)), place]
        self._scores = raw if plain else scores_of(raw, contexts)
        self._chosen, self._sound = best_of(with_noise(self._scores, contexts))
        self._accepted = {place: self._matches(place) for place in self._rows if sequences[place].params.greedy}
        drawing = [place for place in self._rows if not sequences[place].params.greedy]
        if drawing:
            self._judge_draws(drawing, contexts)

    def proposal(self, place: int) -> Proposal:
        """The token that continues the draft of the sequence at `place`."""
        if not self._sound[place]:
            return Proposal(None)
        sequence = self._sequences[place]
        assert sequence.draft is not None
        asks = sequence.draft.stop_probability > 0
        top = float(self._raw[place].softmax(dim=-1).max()) if asks else None
        distribution = None if sequence.params.greedy else self._scores[place].softmax(dim=-1)
        return Proposal(self._chosen[place], top, distribution)

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
        """How many of a greedy sequence's drafted tokens are full depth's own."""
        mine = [self._chosen[row] for row in self._rows[place]]
        return _first_false(token == own for token, own in zip(_draft_of(self._sequences[place]), mine, strict=False))

    def _judge_draws(self, places: list[int], contexts: Rows) -> None:
        """Accept drafted tokens with probability min(1, p / q), and replace the first rejected one of each sequence."""
        drafts = [self._sequences[place].draft for place in places]
        drafted = [token for draft in drafts if draft is not None for token in draft.token_ids]
        q = torch.stack([row for draft in drafts if draft is not None for row in draft.distributions])
        rows = [row for place in places for row in self._rows[place][:-1]]
        p = self._scores[rows].softmax(dim=-1)
        tokens = torch.tensor(drafted, device=p.device).unsqueeze(1)
        uniform = _uniform([contexts[row] for row in rows], p.device)
        # u < p / q without a division; true of NaN, so that a row that is not sound is one where judging ends
        rejected = ~(uniform * q.gather(1, tokens).flatten() < p.gather(1, tokens).flatten())
        verdicts, first = rejected.tolist(), 0
        replaced = []
        for place in places:
            count = len(self._rows[place]) - 1
            self._accepted[place] = _first_false(not verdict for verdict in verdicts[first : first + count])
            if self._accepted[place] < count and self._sound[rows[first + self._accepted[place]]]:
                replaced.append(first + self._accepted[place])
            first += count
        if replaced:
            beyond = (p[replaced] - q[replaced]).clamp(min=0)
            nothing = beyond.sum(dim=-1, keepdim=True) == 0  # p and q are equal up to rounding
            weights = torch.where(nothing, p[replaced], beyond)
            draws, _ = best_of(with_noise(weights.log(), [contexts[rows[nth]] for nth in replaced]))
            for nth, token in zip(replaced, draws, strict=True):
                self._chosen[rows[nth]] = token


def _first_false(flags: Iterable[bool]) -> int:
    """How many flags come before the first False."""
    return sum(1 for _ in itertools.takewhile(bool, flags))


def _context(sequence: Sequence, proposes: bool) -> Sequence | Ahead:
    """The sequence as the sampled row sees it: after all that it has drafted, if anything."""
    draft = sequence.draft
    if draft is None:
        return sequence
    return Ahead(sequence, draft.token_ids, DRAFTING + draft.begins_at if proposes else 0)


def _draft_of(sequence: Sequence) -> list[int]:
    assert sequence.draft is not None
    return sequence.draft.token_ids


def _uniform(contexts: Rows, device: torch.device) -> Tensor:
    """A number in (0, 1) for each context's acceptance: the one that a Gumbel number of that stream is made of."""
    integers = torch.tensor([(c.seed, c.index + MAX_N * ACCEPTANCE, c.step) for c in contexts], device=device)
    noise = gumbel(integers[:, 0], integers[:, 1], integers[:, 2], 1).flatten()
    return torch.exp(-torch.exp(-noise))
