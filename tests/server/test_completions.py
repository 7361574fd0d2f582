"""POST /v1/completions by OpenAI's own client: what comes over HTTP is what the engine says."""

from itertools import pairwise
from typing import Any

import httpx
import pytest

from d3engine import SamplingParams

ASKED: dict[str, Any] = {"model": "demo", "max_tokens": 40}


def test_a_whole_answer_is_the_engines(openai: Any, demo: Any, question: str) -> None:
    answer = openai.completions.create(**ASKED, prompt=question)
    (expected,) = demo.generate(question, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, expected.outputs[0].text, "stop")
    assert answer.object == "text_completion"
    assert answer.model == "demo"
    assert answer.id.startswith("cmpl-")
    prompt, new = len(expected.prompt_token_ids), len(expected.outputs[0].token_ids)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, new)
    assert answer.usage.total_tokens == prompt + new


def test_a_prompt_that_was_there_before_is_counted_as_cached(openai: Any, question: str) -> None:
    for _ in range(2):
        answer = openai.completions.create(**ASKED, prompt=question + " and")
    details = answer.usage.prompt_tokens_details
    assert 0 < details.cached_tokens < answer.usage.prompt_tokens


def test_prompts_may_be_texts_or_token_ids_one_or_several(openai: Any, demo: Any) -> None:
    texts = ["Question: Ann has 4 cups. Ann buys 5.", "Tom"]
    ids = [demo.get_tokenizer().encode(text) for text in texts]
    alone = [openai.completions.create(**ASKED, prompt=text).choices[0].text for text in texts]
    assert alone[0] != alone[1]
    several: list[Any] = [texts, ids]
    for prompts in several:
        answer = openai.completions.create(**ASKED, prompt=prompts)
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert [choice.text for choice in answer.choices] == alone
    assert openai.completions.create(**ASKED, prompt=ids[1]).choices[0].text == alone[1]
    assert answer.usage.prompt_tokens == sum(map(len, ids))


def test_several_answers_to_several_prompts_stand_in_their_order(openai: Any, demo: Any) -> None:
    prompts = ["Tom has", "Ann has"]
    sampled: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 7, "max_tokens": 12}
    answer = openai.completions.create(model="demo", prompt=prompts, **sampled)
    expected = demo.generate(prompts, SamplingParams(**sampled), use_tqdm=False)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == [o.text for output in expected for o in output.outputs]
    assert len({choice.text for choice in answer.choices}) > 2


def test_best_of_returns_the_likeliest_answers(openai: Any, demo: Any) -> None:
    """The best of several answers are those whose tokens are likeliest."""
    sampled: dict[str, Any] = {"temperature": 1.5, "seed": 3, "max_tokens": 12}
    answer = openai.completions.create(model="demo", prompt="Tom has", n=2, best_of=6, **sampled)
    (all_six,) = demo.generate("Tom has", SamplingParams(n=6, logprobs=0, **sampled), use_tqdm=False)
    ranked = sorted(all_six.outputs, key=lambda o: -(o.cumulative_logprob or 0) / len(o.token_ids))
    assert [choice.text for choice in answer.choices] == [output.text for output in ranked[:2]]
    assert [choice.logprobs for choice in answer.choices] == [None, None]
    assert answer.usage.completion_tokens == sum(len(output.token_ids) for output in all_six.outputs)


def test_a_stop_string_ends_the_answer_before_it(openai: Any, question: str) -> None:
    whole = openai.completions.create(**ASKED, prompt=question).choices[0].text
    stopped = openai.completions.create(**ASKED, prompt=question, stop=["####", "never"]).choices[0]
    assert stopped.text == whole[: whole.index("####")]
    assert stopped.finish_reason == "stop"
    shown = {"include_stop_str_in_output": True}
    kept = openai.completions.create(**ASKED, prompt=question, stop="##", extra_body=shown)
    assert kept.choices[0].text == whole[: whole.index("##") + 2]


def test_completion_without_max_tokens_ends_at_sixteen(openai: Any, question: str) -> None:
    """Without `max_tokens` an answer has sixteen tokens, and its finish reason is the length."""
    answer = openai.completions.create(model="demo", prompt=question)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 16


def test_engine_parameters_reach_the_engine_under_vllms_names(openai: Any, demo: Any, question: str) -> None:
    extra: dict[str, Any] = {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.2, "min_tokens": 30, "ignore_eos": True}
    extra |= {"stop_token_ids": [700], "bad_words": ["Adding"], "skip_special_tokens": False}
    plain: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "seed": 11, "max_tokens": 40, "presence_penalty": 0.2}
    plain |= {"frequency_penalty": 0.1, "logit_bias": {"300": -5.0}}
    answer = openai.completions.create(model="demo", prompt=question, **plain, extra_body=extra)
    (expected,) = demo.generate(question, SamplingParams(**plain, **extra), use_tqdm=False)
    assert answer.choices[0].text == expected.outputs[0].text
    without = openai.completions.create(model="demo", prompt=question, **plain)
    assert without.choices[0].text != answer.choices[0].text


def test_a_text_without_special_tokens_is_encoded_as_it_is(openai: Any, demo: Any) -> None:
    extra = {"add_special_tokens": False, "return_token_ids": True}
    answer = openai.completions.create(**ASKED, prompt="Tom", extra_body=extra)
    bare = demo.get_tokenizer().encode("Tom", add_special_tokens=False)
    assert answer.choices[0].model_extra["prompt_token_ids"] == bare
    assert answer.usage.prompt_tokens == len(bare)


