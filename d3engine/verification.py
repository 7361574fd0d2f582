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

import torch
from torch import Tensor

from d3engine.draft import ACCEPTANCE, DRAFTING, Ahead, Proposal
from d3engine.plan import DraftWork, Plan, Sampled
from d3engine.random import gumbel
from d3engine.request import Logprob
from d3engine.sampling import FAULT, Rows, Sampler, best_of, prompt_logprobs, scores_of, token_logprobs, with_noise
from d3engine.sequence import Sequence


class VerifyingSampler(Sampler):
    """The sampler for steps in which some sequences draft or verify; it leaves all others to the plain one."""

    def __call__(self, logits: Tensor, plan: Plan) -> Sampled:
        return super().__call__(logits, plan) if plan.drafts is None else _choose(logits, plan, plan.drafts)


def _choose(logits: Tensor, plan: Plan, drafts: DraftWork) -> Sampled:
    """The tokens of a plan with drafts, from float32 `logits` [plan.logit_rows, V]."""
    sequences = [plan.sequences[chunk] for chunk in plan.sampled.tolist()]
    count, judging = len(sequences), drafts.judging_rows.size
    raw = torch.cat((logits[:count], logits[len(logits) - judging :]))
    step = _Step(drafts, sequences, raw, plain=plan.greedy)
    sampled = Sampled([], logprobs=[], prompt_logprobs=prompt_logprobs(logits[count : len(logits) - judging], plan))
    assert sampled.logprobs is not None
    for place, sequence in enumerate(sequences):
        if place in drafts.proposing:
            sampled.proposals[place] = step.proposal(place)
            tokens: list[int] = []
        else:
            tokens, is_sound = step.tokens(place)
            if not is_sound:
                sampled.faults[place] = FAULT
        sampled.token_ids.append(tokens)
        sampled.logprobs.append(step.logprobs(place, tokens) if sequence.params.logprobs is not None else None)
    return sampled


class _Step:
    """All rows of a step that choose or judge a token: the sampled ones by place, then those that judge drafts."""

    def __init__(self, drafts: DraftWork, sequences: list[Sequence], raw: Tensor, *, plain: bool) -> None:
        self._raw = raw
        self._sequences = sequences
        contexts: Rows = [_context(sequence, place in drafts.proposing) for place, sequence in enumerate(sequences)]
        self._rows: dict[int, list[int]] = {}  # the rows of a verification, the one that adds a token last
        for place in drafts.judging:
            drafted = _draft_of(sequences[place])
            first = len(contexts)
            contexts += [Ahead(sequences[place], drafted[:nth]) for nth in range(len(drafted))]
            self._rows[place] = [*range(first, len(contexts)), place]
        self._scores = raw if plain else scores_of(raw, contexts)
        noisy = with_noise(self._scores, contexts)
        self._best, self._sound = best_of(noisy)

    def proposal(self, place: int) -> Proposal:
        """The token that continues the draft of the sequence at `place`."""
        if not self._sound[place]:
            return Proposal(None)
        sequence = self._sequences[place]
        assert sequence.draft is not None
        asks = sequence.draft.rule.stop_probability > 0
        top = float(self._raw[place].softmax(dim=-1).max()) if asks else None
        distribution = None if sequence.params.greedy else self._scores[place].softmax(dim=-1)
        return Proposal(self._best[place], top, distribution)

    def tokens(self, place: int) -> tuple[list[int], bool]:
        """The tokens of the sequence at `place`, and whether the logits were sound as far as they were needed."""
        rows = self._rows.get(place, [place])
        drafted = _draft_of(self._sequences[place]) if len(rows) > 1 else []
        chosen = [self._best[row] for row in rows]
        if drafted and not self._sequences[place].params.greedy:
            accepted = self._accepted_draws(place, rows, drafted)
            if accepted < len(drafted) and self._sound[rows[accepted]]:
                chosen[accepted] = self._replacement(place, rows[accepted], accepted)
        else:
            matches = [token == mine for token, mine in zip(drafted, chosen, strict=False)]
            accepted = matches.index(False) if False in matches else len(matches)
        sound = [self._sound[row] for row in rows[: accepted + 1]]
        if not all(sound):
            return drafted[: sound.index(False)], False
        return [*drafted[:accepted], chosen[accepted]], True

    def logprobs(self, place: int, tokens: list[int]) -> list[dict[int, Logprob]]:
        """The log-probabilities of these tokens, of full depth's raw distribution."""
        rows = self._rows.get(place, [place])
        count = self._sequences[place].params.logprobs or 0
        return [token_logprobs(self._raw[row], token, count) for row, token in zip(rows, tokens, strict=False)]

    def _accepted_draws(self, place: int, rows: list[int], drafted: list[int]) -> int:
        """How many of the drafted tokens are accepted: each where u < p / q, until the first that is not."""
        tokens = torch.tensor(drafted, device=self._raw.device).unsqueeze(1)
        p = self._scores[rows[:-1]].softmax(dim=-1).gather(1, tokens).flatten()
        q = self._distributions(place).gather(1, tokens).flatten()
        sequence = self._sequences[place]
        contexts = [Ahead(sequence, drafted[:nth], ACCEPTANCE) for nth in range(len(drafted))]
        rejected = ~(_uniform(contexts, p.device) * q < p)  # not a comparison turned round: it is true of NaN too
        return int(rejected.int().argmax()) if rejected.any() else len(drafted)

    def _replacement(self, place: int, row: int, nth: int) -> int:
        """A draw from what p has more than q, where the draft's nth token was rejected."""
        p = self._scores[row].softmax(dim=-1)
        beyond = (p - self._distributions(place)[nth]).clamp(min=0)
        weights = beyond if float(beyond.sum()) > 0 else p  # equal up to rounding
        context = Ahead(self._sequences[place], _draft_of(self._sequences[place])[:nth])
        return best_of(with_noise(weights.log().unsqueeze(0), [context]))[0][0]

    def _distributions(self, place: int) -> Tensor:
        draft = self._sequences[place].draft
        assert draft is not None
        return torch.stack(draft.distributions)


def _context(sequence: Sequence, proposes: bool) -> Sequence | Ahead:
    """The sequence as the sampled row sees it: after all that it has drafted, if anything."""
    draft = sequence.draft
    if draft is None:
        return sequence
    return Ahead(sequence, draft.token_ids, DRAFTING + draft.begins_at if proposes else 0)


def _draft_of(sequence: Sequence) -> list[int]:
    assert sequence.draft is not None
    return sequence.draft.token_ids


def _uniform(contexts: list[Ahead], device: torch.device) -> Tensor:
    """One number in (0, 1) for each context: the one that its Gumbel noise is made of."""
    integers = torch.tensor([(c.seed, c.index, c.step) for c in contexts], device=device)
    noise = gumbel(integers[:, 0], integers[:, 1], integers[:, 2], 1).flatten()
    return torch.exp(-torch.exp(-noise))
