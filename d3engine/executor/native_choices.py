"""What the rows of a native run, or step, ask of their choices: draws, cuts, penalties, rules, and forms on the way.

A form says what may come next only when it knows the tokens before. So a run asks for it at each step: a copy of the
sequence's place in it goes ahead with the run, and the sequence's own stays where the answer is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as AnySequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from d3engine.depth.policy import MAX_DRAFT_LENGTH
from d3engine.executor.choosing import sampled_steps
from d3engine.kernels.native.runs import Draws, LogitMask, Mask, RowSampling, TokenCounts
from d3engine.kernels.native.speculative_loop import DraftCosts, Drafter, Drafts, TextDrafts
from d3engine.request.constraint import Constraint
from d3engine.request.token_rules import TokenRules
from d3engine.scheduling.kv_cache import IntArray
from d3engine.scheduling.plan import Chosen, MultiStep, Plan
from d3engine.scheduling.sampling_mode import SamplingMode, is_restricted
from d3engine.scheduling.sequence import Sequence


class FormsOfRun:
    """The forms of the rows of one run, each row's as far as the run has come; `faults` are those of the forms."""

    def __init__(self, places: dict[int, tuple[Constraint, frozenset[int]]]) -> None:
        self._places = places
        self._begun: dict[int, Constraint] = {}  # of a loop
        self._num_known = dict.fromkeys(places, 0)
        self._is_over = dict.fromkeys(places, False)
        self._masks: dict[int, Mask | None] = {}
        self.faults: dict[int, str] = {}

    @classmethod
    def of(cls, sequences: AnySequence[Sequence]) -> FormsOfRun:
        """At the beginning of a run of these sequences."""
        return cls(
            {
                row: (sequence.constraint.copy(), frozenset(_ends(sequence)))
                for row, sequence in enumerate(sequences)
                if sequence.constraint is not None
            }
        )

    @classmethod
    def of_loop(cls, sequences: AnySequence[Sequence]) -> FormsOfRun:
        """At the beginning of draft-and-verify iterations, to be asked by `allowed_behind`."""
        found = cls.of(sequences)
        found._begun = {row: place.copy() for row, (place, _) in found._places.items()}
        return found

    def __bool__(self) -> bool:
        return bool(self._places)

    def allowed_behind(self, row: int, added: list[int], drafted: list[int]) -> Mask | None:
        """What may come behind the tokens that a loop has added to the answer and drafted ones; None for nothing.

        A fault that drafted tokens run into is none of the answer's: nothing follows them, and the form stands where it
        stood.
        """
        place, ends = self._places[row]
        for token in added[self._num_known[row] :]:
            place.take(token)
        self._num_known[row] = len(added)
        mask = place.allowed(drafted)
        if place.fault is None:
            return mask
        if not drafted:
            self.faults[row] = place.fault
            return mask
        again = self._begun[row].copy()
        for token in added:
            again.take(token)
        self._places[row] = again, ends
        return None

    def allowed(self, row: int, taken: int, token: int) -> Mask | None:
        """What may come after `taken` steps, the last of which has brought `token`; None where the form is over."""
        place, ends = self._places[row]
        if taken > self._num_known[row] and not self._is_over[row]:
            self._num_known[row] = taken
            # Where nothing was left to choose from, the token is none, and the row has met its end.
            self._is_over[row] = token in ends or not _is_in(self._masks.get(row), token)
            if not self._is_over[row]:
                place.take(token)
        mask = self._masks[row] = None if self._is_over[row] else place.allowed()
        if place.fault is not None:
            self.faults[row] = place.fault
        return mask


def _is_in(mask: Mask | None, token: int) -> bool:
    return mask is None or bool(mask[token >> 3] >> (token & 7) & 1)


