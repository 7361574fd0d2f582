"""An answer that had to have a form has it, whatever the model would rather say and however its tokens came to be."""

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batches import Request, preempting, run_together
from fixture_types import MakeEngine, MakeLlama
from json_schemas import random_schema, satisfies
from multi_step import unread
from tiny_models import save_without_layer

from d3engine import (
    D3,
    EarlyExit,
    Engine,
    FullDepth,
    Lossless,
    SamplingParams,
    SelfSpeculative,
    Speculative,
    StructuredOutputsParams,
    UnifiedSkip,
)
from d3engine.depth import DepthPolicy
from d3engine.request.outputs import CompletionOutput

KINDS = ["sentencepiece", "byte level", "byte fallback", "gguf"]
POLICIES: list[DepthPolicy] = [
    FullDepth(),
    D3(0.9, 0.5),
    EarlyExit(0.02),
    SelfSpeculative(UnifiedSkip(2), 3),
    Lossless(D3(0.5, 0.3), 4),
]
DRAFTING: list[DepthPolicy] = [
    SelfSpeculative(UnifiedSkip(2), 3),
    Lossless(D3(0.5, 0.5), 2),
    Lossless(D3(0.6, 0.3), 5, stop_probability=0.2, adaptive=True),
]


def answers(engine: Engine, asked: list[SamplingParams], prompt: list[int]) -> list[CompletionOutput]:
    outputs = engine.generate([{"prompt_token_ids": prompt}] * len(asked), asked, use_tqdm=False)
    return [answer for output in outputs for answer in output.outputs]


