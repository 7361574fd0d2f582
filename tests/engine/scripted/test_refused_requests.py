"""A request that cannot run is refused by name, and the engine is as before."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fixture_types import MakeEngine
from scripted import VOCABULARY, greedy
from stepping import finish

from d3engine import Engine, InvalidValueError, SamplingParams


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], r"prompt must be .*at least one token"),
        ({"prompt_token_ids": []}, r"prompt must be .*at least one token"),
        (list(range(64)), r"prompt must be .*shorter than max_model_len=64.*; got '64 tokens'"),
        ({"prompt_token_ids": [5] * 500}, r"prompt must be .*shorter than max_model_len=64.*; got '500 tokens'"),
        ("word " * 200, r"prompt must be shorter than max_model_len=64"),
        ([1, VOCABULARY], r"prompt_token_ids must be .*ids from 0 to 799, the rows of the embedding.*; got 800"),
        ([1, -1], r"prompt_token_ids must be .*ids from 0 to 799.*; got -1"),
        ([1, 2**40], r"prompt_token_ids must be .*; got 1099511627776"),
        ([1, 2.0], r"prompt_token_ids must be .*; got 2.0"),
        ([1, True], r"prompt_token_ids must be .*; got True"),
        ([1, "2"], r"prompt_token_ids must be .*; got '2'"),
        ([1, None], r"prompt_token_ids must be .*; got None"),
        ([1, [2]], r"prompt_token_ids must be .*; got \[2\]"),
        (7, r"prompt must be a text, a list of token ids, or a mapping.*; got 7"),
        (None, r"prompt must be .*; got None"),
        (np.array([[1, 2]]), r"prompt must be an array of one dimension"),
        ({"text": "a"}, r'prompt must be .*one of the keys "prompt" and "prompt_token_ids"; got'),
        ({}, r"prompt must be .*; got \{\}"),
        ({"prompt": "a", "prompt_token_ids": [1]}, r"prompt must be .*one of the keys"),
        ({"prompt": "a", "multi_modal_data": {}}, r"prompt must be .*one of the keys"),
        ({"prompt": [1, 2]}, r"prompt must be a text.*; got \[1, 2\]"),
        ({"prompt_token_ids": "12"}, r"prompt_token_ids must be .*a list of token ids.*; got '12'"),
        ({"prompt_token_ids": 12}, r"prompt_token_ids must be .*; got 12"),
        ("\ud800", "lone surrogates"),
    ],
)
def test_prompt_that_cannot_run_is_refused_without_a_trace(engine: Engine, prompt: Any, message: str) -> None:
    """A prompt that cannot run is refused and the engine is as before."""
    with pytest.raises(InvalidValueError, match=message):
        engine.add_request("bad", prompt, greedy())
    with pytest.raises(InvalidValueError, match=message):
        engine.stream(prompt, greedy())
    with pytest.raises(InvalidValueError, match=message):
        engine.generate(["good", prompt], greedy(), use_tqdm=False)
    assert engine.get_num_unfinished_requests() == engine.stats().num_waiting == 0
    assert engine.generate("good", greedy(2), use_tqdm=False)[0].finished


def test_ids_unknown_to_the_tokenizer_with_rows_are_taken(engine: Engine) -> None:
    """Ids of embedding rows that the tokenizer does not know are taken."""
    assert engine.tokenizer is not None
    assert engine.tokenizer.vocab_size < VOCABULARY
    output = engine.generate([VOCABULARY - 1], greedy(2), use_tqdm=False)[0]
    assert output.prompt_token_ids == [VOCABULARY - 1]
    assert len(output.outputs[0].token_ids) == 2


def test_the_longest_prompt_leaves_room_for_one_token(engine: Engine) -> None:
    output = engine.generate([5] * 63, greedy(50), use_tqdm=False)[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (1, "length")


def test_an_empty_text_is_its_bos(engine: Engine) -> None:
    assert engine.generate("", greedy(1), use_tqdm=False)[0].prompt_token_ids == [1]


def test_no_prompts_give_no_outputs(engine: Engine) -> None:
    assert engine.generate([], greedy(), use_tqdm=False) == []


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("stop_token_ids", {"stop_token_ids": [VOCABULARY]}),
        ("allowed_token_ids", {"allowed_token_ids": [1, VOCABULARY]}),
        ("logit_bias", {"logit_bias": {VOCABULARY: 1.0}}),
    ],
)
def test_token_ids_in_parameters_are_those_of_the_model(engine: Engine, field: str, params: dict[str, Any]) -> None:
    with pytest.raises(InvalidValueError, match=f"{field} must be .*rows of the embedding; got 800"):
        engine.add_request("a", "text", greedy(**params))
    assert not engine.has_unfinished_requests()


def test_text_features_are_refused_by_name_without_a_tokenizer(make_engine: MakeEngine) -> None:
    engine = make_engine(skip_tokenizer_init=True, tokenizer=None)
    for prompt, params, message in (
        ("text", greedy(), r"prompt must be .*no tokenizer.*; got 'text'"),
        ([1], greedy(stop="x"), "stop must be None, .*no tokenizer; got 'x'"),
        ([1], greedy(bad_words=["x"]), "bad_words must be None, .*no tokenizer"),
    ):
        with pytest.raises(InvalidValueError, match=message):
            engine.add_request("a", prompt, params)
    output = engine.generate([1], greedy(3), use_tqdm=False)[0]
    assert (output.outputs[0].token_ids, output.outputs[0].text) == ([100, 101, 102], "")


def test_a_request_id_is_a_text_that_no_unfinished_request_has(engine: Engine) -> None:
    engine.add_request("a", "one", greedy(2))
    with pytest.raises(InvalidValueError, match=r"request_id must be .*no unfinished request.*; got 'a'"):
        engine.add_request("a", "two", greedy())
    for bad in ("", 5, None):
        with pytest.raises(InvalidValueError, match=r"request_id must be "):
            engine.add_request(bad, "three", greedy())  # type: ignore[arg-type]
    assert list(finish(engine)) == ["a"]
    engine.add_request("a", "again", greedy(1))
    assert finish(engine)["a"].prompt == "again"


def test_parameters_are_one_for_all_or_one_each(engine: Engine) -> None:
    with pytest.raises(InvalidValueError, match=r"sampling_params must be .*one, or 2.*; got '3 of them'"):
        engine.generate(["a", "b"], [greedy()] * 3, use_tqdm=False)
    with pytest.raises(InvalidValueError, match=r"sampling_params must be .*SamplingParams"):
        engine.generate(["a"], [{"max_tokens": 5}], use_tqdm=False)  # type: ignore[list-item]
    with pytest.raises(InvalidValueError, match=r"priority must be .*an integer.*; got 1\.5"):
        engine.add_request("x", "a", greedy(), priority=1.5)  # type: ignore[arg-type]
    assert not engine.has_unfinished_requests()
    outputs = engine.generate(["a", "b"], [greedy(1), greedy(3)], use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 3]


@pytest.mark.parametrize(
    "call", ["generate 5", "generate None", "generate bytes", "add bytes", "params 5", "add-params {}"]
)
def test_value_of_a_wrong_type_is_refused_by_name(engine: Engine, call: str) -> None:
    """A value of a type that is never allowed is refused by name."""
    wrong: Any = {"5": 5, "None": None, "bytes": b"ab", "{}": {}}[call.split()[1]]
    calls: dict[str, Callable[[], object]] = {
        "generate": lambda: engine.generate(wrong, greedy(), use_tqdm=False),
        "add": lambda: engine.add_request("a", wrong, greedy()),
        "params": lambda: engine.generate("a", wrong, use_tqdm=False),
        "add-params": lambda: engine.add_request("a", "text", wrong),
    }
    with pytest.raises(InvalidValueError):
        calls[call.split()[0]]()


def test_enormous_top_k_is_refused_and_the_largest_keeps_all(engine: Engine) -> None:
    """An enormous top k is refused and the largest keeps all tokens."""
    with pytest.raises(InvalidValueError, match=r"top_k must be .*from -1 to 2147483647"):
        SamplingParams(top_k=2**70)
    largest = SamplingParams(top_k=2**31 - 1, max_tokens=2)
    assert len(engine.generate("a", largest, use_tqdm=False)[0].outputs[0].token_ids) == 2