class ChoicesOfStep:
    """How the rows of one step that are asked for a token choose it, and what they have chosen.

    `steps` [R] are the generation steps of the tokens that they yield, 0 for rows that yield none. The rows may go
    through the layers in parts, one after the other.
    """

    def __init__(self, plan: Plan, choice: SamplingMode, vocab_size: int) -> None:
        sequences = [plan.sequences[chunk] for chunk in plan.sampled.tolist()]
        self._rows = plan.sample_rows  # in order
        self.steps = np.zeros(plan.num_rows, np.int64)
        self.steps[self._rows] = sampled_steps(plan)
        self._forms = FormsOfRun.of(sequences)
        self._draws = draws_of(sequences, choice, self._forms, vocab_size)
        self._places = np.full(plan.num_rows, -1)
        reporting = self._rows[reporting_chunks(sequences)]
        self._places[reporting] = np.arange(reporting.size)
        self._logits = np.empty((1, reporting.size, vocab_size), np.float32) if reporting.size else None
        self._chosen = np.empty((1, self._rows.size), np.int64)
        self._scores = np.empty((1, self._rows.size), np.float32)

    def asked(self, part: slice) -> dict[str, Any]:
        """What the library gets of the choices of these rows."""
        inside, rows = self._in(part)
        yields = np.zeros(part.stop - part.start, np.bool_)
        yields[rows] = True
        asked: dict[str, Any] = {"yields": yields}
        if self._draws is not None:
            asked["draws"] = _spread(self._draws, inside, rows, yields.size)
        if self._logits is not None:
            asked |= {"logits": self._logits, "logit_places": self._places[part]}
        return asked

    def take(self, part: slice, token_ids: npt.NDArray[np.int64], scores: npt.NDArray[np.float32]) -> None:
        """What these rows have chosen, [1, rows] each."""
        inside, rows = self._in(part)
        self._chosen[:, inside], self._scores[:, inside] = token_ids[:, rows], scores[:, rows]

    def chosen(self) -> Chosen:
        """What all have chosen."""
        return Chosen(self._chosen, self._scores, logits=self._logits, faults=self._forms.faults)

    def _in(self, part: slice) -> tuple[slice, IntArray]:
        """Which of the rows that are asked lie in a part, and where in it."""
        # Found by counting: `np.searchsorted` lets other threads of Python run, and then waits for them.
        first, stop = (np.count_nonzero(self._rows < end) for end in (part.start, part.stop))
        return slice(first, stop), self._rows[first:stop] - part.start


def _spread(draws: Draws, inside: slice, rows: IntArray, count: int) -> Draws:
    """Some of the draws, for these rows of a step's `count`; the others are asked for nothing."""

    def numbers(of_draws: npt.NDArray[Any]) -> npt.NDArray[Any]:
        found = np.zeros(count, of_draws.dtype)
        found[rows] = of_draws[inside]
        return found

    asked: list[RowSampling | None] | None = None
    if draws.asked is not None:
        asked = [None] * count
        for row, own in zip(rows.tolist(), draws.asked[inside], strict=True):
            asked[row] = own
    draw_of = dict(zip(rows.tolist(), range(inside.start, inside.stop), strict=True))
    own_form = draws.form  # asked by other numbers of its rows
    form = None if own_form is None else lambda row, taken, token: own_form(draw_of[row], taken, token)
    return Draws(numbers(draws.temperatures), numbers(draws.seeds), numbers(draws.indices), asked, form)


def reporting_chunks(sequences: AnySequence[Sequence]) -> list[int]:
    """The rows of a run whose sequences want log-probabilities, in order."""
    return [row for row, sequence in enumerate(sequences) if sequence.params.logprobs is not None]


def ends_of(sequences: AnySequence[Sequence]) -> npt.NDArray[np.int64]:
    """The tokens [C, n] that end each row's answer, filled up with -1."""
    ends = [_ends(sequence) for sequence in sequences]
    most = max(map(len, ends))
    return np.array([tokens + [-1] * (most - len(tokens)) for tokens in ends], np.int64).reshape(len(ends), most)


def ends_of_all(sequences: AnySequence[Sequence]) -> npt.NDArray[np.int64] | None:
    """The same where every row's answer has a token or a form that ends it; None otherwise."""
    all_may_end = all(_ends(sequence) or sequence.constraint is not None for sequence in sequences)
    return ends_of(sequences) if all_may_end else None


def _ends(sequence: Sequence) -> list[int]:
    return [*sequence.eos_token_ids, *(sequence.params.stop_token_ids or ())]


