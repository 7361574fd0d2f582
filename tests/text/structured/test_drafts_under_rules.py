"""Drafts under penalties, bias, bans, stop strings and grammars change no bit, and the native library drafts there."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from batches import Request, preempting, run_together
from fixture_types import MakeLlama
from json_schemas import closed, random_schema
from slow_sampling import sequence_of
from stepping import see_steps
from tiny_models import save_without_layer

from d3engine import D3, Engine, FullDepth, Lossless, PromptLookup, SamplingParams, Speculative, StructuredOutputsParams
from d3engine.depth import DepthPolicy
from d3engine.executor.native_choices import FormsOfRun
from d3engine.request.outputs import CompletionOutput
from d3engine.request.params import RequestOutputKind
from d3engine.scheduling.plan import Plan

PROMPT = (40, 41, 42, 43, 44, 40, 41, 42, 43, 44, 40, 41, 42)
SCHEMA = closed({"name": {"enum": ["one of these", "one of those"]}, "ids": {"type": "array", "maxItems": 3}})
RULES: dict[str, dict[str, Any]] = {
    "none": {},
    "presence and frequency": {"presence_penalty": 0.7, "frequency_penalty": 0.3},
    "repetition": {"repetition_penalty": 1.3, "temperature": 0.9},
    "bias": {"logit_bias": {5: 3.0, 90: -100.0, 41: 6.0, 42: 6.0}, "temperature": 0.7},
    "allowed tokens": {"allowed_token_ids": list(range(30, 60)), "frequency_penalty": 0.1},
    "minimum": {"logit_bias": {2: 100.0}, "min_tokens": 9},
    "bad words": {"bad_words": ["the", "a b"], "temperature": 1.0},
    "a cut": {"top_k": 5, "top_p": 0.9, "temperature": 1.0, "presence_penalty": 0.2},
    "regex": {"regex": "(one two three ){3,9}", "temperature": 0.8},
    "choice": {"choice": ["one of these texts", "one of those texts"]},
    "schema": {"json": SCHEMA, "temperature": 1.0},
    "schema, penalised": {"json": SCHEMA, "repetition_penalty": 1.2, "logit_bias": {41: 2.0}},
    "grammar": {"grammar": 'start: "(((" start ")))" | "xyzxyzxyz"', "frequency_penalty": 0.5},
    "bounded reasoning": {
        **{"choice": ["one", "two"], "reasoning": ("", "."), "reasoning_tokens": 4},
        "logit_bias": {41: 100.0},  # lookups draft it beyond the reasoning's end
    },
}
LENGTH = 28


class Models(NamedTuple):
    """A target, the draft model made from it, and the tokenizer of both."""

    target: Path
    draft: str
    tokenizer: Path


@pytest.fixture(scope="module")
def models(
    tiny_llama: MakeLlama, tokenizer_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Models:
    llama = tiny_llama(vocab_size=768, num_hidden_layers=4, hidden_size=32, eos_token_id=2, seed=1)
    draft = save_without_layer(llama, 1, tmp_path_factory.mktemp("draft"))
    return Models(llama.directory, draft, tokenizer_of("sentencepiece"))


@pytest.fixture(scope="module")
def engine(models: Models, native_library: None) -> Iterator[Engine]:
    with new_engine(models) as made:
        yield made


def new_engine(models: Models, **changes: Any) -> Engine:
    given = {"max_num_seqs": 8, "max_model_len": 64, "block_size": 4, "device": "cpu"} | changes
    return Engine(models.target, tokenizer=models.tokenizer, depth=Speculative(models.draft), **given)


def params(rule: str, depth: DepthPolicy, **given: Any) -> SamplingParams:
    asked = RULES[rule] | given
    form = {name: asked.pop(name) for name in StructuredOutputsParams.names() if name in asked}
    structured = StructuredOutputsParams(**form) if form else None
    common = {"temperature": 0.0, "seed": len(rule), "max_tokens": LENGTH, "logprobs": 1}
    return SamplingParams(**common | asked, structured_outputs=structured, depth=depth)


def policies(draft: str) -> list[DepthPolicy]:
    return [
        PromptLookup(4),
        PromptLookup(6, history=200),
        PromptLookup(),
        Speculative(draft, 3),
        Speculative(draft, 5, stop_probability=0.01, adaptive=True),
        Speculative(draft),
        Lossless(D3(0.9, 0.5), 3),
    ]


def what(answer: CompletionOutput) -> tuple[Any, ...]:
    """All of an answer but the layers that it took."""
    return answer.token_ids, answer.text, answer.logprobs, answer.finish_reason, answer.stop_reason


@pytest.fixture(scope="module")
def plain(engine: Engine) -> dict[str, CompletionOutput]:
    """The answers without drafts, each alone."""
    return {one: engine.generate(list(PROMPT), params(one, FullDepth()), use_tqdm=False)[0].outputs[0] for one in RULES}


def cycled(engine: Engine) -> list[Plan]:
    """The plans of draft-and-verify iterations that the engine's executor is given from here on."""
    plans: list[Plan] = []
    see_steps(engine, lambda plan: plans.extend([plan] if plan.multi_step and plan.multi_step.cycles else []))
    return plans


