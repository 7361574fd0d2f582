"""Free text before a form allows at every token what its grammar allows, and asks the grammar seldom."""

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batches import Request, preempting, run_together

from d3engine import (
    D3,
    Engine,
    FullDepth,
    Lossless,
    SamplingParams,
    SelfSpeculative,
    StructuredOutputsParams,
    UnifiedSkip,
)
from d3engine.depth import DepthPolicy
from d3engine.request.constraint import Constraint
from d3engine.server.requests.formats import TOOL_FORMATS, AskedCalls, tool_format_named
from d3engine.text.structured.forms import Forms
from d3engine.text.structured.free_text import FreeForm
from d3engine.text.tokenizer import Tokenizer, load_tokenizer

ENDS = frozenset({2})
COUNT = {"type": "object", "properties": {"many": {"enum": [5, 6]}}, "required": ["many"]}
WORDS = [
    "Tom has 5 pens",
    " <",
    "<think>",
    "</think>",
    "</thi",
    "né",
    "\n",
    " ",
    "{",
    "[",
    "é\U0001f600",
    "<tool",
    "_call",
]
WORDS += ["Here is my thought", "```", "a long enough text to be none other"]


@pytest.fixture(scope="module", params=["sentencepiece", "byte level", "byte fallback", "gguf"])
def tokenizer(tokenizer_of: Callable[[str], Path], request: pytest.FixtureRequest) -> Tokenizer:
    return load_tokenizer(tokenizer_of(request.param))


@pytest.fixture(scope="module")
def forms(tokenizer: Tokenizer) -> Forms:
    return Forms(tokenizer, tokenizer.vocab_size)


def both(forms: Forms, params: StructuredOutputsParams) -> tuple[Constraint, Constraint]:
    """The form as it is used, and its grammar alone."""
    form: Any = forms.compile(params)
    assert isinstance(form, FreeForm)
    return form.begin(ENDS), form._form.begin(ENDS)


def mask(place: Constraint, drafted: list[int]) -> list[int] | None:
    found = place.allowed(drafted)
    return None if found is None else np.unpackbits(found, bitorder="little").tolist()


def walk(
    forms: Forms, tokenizer: Tokenizer, params: StructuredOutputsParams, seed: int, texts: list[str]
) -> tuple[int, int]:
    """Let both take the same random tokens; returns the masks that were compared, and the tokens that asked none."""
    quick, slow = both(forms, params)
    numbers, num_compared, num_rested = random.Random(seed), 0, 0
    ids = [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False)]
    for token in ids:
        allowed = mask(slow, [])
        assert mask(quick, []) == allowed
        num_compared += 1
        if allowed is None or not allowed[token]:
            return num_compared, num_rested
        num_rested += quick.token_seconds == 0 and slow.token_seconds > 0
        drafted = [token, *numbers.choices(ids, k=2)]
        if numbers.random() < 0.3:
            assert mask(quick, drafted[:1]) == mask(slow, drafted[:1])
            assert quick.is_over(drafted[:1]) == slow.is_over(drafted[:1])
        if numbers.random() < 0.1:
            quick = quick.copy()
        quick.take(token)
        slow.take(token)
        assert quick.fault is None
    assert mask(quick, []) == mask(slow, [])
    return num_compared + 1, num_rested


