"""Kinds of tokens by a real vocabulary, and what each needs and loses against whole passes and counts by hand."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fixture_types import MakeLlama
from observers import observer_of
from tiny_models import random_prompts

from d3engine import D3
from d3engine.engine.model_directory import model_directory
from d3engine.errors import InvalidValueError
from d3engine.research.analysis.answers import Answered
from d3engine.research.analysis.kinds import ByKind, Kind, TextByKind, TokenKinds, kind_of, measure_by_kind
from d3engine.research.analysis.observer import Observer
from d3engine.research.analysis.saturation import measure_saturation
from d3engine.text.tokenizer import load_tokenizer

LAYERS = 5


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("7", Kind.DIGITS),
        (" 48", Kind.DIGITS),
        ("3.5", Kind.DIGITS),
        ("####", Kind.MARK),
        (" ##", Kind.MARK),
        ("\n", Kind.NEWLINE),
        (" \n\n", Kind.NEWLINE),
        (".\n", Kind.PUNCTUATION),
        (" Omar", Kind.WORDS),
        ("rd", Kind.WORDS),
        ("3rd", Kind.WORDS),
        (" caf\u00e9", Kind.WORDS),
        (" <<", Kind.PUNCTUATION),
        ("\u201c", Kind.PUNCTUATION),
        (" ", Kind.SPACES),
        ("", Kind.OTHER),
        ("\ufffd", Kind.OTHER),
        ("\x07", Kind.OTHER),
    ],
)
def test_a_kind_is_read_off_the_text(text: str, kind: Kind) -> None:
    assert kind_of(text) is kind


def test_tokens_of_a_solution_have_the_kinds_a_reader_sees() -> None:
    """The tokens of a written solution have the kinds that a reader sees."""
    tokenizer = load_tokenizer(model_directory("demo"))
    eos = tokenizer.encode("", add_special_tokens=True)  # its beginning of a sequence is special, and ends nothing
    kinds = TokenKinds(tokenizer, [2])
    ids = tokenizer.encode("Tom has 48 - 5 = 43.\n#### 43", add_special_tokens=False)
    found = Counter(kinds.among(ids).tolist())
    shown = [(tokenizer.decode([token]), kind) for token, kind in zip(ids, kinds.among(ids), strict=True)]
    assert found.keys() == {"words", "digits", "punctuation", "newline", "####"}, shown
    assert kinds.of(2) is Kind.END
    assert [kinds.of(token) for token in eos] == [Kind.OTHER] * len(eos)


class Parity:
    """Stands for a tokenizer's kinds: odd tokens are digits."""

    def of(self, token: int) -> Kind:
        return Kind.DIGITS if token % 2 else Kind.WORDS

    def among(self, tokens: list[int]) -> Any:
        return np.array([self.of(token).value for token in tokens])


@pytest.fixture(scope="module")
def observer(tiny_llama: MakeLlama) -> Observer:
    return observer_of(tiny_llama(num_hidden_layers=LAYERS).directory)


@pytest.fixture(scope="module")
def texts() -> list[Answered]:
    return [
        Answered("", ids[:length], ids[length:], [], [], "", False)
        for ids, length in zip(random_prompts([14, 9, 4]), (5, 1, 3), strict=True)
    ]


def measured(observer: Observer, texts: list[Answered], decoded: list[Answered] | None = None) -> ByKind:
    kinds: Any = Parity()
    return measure_by_kind(observer, kinds, texts, D3(0.7, 0.3).schedule(LAYERS), "D3", decoded)


def test_each_step_counts_once_by_its_output_and_once_by_input(observer: Observer, texts: list[Answered]) -> None:
    """Every step counts once by what it yields and once by what it is fed with."""
    result = measured(observer, texts)
    assert len(result.texts) == 2, "a text of a single token has no step after the first"
    schedule = D3(0.7, 0.3).schedule(LAYERS)
    settled = measure_saturation(observer, texts[:2]).answers
    sums: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for one, layers in zip(texts[:2], settled, strict=True):
        rows = []
        for depth in (None, schedule):
            for states in observer.layers(one.sequence, len(one.prompt_ids), depth):
                hidden = states.after
            rows.append(observer.logits(hidden[one.answer_rows]).log_softmax(dim=-1))
        kl = torch.nn.functional.kl_div(rows[1], rows[0], reduction="none", log_target=True).sum(dim=-1)
        for step in range(1, len(one.token_ids)):
            for side, token in (("yielded", one.token_ids[step]), ("fed", one.token_ids[step - 1])):
                sums.setdefault((side, token % 2), []).append((float(kl[step]), float(layers.layers[step])))
    for (side, odd), values in sums.items():
        kind = Kind.DIGITS if odd else Kind.WORDS
        assert result.mean(side, kind, "kl").value == pytest.approx(np.mean([one[0] for one in values]), abs=1e-5)
        assert np.concatenate(result.values(side, kind, "layers")).tolist() == [one[1] for one in values]
    assert result.mean("fed", None, "kl").value > 1e-3, "nothing is lost, so nothing is shown"


def test_answers_part_at_full_depths_token(observer: Observer, texts: list[Answered]) -> None:
    answers = [replace(texts[0], token_ids=ids) for ids in ([4, 6, 8], [1, 2, 3], [4, 6], [3, 5, 7])]
    decoded = [replace(texts[0], token_ids=ids) for ids in ([4, 6, 8], [1, 2, 5], [4, 6, 9], [3, 6, 7])]
    result = measured(observer, answers, decoded)
    assert result.parted == {"digits": 3}, "at 3, at the 9 that full depth does not go on to, and at 5"
    assert [row[0] for row in result.table().rows] == ["digits", "words", "all"]
    assert [row[-1] for row in result.table().rows] == ["3", "0", "3"]
    assert result.table("fed").header[-1] == "same first choice"
    assert measured(observer, answers).as_dict()["answers_that_part"] is None


def test_means_of_a_kind_are_over_steps_and_intervals_over_texts() -> None:
    """Means of a kind are over its steps, and intervals over texts."""

    def text(kinds: list[str], kl: list[float]) -> TextByKind:
        other = np.zeros(len(kl))
        return TextByKind(np.array(kinds), np.array(kinds[::-1]), other, other, np.array(kl), other, other)

    result = ByKind(2, "D3", [text(["words", "digits", "digits"], [9.0, 1.0, 3.0]), text(["digits"], [2.0])])
    found = result.mean("yielded", Kind.DIGITS, "kl")
    assert (found.value, found.arm) == (2, 0), "both texts have the mean of all"
    assert result.mean("fed", Kind.WORDS, "kl").value == 3
    assert result.kinds("yielded") == [Kind.DIGITS, Kind.WORDS]


def test_texts_without_a_second_token_are_refused(observer: Observer, texts: list[Answered]) -> None:
    with pytest.raises(InvalidValueError, match="answers must be one of two tokens or more; got '1 text'"):
        measured(observer, texts[2:])