@pytest.mark.parametrize("rule", RULES)
def test_each_drafter_alone_and_streamed_gives_undrafted_bits(
    engine: Engine, models: Models, plain: dict[str, CompletionOutput], rule: str
) -> None:
    """Alone and streamed, every drafter gives the bits of no drafts."""
    plans, drafted = cycled(engine), 0
    eager = engine.stats().eager_steps
    for policy in policies(models.draft):
        asked = params(rule, policy)
        output = engine.generate(list(PROMPT), asked, use_tqdm=False)[0]
        assert what(output.outputs[0]) == what(plain[rule]), policy
        streamed = list(engine.stream(list(PROMPT), asked))[-1]
        assert what(streamed.outputs[0]) == what(plain[rule]), policy
        drafted += output.metrics.num_drafted_tokens
    assert drafted > 0
    assert len(plans) > 0
    assert engine.stats().eager_steps == eager


@pytest.mark.parametrize("how", ["together", "preempted"])
def test_in_a_batch_too(models: Models, plain: dict[str, CompletionOutput], how: str) -> None:
    numbers = random.Random(how)
    asked = [(rule, policy) for policy in policies(models.draft) for rule in RULES]
    numbers.shuffle(asked)
    requests = [Request(PROMPT, params(rule, policy)) for rule, policy in asked]
    disturb = preempting(numbers, 0.1 if how == "preempted" else 0)
    with new_engine(models) as engine:
        plans = cycled(engine)
        done = run_together(engine, requests, numbers, before_step=disturb)
        assert (engine.stats().num_preemptions > 0) == (how == "preempted")
        assert engine.stats().accepted_tokens > 0
    assert max(len(plan.sequences) for plan in plans) > 2
    for nth, (rule, policy) in enumerate(asked):
        assert what(done[nth].outputs[0]) == what(plain[rule]), (rule, policy)


def test_a_stop_string_ends_drafted_answers_where_it_ends_others(
    engine: Engine, models: Models, plain: dict[str, CompletionOutput]
) -> None:
    for rule in ("none", "repetition", "schema"):
        text = plain[rule].text
        for place in range(1, len(text) - 3, 5):
            given = {"stop": [text[place : place + 3]], "include_stop_str_in_output": place % 2 == 0}
            wanted = engine.generate(list(PROMPT), params(rule, FullDepth(), **given), use_tqdm=False)[0].outputs[0]
            for policy in policies(models.draft)[::3]:
                asked = replace(params(rule, policy, **given), output_kind=RequestOutputKind.FINAL_ONLY)
                found = engine.generate(list(PROMPT), asked, use_tqdm=False)[0].outputs[0]
                assert what(found) == what(wanted), (rule, policy, given)
                assert found.stop_reason == given["stop"][0]