def params(**given: Any) -> SamplingParams:
    form = {name: given.pop(name) for name in StructuredOutputsParams.names() if name in given}
    return SamplingParams(
        **{"temperature": 1.0, "max_tokens": None} | given, structured_outputs=StructuredOutputsParams(**form)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_random_models_write_json_of_random_schemas(random_engine: MakeEngine, kind: str) -> None:
    """The hard case: nothing in the model helps, and its temperature is 1; every policy in one batch."""
    numbers = random.Random(kind)
    schemas = [random_schema(numbers) for _ in range(15)]
    with random_engine(kind, max_model_len=512) as engine:
        asked = [params(json=one, seed=nth, depth=POLICIES[nth % len(POLICIES)]) for nth, one in enumerate(schemas)]
        found = answers(engine, asked, [5, 6, 7])
    for answer, schema in zip(found, schemas, strict=True):
        assert answer.finish_reason == "stop", (answer, schema)
        assert satisfies(json.loads(answer.text), schema), (answer.text, schema)
    assert len({answer.text for answer in found}) > 9, "the same answer again and again would prove little"


@pytest.mark.parametrize("kind", KINDS)
def test_random_models_match_patterns_choices_and_grammars(random_engine: MakeEngine, kind: str) -> None:
    """Random models match a pattern, choose, and follow a grammar."""
    texts = [" yes", "no, never!\n", "日本 (é)", "a\\b/[c]*"]
    forms: list[tuple[dict[str, Any], Callable[[str], object]]] = [
        ({"regex": r"([a-f]{2}/\d{1,3}(é|\n)?){1,3}"}, re.compile(r"([a-f]{2}/\d{1,3}(é|\n)?){1,3}").fullmatch),
        ({"choice": texts}, texts.__contains__),
        ({"grammar": 'start: "(" start ")" | A\nA: /[0-9]{1,2}/'}, re.compile(r"(\(*)\d{1,2}(\)*)").fullmatch),
        ({"json": {"enum": texts}, "disable_any_whitespace": True}, lambda text: json.loads(text) in texts),
    ]
    with random_engine(kind, max_model_len=512) as engine:
        asked = [params(seed=nth, depth=POLICIES[nth % 5], **form) for form, _ in forms for nth in range(5)]
        found = answers(engine, asked, [5, 6, 7])
    for nth, answer in enumerate(found):
        is_right = forms[nth // 5][1]
        assert answer.finish_reason == "stop"
        assert is_right(answer.text), answer.text
        assert answer.text.count("(") == answer.text.count(")")


def test_any_object_is_written_with_little_between_its_parts(random_engine: MakeEngine) -> None:
    with random_engine("sentencepiece", max_model_len=512) as engine:
        (quote,), (end,) = (engine.get_tokenizer().encode(sign)[-1:] for sign in '"}')
        ending = {quote: 8.0, end: 8.0}  # or a random text would hardly ever end
        asked = [params(json_object=True, seed=seed, max_tokens=40, logit_bias=ending) for seed in range(8)]
        found = answers(engine, asked, [5, 6, 7])
    ended = [answer.text for answer in found if answer.finish_reason == "stop"]
    assert len(ended) > 3
    assert all(isinstance(json.loads(text), dict) for text in ended)
    assert all(re.match(r"\{( |\n( {0,16}|\t{0,8}))?[\"}]", answer.text) for answer in found)


@pytest.mark.parametrize("policy", DRAFTING, ids=repr)
def test_drafts_under_a_grammar_give_full_depth_answers(random_engine: MakeEngine, policy: DepthPolicy) -> None:
    """Drafts give the answers that full depth gives under the same grammar."""
    numbers = random.Random(7)
    forms: list[dict[str, Any]] = [{"json": random_schema(numbers)} for _ in range(5)]
    forms += [{"regex": "[a-z ]{3,30}"}, {"choice": ["one of these texts", "one of those texts"]}]
    with random_engine("sentencepiece", max_model_len=512) as engine:
        both = [(form, depth) for form in forms for depth in (policy, FullDepth())]
        asked = [params(temperature=0, max_tokens=60, depth=depth, **form) for form, depth in both]
        found = answers(engine, asked, [5, 6, 7])
        assert engine.stats().verifications > len(forms)
    for drafted, full in zip(found[::2], found[1::2], strict=True):
        assert (drafted.token_ids, drafted.text) == (full.token_ids, full.text)
        assert drafted.finish_reason == full.finish_reason


def test_a_second_model_drafts_in_the_form_too(
    tiny_llama: MakeLlama, tokenizer_of: Callable[[str], Path], tmp_path: Path
) -> None:
    llama = tiny_llama(vocab_size=768, num_hidden_layers=4, hidden_size=32, eos_token_id=2, seed=1)
    policy = Speculative(save_without_layer(llama, 1, tmp_path / "draft"), 3)
    numbers = random.Random(8)
    schemas = [random_schema(numbers) for _ in range(6)]
    with Engine(llama.directory, tokenizer=tokenizer_of("sentencepiece"), device="cpu", depth=policy) as engine:
        asked = [params(json=s, temperature=0, max_tokens=60, depth=d) for s in schemas for d in (policy, FullDepth())]
        found = answers(engine, asked, [5, 6, 7])
    for drafted, full in zip(found[::2], found[1::2], strict=True):
        assert (drafted.token_ids, drafted.finish_reason) == (full.token_ids, full.finish_reason)


def test_answers_beside_others_and_preempted_are_those_alone(random_engine: MakeEngine) -> None:
    numbers = random.Random(3)
    requests = []
    for nth in range(7):
        form = [{"json": random_schema(numbers)}, {"regex": "[a-z0-9]{8,16}"}, None][nth % 3]
        given: dict[str, Any] = {"seed": nth, "max_tokens": 30, "depth": POLICIES[nth % len(POLICIES)]}
        asked = SamplingParams(ignore_eos=True, **given) if form is None else params(**given, **form)
        requests.append(Request((5, 6, 7), asked))
    with random_engine("sentencepiece", max_model_len=64) as engine:
        alone = [answers(engine, [request.params], [5, 6, 7])[0] for request in requests]

        done = run_together(engine, requests, random.Random(1), before_step=preempting(numbers, 0.12))
        assert engine.stats().num_preemptions > 5
    for nth, other in enumerate(alone):
        (one,) = done[nth].outputs
        assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)


def test_several_answers_to_a_prompt_each_keep_the_grammar(random_engine: MakeEngine) -> None:
    """Several answers to one prompt keep the grammar, each for itself."""
    with random_engine("byte level") as engine:
        found = answers(engine, [params(regex="[a-z]{3}[0-9]{2}", n=8, seed=1)], [5, 6, 7])
    assert len({answer.text for answer in found}) == 8
    assert all(re.fullmatch("[a-z]{3}[0-9]{2}", answer.text) for answer in found)


def test_guided_multi_step_batch_gives_answers_of_single_steps(random_engine: MakeEngine) -> None:
    """A guided batch decodes several steps at once and gives the answers of single steps."""
    # By streams too, whose form a thread asks for; and no step is taken behind the last form's end.
    forms: list[dict[str, Any]] = [
        {"regex": "[a-z]{3}[0-9]{20}", "ignore_eos": True},
        {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
        {"choice": ["one of these texts", "one of those texts"], "temperature": 0, "logprobs": 1},
    ]
    asked = [params(seed=nth, **{"max_tokens": 40} | form) for nth, form in enumerate(forms)]
    found, calls = [], []
    with random_engine("sentencepiece", num_scheduler_steps=16) as engine:
        for most in (1, 16):
            engine.scheduler.config = replace(engine.scheduler.config, num_scheduler_steps=most)
            before = engine.stats()
            for nth, one in enumerate(asked):
                engine.add_request(str(nth), {"prompt_token_ids": [5, 6, 7]}, unread(one))
            done: dict[str, CompletionOutput] = {}
            calls.append(0)
            while engine.has_unfinished_requests():
                done |= {output.request_id: output.outputs[0] for output in engine.step()}
                calls[-1] += 1
            found.append([done[str(nth)] for nth in range(3)])
            num_steps = engine.stats().num_steps - before.num_steps
            assert num_steps == max(len(answer.token_ids) for answer in found[-1])
        streamed = [list(engine.stream({"prompt_token_ids": [5, 6, 7]}, one))[-1].outputs[0] for one in asked]
        assert engine.stats().eager_steps == 0
    assert found[0] == found[1] == streamed
    assert [one.finish_reason for one in streamed] == ["stop"] * 3
    assert calls == [num_steps, 1 + -(-(num_steps - 1) // 16)]
