"""Whatever a caller does with what he holds, his neighbours' requests go on as if he had not."""

import copy
import json
import math
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixture_types import MakeEngine, MakeLlama
from stepping import finish, greedy

import d3engine
from d3engine import CompletionOutput, Engine, FullDepth, InvalidValueError, SamplingParams
from d3engine.errors import TokenizerError

DEMO = Path(d3engine.__file__).parent / "demo_model"
PROMPT = [11, 12, 13]


@pytest.fixture
def demo_copy(tmp_path: Path) -> Callable[..., Path]:
    """`demo_copy(config={...}, tokenizer_config={...})`: the demo's directory with these fields changed."""

    def make(**changes: dict[str, Any]) -> Path:
        for name in ("config.json", "model.safetensors", "tokenizer.model", "tokenizer_config.json"):
            shutil.copy(DEMO / name, tmp_path)
        for name, fields in changes.items():
            path = tmp_path / f"{name}.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | fields))
        return tmp_path

    return make


# -- what a caller keeps in his hands --------------------------------------------------------------------------------


def test_lists_changed_after_add_request_change_nothing(make_engine: MakeEngine) -> None:
    """Lists and mappings changed after add request change nothing."""
    given: dict[str, Any] = {"logit_bias": {5: 1.0}, "stop_token_ids": [299], "allowed_token_ids": [*range(290)]}

    def answers(spoil: bool) -> list[list[int]]:
        mine = copy.deepcopy(given)
        prompt = list(PROMPT)
        engine = make_engine()
        engine.add_request("innocent", [1, 2], greedy(12))
        engine.add_request("changed", prompt, greedy(min_tokens=4, **mine))
        engine.step()
        if spoil:
            mine["logit_bias"][10**6] = 3.0
            mine["stop_token_ids"].append(10**6)
            mine["allowed_token_ids"][:] = [10**6]
            prompt += [10**6] * 100
        last = finish(engine)
        return [last[name].outputs[0].token_ids for name in ("innocent", "changed")]

    assert answers(spoil=True) == answers(spoil=False)


