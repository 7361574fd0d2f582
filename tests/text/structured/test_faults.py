"""What ends one sequence of a grammar leaves later requests, other sequences and memory as they were."""

import gc
import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from small_tokenizers import byte_ids

from d3engine import Engine, SamplingParams, StructuredOutputsParams
from d3engine.request.constraint import FAULT_PREFIX, Constraint
from d3engine.scheduling.multi_step import steps_of_forms
from d3engine.scheduling.running import Chunks, RunningTable, Trait
from d3engine.text.structured import grammar
from d3engine.text.structured.checker import MOST
from d3engine.text.structured.forms import Forms
from d3engine.text.structured.grammar import BURST_SECONDS, GrammarPlace, MaskTime
from d3engine.text.tokenizer import Tokenizer

PROMPT = {"prompt_token_ids": [5, 6, 7]}
END = 2


def fault_of(place: Constraint, tokens: list[int]) -> str | None:
    for token in tokens:
        mask = place.allowed()
        if place.fault is not None:
            return place.fault
        assert mask is not None
        assert mask[token >> 3] >> (token & 7) & 1
        place.take(token)
    return place.fault


class Clock:
    """Processor time that a test sets."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_texts_that_fill_a_lexer_leave_room_for_others(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MOST, "max_lexer_states", 6000)
    monkeypatch.setattr(MaskTime, "used", staticmethod(Clock()))  # here no mask is expensive
    replay, replayed = GrammarPlace._replay, []
    monkeypatch.setattr(GrammarPlace, "_replay", lambda place: replayed.append(1) or replay(place))
    schema = {"type": "string", "pattern": r"^(?:\S+\s+){0,29}\S+$", "maxLength": 300}
    form = Forms(tokenizer, tokenizer.vocab_size).compile(StructuredOutputsParams(json=schema))
    pick = random.Random(1)
    for _ in range(40):
        words = ["".join(pick.choices("abcdefgh", k=pick.randint(1, 9))) for _ in range(29)]
        text = json.dumps(" ".join(words)[:299].strip())
        assert fault_of(form.begin(frozenset([END])), byte_ids(tokenizer, text)) is None
    assert replayed


def test_a_sequence_of_expensive_masks_is_ended_alone(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    used = Clock()
    monkeypatch.setattr(MaskTime, "used", staticmethod(used))
    monkeypatch.setattr(MaskTime, "now", staticmethod(lambda: 0.0))
    forms = Forms(tokenizer, tokenizer.vocab_size)
    forms._mask_time = MaskTime()
    cheap = forms.compile(StructuredOutputsParams(regex="[a-c]+")).begin(frozenset([END]))
    dear = forms.compile(StructuredOutputsParams(regex="[a-d]+")).begin(frozenset([END]))
    mask, asked = GrammarPlace._mask, [0]

    def slow(place: GrammarPlace) -> Any:
        if place is dear:
            used.seconds += 0.1
            asked[0] += 1
        return mask(place)

    monkeypatch.setattr(GrammarPlace, "_mask", slow)
    token = byte_ids(tokenizer, "a")
    for _ in range(8):
        assert fault_of(cheap, token) is None
        fault_of(dear, token * (dear.fault is None))
    assert dear.fault is not None
    assert dear.fault.startswith(f"{FAULT_PREFIX}its tokens take more than 1 ms")
    assert asked[0] == 1 + BURST_SECONDS // 0.1
    assert fault_of(cheap, token) is None


def test_the_time_of_expensive_masks_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now = Clock()
    monkeypatch.setattr(MaskTime, "now", staticmethod(now))
    time = MaskTime()
    time.spend(2 * BURST_SECONDS)
    assert time.is_spent()
    now.seconds += 1.5 * BURST_SECONDS / grammar.SHARE
    assert not time.is_spent()


def places_alive() -> list[GrammarPlace]:
    return [one for one in gc.get_objects() if type(one) is GrammarPlace]


def test_ended_request_leaves_nothing_for_garbage_collection(random_engine: Callable[..., Engine]) -> None:
    """An ended request leaves nothing for the garbage collector."""
    form = StructuredOutputsParams(regex="(.*a.{4})|(.*b.{3})")
    params = SamplingParams(max_tokens=6, n=4, temperature=2, seed=1, ignore_eos=True, structured_outputs=form)
    with random_engine("sentencepiece") as engine:
        engine.generate(PROMPT, params, use_tqdm=False)
        gc.collect()
        before = places_alive()  # of servers that other tests keep
        gc.disable()
        try:
            engine.generate(PROMPT, params, use_tqdm=False)
            assert [place for place in places_alive() if not any(place is one for one in before)] == []
        finally:
            gc.enable()


def test_moves_over_the_tokens_of_a_native_run_are_free(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    used = Clock()
    monkeypatch.setattr(MaskTime, "used", staticmethod(used))
    forms = Forms(tokenizer, tokenizer.vocab_size)
    place = forms.compile(StructuredOutputsParams(regex="[a-c]+")).begin(frozenset([END]))
    check = GrammarPlace._check

    def slow(place: GrammarPlace, *done: bool) -> None:
        used.seconds += 0.1 * grammar.FREE_SECONDS
        check(place, *done)

    monkeypatch.setattr(GrammarPlace, "_check", slow)
    for token in byte_ids(tokenizer, "abc" * 40):
        place.take(token)
    assert forms._mask_time._left == BURST_SECONDS, "ordinary moves were charged as expensive ones"


def test_a_replay_for_a_lexer_that_others_filled_is_free(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    used = Clock()
    monkeypatch.setattr(MaskTime, "used", staticmethod(used))
    forms = Forms(tokenizer, tokenizer.vocab_size)
    place = forms.compile(StructuredOutputsParams(regex="[a-c]+")).begin(frozenset([END]))
    assert fault_of(place, byte_ids(tokenizer, "abc" * 40)) is None
    mask, replay, asked = GrammarPlace._mask, GrammarPlace._replay, [0]

    def full_once(place: GrammarPlace) -> Any:
        asked[0] += 1
        if asked[0] == 1:
            raise grammar._MatcherError("lexer error: too many states")
        return mask(place)

    def slow(place: GrammarPlace) -> None:
        replay(place)
        used.seconds += 100 * grammar.FREE_SECONDS

    monkeypatch.setattr(GrammarPlace, "_mask", full_once)
    monkeypatch.setattr(GrammarPlace, "_replay", slow)
    assert fault_of(place, byte_ids(tokenizer, "a")) is None
    assert forms._mask_time._left == BURST_SECONDS


def test_a_run_is_as_short_as_the_time_of_its_forms_wants(tokenizer: Tokenizer) -> None:
    table = RunningTable(2, 2, 512)
    for slot, seconds in enumerate((0.0, 0.004)):
        constraint = SimpleNamespace(token_seconds=seconds)
        table.sequences[slot] = cast(Any, SimpleNamespace(constraint=constraint))
    chunks = Chunks(np.array([0, 1]), *np.zeros((3, 2), np.int64), np.ones((2, 2), bool), traits=Trait.GUIDED)
    assert steps_of_forms(chunks, table) == 5
    assert steps_of_forms(replace(chunks, slots=np.array([0])), table) == sys.maxsize
    assert steps_of_forms(replace(chunks, slots=np.array([1] * 9)), table) == 1
    assert steps_of_forms(replace(chunks, traits=0), table) == sys.maxsize
    place = Forms(tokenizer, tokenizer.vocab_size).compile(StructuredOutputsParams(regex="[a-c]+")).begin(frozenset())
    place.allowed()
    assert 0 < place.token_seconds < 1