def test_pytorch_steps_of_each_drafter_give_undrafted_tokens(models: Models) -> None:
    """Step by step on PyTorch, tokens are those of no drafts too."""
    with new_engine(models, backend="torch") as engine:
        for rule in RULES:
            found = []
            for policy in (FullDepth(), PromptLookup(4), Speculative(models.draft, 3)):
                asked = params(rule, policy, logprobs=None)
                found.append(engine.generate(list(PROMPT), asked, use_tqdm=False)[0].outputs[0])
            assert found[0].token_ids == found[1].token_ids == found[2].token_ids, rule
        assert engine.stats().accepted_tokens > 0


class Fragile:
    """A made-up grammar that any drafted 7 breaks, and 9 in the answer."""

    token_seconds = 0.0

    def __init__(self, tokens: tuple[int, ...] = (), fault: str | None = None) -> None:
        self.tokens = tokens
        self.fault = fault

    def allowed(self, drafted: Any = ()) -> Any:
        if 7 in drafted or 9 in self.tokens:
            self.fault = "it broke"
        return np.zeros(2, np.uint8) if self.fault else np.full(2, len(self.tokens) + len(drafted), np.uint8)

    def take(self, token: int) -> None:
        self.tokens += (token,)

    def copy(self) -> Fragile:
        return Fragile(self.tokens, self.fault)

    def is_over(self, drafted: Any = ()) -> bool:
        return False


def test_fault_reached_by_drafted_tokens_is_not_in_the_answer() -> None:
    """A fault that drafted tokens run into is no part of the answer."""
    sequence = sequence_of(SamplingParams())
    sequence.constraint = Fragile((1,))
    forms = FormsOfRun.of_loop([sequence])
    assert forms.allowed_behind(0, [], [2, 3]).tolist() == [3, 3]  # type: ignore[union-attr]
    assert forms.allowed_behind(0, [], [2, 7]) is None
    assert forms.allowed_behind(0, [4, 5], []).tolist() == [3, 3]  # type: ignore[union-attr]
    assert forms.allowed_behind(0, [4, 5], [7]) is None
    assert forms.allowed_behind(0, [4, 5, 6], [2]).tolist() == [5, 5]  # type: ignore[union-attr]
    assert not forms.faults
    assert forms.allowed_behind(0, [4, 5, 6, 9], []).tolist() == [0, 0]  # type: ignore[union-attr]
    assert forms.faults == {0: "it broke"}
    assert sequence.constraint.tokens == (1,), "the sequence's own grammar stays where the answer is"


def test_random_schemas_are_drafted_with_the_bits_of_no_drafts(engine: Engine, models: Models) -> None:
    numbers = random.Random(5)
    for nth in range(12):
        form = StructuredOutputsParams(json=random_schema(numbers))
        asked = SamplingParams(temperature=nth % 2, seed=nth, max_tokens=45, logprobs=0, structured_outputs=form)
        both = [replace(asked, depth=one) for one in (FullDepth(), policies(models.draft)[nth % 7])]
        one, other = (engine.generate(list(PROMPT), each, use_tqdm=False)[0].outputs[0] for each in both)
        assert what(one) == what(other), (nth, form)


def test_a_draft_model_under_a_grammar_proposes_what_that_allows(engine: Engine, models: Models) -> None:
    """A draft that is the target itself is always right there, also as it draws."""
    own = Speculative(str(models.target), 4)
    arguments: dict[str, Any] = {"max_model_len": 64, "device": "cpu", "tokenizer": models.tokenizer}
    with Engine(models.target, depth=own, **arguments) as same:
        for rule in RULES:
            found = same.generate(list(PROMPT), params(rule, own), use_tqdm=False)[0]
            assert found.metrics.num_verifications > 0, rule
            assert found.metrics.acceptance_rate == 1, rule