def test_sampling_params_are_frozen_copied_hashed_and_pickled() -> None:
    """What parameters hold cannot be changed but copied, compared, hashed and pickled."""
    given: dict[str, Any] = {"logit_bias": {5: 1.0}, "stop": ["a"], "stop_token_ids": [1], "allowed_token_ids": [2]}
    params = SamplingParams(**given)
    assert isinstance(params.logit_bias, dict)
    for change in (
        lambda bias: bias.update({6: 1.0}),
        lambda bias: bias.__setitem__(6, 1.0),
        lambda bias: bias.__ior__({6: 1.0}),
        lambda bias: bias.setdefault(6, 1.0),
        lambda bias: bias.pop(5),
        lambda bias: bias.popitem(),
        lambda bias: bias.clear(),
        lambda bias: bias.__delitem__(5),
    ):
        with pytest.raises(TypeError, match="cannot be changed"):
            change(params.logit_bias)
    for other in (SamplingParams(**given), copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert other == params
        assert hash(other) == hash(params)
        with pytest.raises(TypeError, match="cannot be changed"):
            other.logit_bias[6] = 1.0


def test_outputs_changed_by_a_reader_leave_the_engine_alone(make_engine: MakeEngine) -> None:
    """What a reader does to an output does not reach the engine."""
    params = greedy(20, prompt_logprobs=1, logprobs=1)
    want = make_engine().generate(PROMPT, params, use_tqdm=False)[0]
    last = None
    for last in make_engine().stream(PROMPT, params):
        assert last.prompt_token_ids == PROMPT
        assert last.prompt_logprobs == want.prompt_logprobs
        completion = last.outputs[0]
        seen = list(completion.token_ids)
        assert completion.logprobs is not None
        assert last.prompt_logprobs is not None
        last.prompt_token_ids.extend(completion.token_ids)
        for mine in (last.prompt_logprobs, completion.token_ids, completion.logprobs, completion.depths):
            mine.clear()
    assert last is not None
    assert seen == want.outputs[0].token_ids
    assert last.outputs[0].finish_reason == "length"


# -- ids beyond the embedding's rows ---------------------------------------------------------------------------------


def test_end_token_without_a_row_ends_nothing(demo_copy: Callable[..., Path]) -> None:
    """An end token without a row in the embedding ends no answer."""
    own_eos = {"added_tokens_decoder": {"768": {"content": "<|end|>", "special": True}}, "eos_token": "<|end|>"}
    directory = demo_copy(config={"eos_token_id": [2, 100_000]}, tokenizer_config=own_eos)
    params = SamplingParams(temperature=0, max_tokens=5, min_tokens=1)
    assert Engine(directory, depth=FullDepth()).generate("Question:", params, use_tqdm=False)[0].outputs == (
        Engine("demo", depth=FullDepth()).generate("Question:", params, use_tqdm=False)[0].outputs
    )


def test_bad_word_without_rows_is_never_completed_anyway(demo_copy: Callable[..., Path]) -> None:
    """A bad word without rows in the embedding is never completed anyway."""
    tokens = {"768": {"content": "<|pad|>", "special": True}}
    engine = Engine(demo_copy(tokenizer_config={"added_tokens_decoder": tokens}), depth=FullDepth())
    params = SamplingParams(temperature=0, max_tokens=5)
    with_word = replace(params, bad_words=["<|pad|>", "5<|pad|>"])
    plain, watched = engine.generate(["Question:"] * 2, [params, with_word], use_tqdm=False)
    assert watched.outputs == plain.outputs


# -- the tokenizer's own library -------------------------------------------------------------------------------------

TWO_SPACES = 767
"""The id that the decoder of `panicking` cannot decode: it strips more from the text than there is."""


@pytest.fixture
def panicking(demo_copy: Callable[..., Path]) -> Engine:
    """An engine whose tokenizer.json makes the library panic: in decoding one id, and in encoding a run of x."""
    vocabulary = {f"w{i}": i for i in range(TWO_SPACES)} | {"  ": TWO_SPACES}
    catastrophic = {"type": "Split", "pattern": {"Regex": "(x+x+)+y|w"}, "behavior": "MergedWithNext", "invert": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, catastrophic]},
        "decoder": {"type": "Strip", "content": " ", "start": 0, "stop": 4},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"},
    }
    directory = demo_copy(tokenizer_config={"eos_token": "w2", "bos_token": "w1", "unk_token": "w0"})
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return Engine(directory, depth=FullDepth())


@pytest.mark.parametrize("asks", [{}, {"logprobs": 0}])
def test_token_that_makes_the_tokenizer_panic_ends_its_request(panicking: Engine, asks: dict[str, Any]) -> None:
    """A token that makes the tokenizer panic ends its own request alone."""
    neighbour = [[5, 6], greedy(12)]
    want = panicking.generate(*neighbour, use_tqdm=False)[0].outputs
    spoiled = greedy(4, logit_bias={TWO_SPACES: 100.0}, **asks)
    panicking.add_request("neighbour", *neighbour)
    panicking.add_request("spoiled", [5], spoiled)
    last = finish(panicking)
    assert last["neighbour"].outputs == want
    assert last["spoiled"].outputs[0].finish_reason == "abort"
    assert "TokenizerError: the tokenizer failed: " in str(last["spoiled"].outputs[0].stop_reason)


def test_ids_that_make_the_tokenizer_panic_queue_nothing(panicking: Engine) -> None:
    """Token ids before the answer that make the tokenizer panic queue nothing."""
    panicking.add_request("neighbour", "w5", greedy(3))
    with pytest.raises(TokenizerError, match="the tokenizer failed: "):
        panicking.generate([[6], [5, TWO_SPACES, 5]], greedy(), use_tqdm=False)
    assert finish(panicking).keys() == {"neighbour"}


