"""Logit bias, allowed tokens, bans, bad words and grammars agree with the sampler on the same logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from native_models import Case, Shape
from slow_sampling import sample, sequence_of, tokens_of

from d3engine import SamplingParams
from d3engine.executor.native_choices import FormsOfRun, draws_of
from d3engine.kernels.native.model import NativeError
from d3engine.kernels.native.runs import Draws, LogitMask, Mask
from d3engine.request.token_rules import BadWords
from d3engine.scheduling.sampling_mode import SamplingMode
from d3engine.scheduling.sequence import Sequence

STEPS, VOCAB = 7, 97
ASKED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9},
    {"logit_bias": {5: 9.5, 90: -100.0, 0: 3.25}},
    {"logit_bias": {8: 4.0, 9: 80.0}, "temperature": 2.0, "top_k": 5},
    {"allowed_token_ids": [3, 64, 96]},
    {"allowed_token_ids": list(range(1, 97, 3)), "temperature": 3.0, "repetition_penalty": 1.5},
    {"logit_bias": {9: 100.0}, "min_tokens": 5},
    {"logit_bias": {30: 100.0}, "min_tokens": 6, "stop_token_ids": [30], "temperature": 1.0},
    {"allowed_token_ids": [9, 30, 31], "min_tokens": 100, "temperature": 5.0},
    {"allowed_token_ids": [11, 12, 13, 14], "bad_words": ((12,), (11, 13), (13, 11, 11)), "temperature": 4.0},
    {"logit_bias": {40: 100.0}, "bad_words": ((40, 40, 40),)},
    {"form": True, "temperature": 3.0, "ignore_eos": True},
    {"form": True, "ignore_eos": True, "allowed_token_ids": list(range(50)), "frequency_penalty": 1.0},
]


class EveryThird:
    """A made-up grammar: the next token leaves one more when divided by three. It ends after eleven tokens."""

    fault = None

    def __init__(self, tokens: tuple[int, ...] = (), end: int | None = None) -> None:
        self.tokens = tokens
        self.end = end

    def allowed(self, drafted: Any = ()) -> Mask | None:
        if len(self.tokens) >= 11:
            return None
        last = self.tokens[-1] if self.tokens else 0
        return np.packbits(np.arange(VOCAB) % 3 == (last + 1) % 3, bitorder="little")

    def take(self, token: int) -> None:
        assert token != self.end, "it is no part of the grammar"
        self.tokens += (token,)

    def copy(self) -> EveryThird:
        return EveryThird(self.tokens, self.end)

    def is_over(self, drafted: Any = ()) -> bool:
        return self.allowed() is None


def sequences_at(generation: Any) -> list[Sequence]:
    """One of each kind, each with as many tokens as its row has generated before the run."""
    found = []
    for row, (asked, count) in enumerate(zip(ASKED, generation.tolist(), strict=True)):
        given = {"temperature": 0.0, "seed": row, "max_tokens": 200} | asked
        words, has_grammar = given.pop("bad_words", ()), given.pop("form", False)
        before = [(11, 13)[nth % 2] for nth in range(count)]
        sequence = sequence_of(SamplingParams(**given), prompt=[1, 2, row], generated=before, bad_words=words)
        sequence.constraint = EveryThird(tuple(before)) if has_grammar else None
        found.append(sequence)
    return found


def draws_for(sequences: list[Sequence]) -> Draws:
    draws = draws_of(sequences, SamplingMode.REPORT, FormsOfRun.of(sequences), VOCAB)
    assert draws is not None
    return draws


@pytest.mark.parametrize("seed", range(3))
def test_each_row_has_the_samplers_token_at_every_step(seed: int) -> None:
    case = Case(Shape(rows=len(ASKED), vocab=VOCAB, seed=seed))
    sequences = sequences_at(case.rows.generation)
    chosen, scores, logits = case.decode(STEPS, draws=draws_for(sequences), num_threads=1 + seed)
    assert np.isfinite(scores).all()
    for taken in range(STEPS):
        wanted = tokens_of(sample(torch.from_numpy(logits[taken]), sequences))
        assert chosen[taken].tolist() == wanted
        for sequence, token in zip(sequences, wanted, strict=True):
            sequence.token_ids.append(token)
            if sequence.constraint is not None:
                sequence.constraint.take(token)


def test_masks_change_no_bits_of_other_rows() -> None:
    case = Case(Shape(rows=len(ASKED), vocab=VOCAB))
    plain = [sequence_of(SamplingParams(temperature=0.0)) for _ in ASKED]
    wanted = case.decode(STEPS)[2][:, :2]
    mixed = sequences_at(case.rows.generation)
    mixed[:2] = plain[:2]
    np.testing.assert_array_equal(case.decode(STEPS, draws=draws_for(mixed))[2][:, :2], wanted)


def test_a_run_ends_with_its_last_grammar() -> None:
    """No step follows, and a grammar that a token has ended is not called again."""
    case = Case(Shape(rows=2, vocab=VOCAB))
    params = SamplingParams(temperature=0.0, ignore_eos=True, stop_token_ids=[9])
    sequences = [sequence_of(params, generated=[1] * count) for count in (10, 7)]
    for sequence in sequences:
        sequence.constraint = EveryThird(tuple(sequence.token_ids))
    ends = np.full((2, 1), -1)
    assert len(case.decoder().run(case.rows, STEPS, draws=draws_for(sequences), ends=ends)[0]) == 4
    ending = sequence_of(replace(params, logit_bias={9: 100.0}), generated=[2] * 7)
    ending.constraint = EveryThird((2,) * 7, end=9)  # which 9, the end, may follow
    found = case.decoder().run(case.rows, STEPS, draws=draws_for([sequences[0], ending]), ends=ends)
    assert found[0][:, 1].tolist() == [9]


def test_logits_are_those_of_the_rows_that_have_a_place() -> None:
    case = Case(Shape(rows=5, vocab=VOCAB))
    tokens, _, wanted = case.decode(STEPS)
    some = np.full((STEPS, 2, VOCAB), np.nan, np.float32)
    places = np.array([-1, 1, -1, 0, -1])
    pool = case.pool.clone()
    found, _ = case.decoder().run(case.rows, STEPS, logits=some, logit_places=places)
    np.testing.assert_array_equal(found, tokens)
    np.testing.assert_array_equal(some, wanted[:, [3, 1]])
    case.pool.copy_(pool)
    decoder, followed = case.decoder(), np.full_like(some, np.nan)
    decoder.begin(case.rows, STEPS, np.zeros(2, np.int32), logits=followed, logit_places=places)
    for step in range(STEPS):
        decoder.take()
        np.testing.assert_array_equal(followed[step], some[step])
    decoder.finish()


def tree_of(*words: tuple[int, ...]) -> Any:
    found = BadWords(words)
    return found.edges, found.first_edges, found.bans, found.first_bans


NOTHING: dict[str, Any] = {"biased": np.empty(0, np.int64), "biases": np.empty(0, np.float32), "allowed": None}
NOTHING |= {"banned": np.empty(0, np.int64), "banned_until": 0, "words": None, "recent": []}
WRONG: dict[str, dict[str, Any]] = {
    "a biased token": {"biased": np.array([VOCAB]), "biases": np.ones(1, np.float32)},
    "a banned token": {"banned": np.array([-1]), "banned_until": 9},
    "a word's last token": {"words": tree_of((3, VOCAB))},
}


def draws_by(rules: LogitMask, form: Any = None) -> Draws:
    from d3engine.kernels.native.runs import RowSampling

    asked = [RowSampling(-float("inf"), 1.0, 0, 1.0, 0.0, 0.0, None, rules)]
    return Draws(np.zeros(1, np.float32), np.zeros(1, np.int64), np.zeros(1, np.int64), asked, form)


@pytest.mark.parametrize("what", WRONG)
def test_masks_with_tokens_outside_the_vocabulary_are_refused(what: str) -> None:
    case = Case(Shape(rows=1, vocab=VOCAB))
    with pytest.raises(NativeError, match="a token id is outside the vocabulary"):
        case.decoder().run(case.rows, 1, draws=draws_by(LogitMask(**NOTHING | WRONG[what])))


def test_an_error_of_a_grammar_is_raised_by_the_run() -> None:
    """So does a mask that is too short; `has_grammar` without a grammar is refused."""
    case = Case(Shape(rows=1, vocab=VOCAB))
    rules = LogitMask(**NOTHING, has_grammar=True)
    asked: list[tuple[int, int, int]] = []

    def fails(row: int, taken: int, token: int) -> Mask:
        asked.append((row, taken, token))
        if taken:
            raise ValueError("no form")
        return np.full(13, 255, np.uint8)

    decoder = case.decoder()
    with pytest.raises(ValueError, match="no form"):
        decoder.run(case.rows, STEPS, draws=draws_by(rules, fails))
    assert [question[:2] for question in asked] == [(0, 0), (0, 1)]
    decoder.begin(case.rows, STEPS, np.zeros(2, np.int32), draws=draws_by(rules, fails))
    with pytest.raises(ValueError, match="no form"):
        [decoder.take() for _ in range(STEPS)]
    decoder.finish()
    with pytest.raises(NativeError, match="at least 13 bytes"):
        decoder.run(case.rows, 1, draws=draws_by(rules, lambda *_: np.zeros(12, np.uint8)))
    with pytest.raises(NativeError, match="no steps"):
        decoder.run(case.rows, 1, draws=draws_by(rules))