def draws_of(
    sequences: AnySequence[Sequence], choice: SamplingMode, forms: FormsOfRun, vocab_size: int
) -> Draws | None:
    """How the rows of a run choose; None if all take the likeliest token and want nothing else."""
    if choice is SamplingMode.GREEDY:
        return None
    params = [sequence.params for sequence in sequences]
    return Draws(
        np.array([0.0 if asked.greedy else asked.temperature for asked in params], np.float32),
        np.array([sequence.seed for sequence in sequences], np.int64),
        np.array([sequence.index for sequence in sequences], np.int64),
        [_asked(sequence, vocab_size) for sequence in sequences] if choice >= SamplingMode.CUT else None,
        forms.allowed if forms else None,
        forms.allowed_behind if forms else None,
    )


def _asked(sequence: Sequence, vocab_size: int) -> RowSampling:
    """What a sequence asks for beside a temperature; the logarithm is torch's, as where torch chooses."""
    params = sequence.params
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    return RowSampling(
        float(torch.tensor(params.min_p).log()) if params.min_p else -math.inf,
        params.top_p,
        params.top_k,
        *penalties,
        None if penalties == (1, 0, 0) else TokenCounts.of(sequence.prompt_token_ids, sequence.token_ids),
        _rules(sequence, vocab_size) if is_restricted(sequence) else None,
    )


def _rules(sequence: Sequence, vocab_size: int) -> LogitMask:
    params, rules = sequence.params, sequence.rules or TokenRules(sequence.params)
    words = rules.bad_words
    return LogitMask(
        rules.biased,
        rules.biases,
        rules.mask(vocab_size),
        np.array(_ends(sequence) if params.min_tokens else [], np.int64),
        params.min_tokens,
        (words.edges, words.first_edges, words.bans, words.first_bans) if words else None,
        sequence.token_ids[-words.longest :] if words.longest else [],
        sequence.constraint is not None,
    )


def drafts_of(sequences: AnySequence[Sequence], *, by_cost: bool) -> Drafts:
    """How the rows of some cycles draft, and what they have drafted when these begin.

    With `by_cost` the loop chooses lengths that are left open; otherwise they adapt.
    """
    drafts = [sequence.draft for sequence in sequences if sequence.draft is not None]
    longest = max(draft.rule.length for draft in drafts)
    numbers = []
    for sequence, draft in zip(sequences, drafts, strict=True):
        rule, is_chosen = draft.rule, draft.rule.by_cost and by_cost
        length = rule.length if is_chosen else draft.length
        first = min(length, sequence.room - 1) if rule.is_by_text else draft.most
        numbers.append(
            (
                len(draft.token_ids),
                len(draft.token_ids) if draft.ended else first,
                length,
                rule.length,
                rule.adaptive or (rule.by_cost and not is_chosen),
                sequence.room,
                sequence.slot * MAX_DRAFT_LENGTH if rule.resumes else -1,
            )
        )
    begun = [draft.token_ids + [0] * (longest - len(draft.token_ids)) for draft in drafts]
    return Drafts(np.array(begun), *np.array(numbers, np.int64).T)


def text_drafts_of(
    sequences: AnySequence[Sequence], num_tokens: int, costs: DraftCosts | None, multi_step: MultiStep
) -> TextDrafts | None:
    """How the rows draft that do so by their text, with room for `num_tokens` more each; None where none does."""
    rules, draft_model = [s.draft.rule for s in sequences if s.draft is not None], multi_step.draft_model
    if not any(rule.is_by_text for rule in rules):
        return None
    drafters = [
        Drafter.DRAFT_MODEL * (rule.model is not None and draft_model is not None) | Drafter.LOOKUP * rule.lookup
        for rule in rules
    ]
    texts = np.zeros((len(sequences), max(s.num_tokens + min(num_tokens, s.room) for s in sequences) + 1), np.int64)
    for text, sequence in zip(texts, sequences, strict=True):
        text[: sequence.num_tokens] = sequence.all_token_ids()
    history = np.empty(0) if multi_step.history is None else multi_step.history
    stops = [sequence.draft.stop_probability for sequence in sequences if sequence.draft is not None]
    return TextDrafts(
        np.array(drafters, np.int64),
        texts,
        history.astype(np.int64, copy=False),
        np.array(stops, np.float32) if any(stops) else None,
        costs,
        None if draft_model is None else draft_model.tables,
        None if draft_model is None else draft_model.positions,
    )