# -- log-probabilities and echo --------------------------------------------------------------------------------------


def test_completion_logprobs_are_the_engines_with_offsets(openai: Any, demo: Any, question: str) -> None:
    """Log-probabilities are the engine's, and their offsets lead to the tokens."""
    choice = openai.completions.create(**ASKED, prompt=question, logprobs=3).choices[0]
    (expected,) = demo.generate(question, SamplingParams(temperature=0, max_tokens=40, logprobs=3), use_tqdm=False)
    found, output = choice.logprobs, expected.outputs[0]
    rows = list(zip(output.token_ids, output.logprobs, strict=True))
    assert found.token_logprobs == [row[token].logprob for token, row in rows]
    assert found.tokens == [row[token].decoded_token for token, row in rows]
    for top, (_, row) in zip(found.top_logprobs or [], rows, strict=True):
        assert max(top.values()) == max(known.logprob for known in row.values())
        assert len(top) <= 4
    text = choice.text
    offsets = [*(found.text_offset or []), len(text)]
    shown = [text[begin:end] for begin, end in pairwise(offsets)]
    assert shown == [*(found.tokens or [])[:-1], ""]  # the last is the end of the text, which is not shown
    assert offsets[0] == 0


def test_echoed_prompt_has_its_own_logprobs(openai: Any, demo: Any, question: str) -> None:
    """An echoed prompt stands before the answer with its own log-probabilities."""
    plain = openai.completions.create(**ASKED, prompt=question).choices[0]
    choice = openai.completions.create(**ASKED, prompt=question, echo=True, logprobs=1).choices[0]
    assert choice.text == question + plain.text
    (known,) = demo.generate(question, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1), use_tqdm=False)
    rows = list(zip(known.prompt_token_ids, known.prompt_logprobs, strict=True))
    expected = [None if row is None else row[token].logprob for token, row in rows]
    found = choice.logprobs
    assert (found.token_logprobs or [])[: len(rows)] == expected
    assert expected[0] is None
    assert found.tokens[0] == "<s>"
    ends = [*found.text_offset[1:], len(choice.text)]
    for token, begin, end in zip(found.tokens, found.text_offset, ends, strict=True):
        assert token in ("<s>", "</s>") or choice.text[begin:end] == token


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_the_harness_scores_prompts_by_echo_as_the_engine_does(http: httpx.Client, demo: Any, max_tokens: int) -> None:
    """lm-evaluation-harness's own reading of the answer, of prompts as token ids."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    tokenizer = demo.get_tokenizer()
    pairs = [("Tom has 5 pens.", " Tom finds 3"), ("Ann has 4 cups.", " zebra"), ("Adding 3 makes 5 + 3 =", " 8")]
    prompts = [tokenizer.encode(context) for context, _ in pairs]
    whole = [
        ids + tokenizer.encode(end, add_special_tokens=False) for ids, (_, end) in zip(prompts, pairs, strict=True)
    ]
    body = {"model": "demo", "prompt": whole, "temperature": 0, "max_tokens": max_tokens, "logprobs": 1, "seed": 1}
    answer = http.post("/v1/completions", json={**body, "echo": True}).json()
    if max_tokens == 0:
        assert answer["usage"]["completion_tokens"] == 0
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
        for choice in answer["choices"]:  # the harness leaves out the last token, which it takes to be new
            choice["logprobs"]["token_logprobs"].append(0.0)
            choice["logprobs"]["top_logprobs"].append({"": 0.0})
    found = LocalCompletionsAPI.parse_logprobs(answer, ctxlens=[len(ids) for ids in prompts])
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    for ids, length, (total, is_greedy), output in zip(
        whole, map(len, prompts), found, demo.generate(whole, params, use_tqdm=False), strict=True
    ):
        rows = [row for row in (output.prompt_logprobs or [])[length:] if row is not None]
        assert total == pytest.approx(sum(row[token].logprob for token, row in zip(ids[length:], rows, strict=True)))
        assert is_greedy == all(row[token].rank == 1 for token, row in zip(ids[length:], rows, strict=True))


def test_prompt_logprobs_and_token_ids_have_vllms_names(openai: Any, demo: Any) -> None:
    """Log-probabilities and token ids of a prompt come under vLLM's names."""
    extra = {"prompt_logprobs": 2, "return_token_ids": True}
    choice = openai.completions.create(**ASKED, prompt="Tom has 5 pens.", extra_body=extra).choices[0]
    params = SamplingParams(temperature=0, max_tokens=40, prompt_logprobs=2)
    (expected,) = demo.generate("Tom has 5 pens.", params, use_tqdm=False)
    assert choice.model_extra["token_ids"] == expected.outputs[0].token_ids
    assert choice.model_extra["prompt_token_ids"] == expected.prompt_token_ids
    first, *rows = choice.model_extra["prompt_logprobs"]
    assert first is None
    for row, known in zip(rows, (expected.prompt_logprobs or [])[1:], strict=True):
        assert {int(token): value["logprob"] for token, value in row.items()} == {
            token: logprob.logprob for token, logprob in known.items()
        }


def test_tokens_may_be_named_by_their_ids(openai: Any) -> None:
    extra = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = openai.completions.create(**ASKED, prompt="Tom", logprobs=2, extra_body=extra).choices[0]
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in choice.model_extra["token_ids"]]