@pytest.mark.parametrize("reasoning", [None, ("<think>", "</think>"), ("", "</think>")])
@pytest.mark.parametrize("name", [one.name for one in TOOL_FORMATS if one.openings])
def test_every_token_is_allowed_as_by_the_grammar_alone(
    forms: Forms, tokenizer: Tokenizer, name: str, reasoning: tuple[str, str] | None
) -> None:
    written = tool_format_named(name)
    asked = AskedCalls([COUNT], ["count"], True, True, {}, "<think>")
    params = StructuredOutputsParams(
        grammar=(form := written.grammar(asked)).grammar, openings=form.openings, reasoning=reasoning
    )
    for seed in range(6):
        numbers = random.Random(seed)
        words = [*WORDS, *written.openings, *(one[: len(one) // 2] for one in written.openings)]
        num_compared, _ = walk(forms, tokenizer, params, seed, numbers.choices(words, k=12))
        assert num_compared
    call = written.openings[0] + written.head.replace("NAME", "count") + '{"many": 5}' + written.tail + written.end
    text = ["<think>I think" if reasoning and reasoning[0] else "", "</think>" if reasoning else ""]
    _, rested = walk(forms, tokenizer, params, 0, [*text, "Tom has 5 pens. Tom has 5 pens and more. " * 3, call])
    assert rested > 20


@pytest.mark.parametrize("form", [{"json": COUNT}, {"regex": "(?s:.*)"}, {"choice": ["yes", "no"]}])
def test_a_form_behind_a_reasoning_is_its_grammar(forms: Forms, tokenizer: Tokenizer, form: dict[str, Any]) -> None:
    for reasoning in (("<think>", "</think>"), ("", "</think>")):
        params = StructuredOutputsParams(**form, reasoning=reasoning)
        for seed in range(8):
            numbers = random.Random(seed)
            texts = [
                reasoning[0],
                *numbers.choices([word for word in WORDS if "</think>" not in word], k=8),
                "</think>",
                "\n\n",
                "yes" if "choice" in form else '{"many": 5}',
            ]
            num_compared, _ = walk(forms, tokenizer, params, seed, texts)
            assert num_compared > 20, "the walk has left the grammar before its form"


def test_a_reasoning_is_ended_at_its_limit(forms: Forms, tokenizer: Tokenizer) -> None:
    params = StructuredOutputsParams(choice=["yes"], reasoning=("", "</think>"), reasoning_tokens=4)
    place = forms.compile(params).begin(ENDS)
    ids = tokenizer.encode("Tom has 5 pens and 6 cups", add_special_tokens=False)[:4]
    for token in ids:
        place.take(token)
    closing = tokenizer.encode("</think>", add_special_tokens=False)
    for token in closing:
        assert np.flatnonzero(mask(place, []) or []).tolist() == [token]
        place.take(token)
    assert np.flatnonzero(mask(place, []) or []).size > 1
    early = forms.compile(params).begin(ENDS)
    for token in [*ids[:2], *closing]:
        early.take(token)
    assert np.array_equal(early.allowed(), place.allowed())  # type: ignore[arg-type]


def test_draft_that_leaves_a_due_end_of_reasoning_stops_there(forms: Forms, tokenizer: Tokenizer) -> None:
    """Behind a drafted token that leaves the end of reasoning, which is due, nothing may come."""
    params = StructuredOutputsParams(choice=["yes"], reasoning=("", "</think>"), reasoning_tokens=2)
    place = forms.compile(params).begin(ENDS)
    more = tokenizer.encode("Tom has 5 pens and 6 cups. Tom has 5 pens and 6 cups.", add_special_tokens=False)
    closing = tokenizer.encode("</think>", add_special_tokens=False)
    within, rest = more[:2], [token for token in more[2:] if token not in closing]
    assert len(rest) > len(closing)
    for num_closing in range(len(closing)):
        due = [*within, *closing[:num_closing]]
        assert np.flatnonzero(mask(place, due) or []).tolist() == [closing[num_closing]]
        assert not place.is_over(due)
        for size in range(1, len(rest) + 1):
            assert place.allowed([*due, *rest[:size]]) is None
            assert place.is_over([*due, *rest[:size]])
    assert np.flatnonzero(mask(place, [*within, *closing]) or []).size > 1
    assert place.fault is None


POLICIES: list[DepthPolicy] = [FullDepth(), D3(0.9, 0.5), SelfSpeculative(UnifiedSkip(2), 3), Lossless(D3(0.5, 0.3), 4)]
CALLS = 'start: TEXT | opening calls\nTEXT: /(?s:.*)/\nopening[lazy]: /(?s:.*)e/\ncalls: /[0-9]{2}/ ")"'


def test_answers_beside_others_and_preempted_are_those_alone(random_engine: Callable[..., Engine]) -> None:
    requests = []
    for nth in range(8):
        form = StructuredOutputsParams(grammar=CALLS, openings=["e"])
        asked = SamplingParams(seed=nth, max_tokens=50, structured_outputs=form, depth=POLICIES[nth % 4], min_p=0.0)
        requests.append(Request((5, 6, 7), asked))
    numbers = random.Random(2)
    with random_engine("sentencepiece", max_model_len=64) as engine:
        prompt = {"prompt_token_ids": [5, 6, 7]}
        alone = [engine.generate([prompt], one.params, use_tqdm=False)[0].outputs[0] for one in requests]

        done = run_together(engine, requests, random.Random(1), before_step=preempting(numbers, 0.12))
        assert engine.stats().num_preemptions > 5
    for nth, other in enumerate(alone):
        (one,) = done[nth].outputs
        assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
    called = [answer for answer in alone if "e" in answer.text and answer.finish_reason == "stop"]
    assert len(called) > 3
    assert all(re.fullmatch(r"[^e]*e\d{2}\)", answer.text, re.DOTALL) for answer in called)