@pytest.mark.parametrize("field", ["prompt", "bad_words"])
def test_text_that_makes_the_tokenizer_panic_is_refused(panicking: Engine, field: str) -> None:
    """A text that makes the tokenizer panic is refused by its field."""
    panicking.add_request("neighbour", "w5", greedy(3))
    text = "x" * 40
    prompt, params = (text, greedy()) if field == "prompt" else ("w5", greedy(bad_words=[text]))
    with pytest.raises(InvalidValueError, match=f"{field} must be a text that the model's tokenizer .* got 'x+'"):
        panicking.generate(["w6", prompt], params, use_tqdm=False)
    assert finish(panicking).keys() == {"neighbour"}


def test_a_bad_word_that_is_no_text_is_refused_as_a_bad_word(panicking: Engine) -> None:
    with pytest.raises(InvalidValueError, match=r"bad_words must be text without lone surrogates; got '.ud800'"):
        panicking.generate("w5", greedy(bad_words=["\ud800"]), use_tqdm=False)


# -- prompts as arrays -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("array", [np.array, torch.tensor])
def test_token_ids_may_be_arrays(make_engine: MakeEngine, array: Callable[[Any], Any]) -> None:
    engine = make_engine()
    lists = [[11, 12, 13], [14, 15, 16]]
    want = [output.outputs for output in engine.generate(lists, greedy(4), use_tqdm=False)]
    given: list[Any] = [
        [array(ids) for ids in lists],
        array(lists),
        [{"prompt_token_ids": array(ids)} for ids in lists],
        [[array(token) for token in ids] for ids in lists],
    ]
    for prompts in given:
        outputs = engine.generate(prompts, greedy(4), use_tqdm=False)
        assert [output.outputs for output in outputs] == want
        assert [output.prompt_token_ids for output in outputs] == lists
        assert type(outputs[0].prompt_token_ids[0]) is int
    assert engine.generate(array(lists[0]), greedy(4), use_tqdm=False)[0].outputs == want[0]
    assert [output.outputs for output in engine.stream(array(lists[1]), greedy(4))][-1] == want[1]


@pytest.mark.parametrize("array", [np.array, torch.tensor])
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[11, 12]], r"prompt must be an array of one dimension.*got 'an array of shape \(1, 2\)'"),
        ([11.0, 12.0], r"prompt_token_ids must be ids from 0 to 299.*got 11\.0"),
        ([True, False], "prompt_token_ids must be ids from 0 to 299.*got True"),
        ([11, 300], "prompt_token_ids must be ids from 0 to 299.*got 300"),
    ],
)
def test_arrays_that_are_no_token_ids_are_refused_by_name(
    make_engine: MakeEngine, array: Callable[[Any], Any], ids: Any, message: str
) -> None:
    engine = make_engine()
    with pytest.raises(InvalidValueError, match=message):
        engine.generate([array(ids), [1]], greedy(), use_tqdm=False)
    with pytest.raises(InvalidValueError, match="prompt_token_ids must be ids from 0 to 299"):
        engine.generate([[array(11), array(12.5)]], greedy(), use_tqdm=False)
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("sizes", [{"intermediate_size": 172}, {"hidden_size": 200}, {"head_dim": 20}])
def test_bfloat16_request_with_nan_states_ends_alone(tiny_llama: MakeLlama, sizes: dict[str, int]) -> None:
    """In bfloat16 a request whose states are not numbers ends alone."""
    poison = 299

    def answers(spoil: bool) -> list[CompletionOutput]:
        engine = Engine(
            tiny_llama(**sizes).directory, dtype="bfloat16", device="cpu", depth=FullDepth(), skip_tokenizer_init=True
        )
        if spoil:
            engine.executor.model.weights.embedding[poison] = math.nan  # type: ignore[attr-defined]
        for name, token in enumerate([1, poison, 2, poison, 3]):
            engine.add_request(str(name), [token] * 9, greedy(1))
        last = finish(engine)
        return [last[str(name)].outputs[0] for name in range(5)]

    healthy, spoilt = answers(spoil=False), answers(spoil=True)
    assert [answer.finish_reason for answer in spoilt] == ["length", "abort", "length", "abort", "length"]
    assert spoilt[::2] == healthy[::2]
