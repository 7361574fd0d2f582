"""What vLLM's users write in SamplingParams means here what it means there."""

import math
from dataclasses import replace
from typing import Any

import pytest
from bad_values import assert_refused
from batches import BLOCK, LAYERS, MAX_LENGTH, VOCABULARY, block_bytes
from fixture_types import MakeEngine

from d3engine import D3, EarlyExit, Engine, FullDepth, InvalidValueError, SamplingParams, SelfSpeculative
from d3engine.depth import DepthPolicy
from d3engine.request.params import BOUNDS

PROMPT = list(range(40, 50))
POLICIES = [FullDepth(), D3(0.9, 0.5), EarlyExit(0.02), SelfSpeculative(D3(0.9, 0.5))]


def answer(engine: Engine, **params: Any) -> Any:
    return engine.generate(PROMPT, SamplingParams(**params), use_tqdm=False)[0].outputs[0]


@pytest.mark.parametrize("field", ["top_k", "seed"])
def test_minus_one_says_no_limit_and_no_seed(field: str) -> None:
    assert SamplingParams(**{field: -1}) == SamplingParams()


@pytest.mark.parametrize("name", BOUNDS)
def test_a_default_which_nothing_checks_is_within_its_bounds(name: str) -> None:
    default = getattr(SamplingParams, name)
    if default is not None:
        BOUNDS[name].check(name, default)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_answer_without_max_tokens_runs_to_the_models_length(make_engine: MakeEngine, policy: DepthPolicy) -> None:
    """Without `max_tokens` an answer goes on to the end of the model's length."""
    engine = make_engine(depth=policy)
    room = MAX_LENGTH - len(PROMPT)
    free = answer(engine, temperature=0, max_tokens=None, ignore_eos=True)
    assert (len(free.token_ids), free.finish_reason) == (room, "length")
    assert free == answer(engine, temperature=0, max_tokens=room, ignore_eos=True)


def test_answer_cut_by_the_models_length_ends_by_length(make_engine: MakeEngine) -> None:
    """An answer that the model's length cuts before `max_tokens` ends by length."""
    room = MAX_LENGTH - len(PROMPT)
    cut = answer(make_engine(), temperature=0, max_tokens=room + 100, ignore_eos=True)
    assert (len(cut.token_ids), cut.finish_reason, cut.stop_reason) == (room, "length", None)


@pytest.mark.parametrize("policy", [FullDepth(), D3(0.9, 0.5)], ids=repr)
def test_answer_without_max_tokens_runs_to_a_small_caches_end(make_engine: MakeEngine, policy: DepthPolicy) -> None:
    """Without `max_tokens` an answer goes on to the end of a small cache."""
    # As far as one that names that number of tokens may go, and not a token further.
    entries = 20
    blocks = LAYERS * -(-entries // BLOCK)
    engine = make_engine(depth=policy, kv_cache_memory_bytes=blocks * block_bytes())
    free = answer(engine, temperature=0, max_tokens=None, ignore_eos=True)
    reached = len(free.token_ids)
    assert reached > entries - len(PROMPT) + (0 if policy == FullDepth() else BLOCK)  # the last one is never fed
    assert free.finish_reason == "length"
    assert free == answer(engine, temperature=0, max_tokens=reached, ignore_eos=True)
    with pytest.raises(InvalidValueError, match="low enough for the KV cache"):
        answer(engine, temperature=0, max_tokens=reached + 1)


def test_prompts_share_blocks_with_those_of_their_salt_alone(make_engine: MakeEngine) -> None:
    """Prompts share their blocks with those of the same salt alone."""
    engine, cached = make_engine(), []
    for salt in (None, "a", "b", "a", None):
        params = SamplingParams(temperature=0, max_tokens=3, cache_salt=salt)
        cached.append(engine.generate(PROMPT, params, use_tqdm=False)[0])
    assert [output.num_cached_tokens for output in cached] == [0, 0, 0, 8, 8]
    assert len({tuple(output.outputs[0].token_ids) for output in cached}) == 1


def test_min_tokens_may_exceed_the_room_without_max_tokens(make_engine: MakeEngine) -> None:
    """`min_tokens` may ask for more than there is room for where `max_tokens` is open."""
    found = answer(make_engine(), temperature=0, max_tokens=None, min_tokens=1000)
    assert (len(found.token_ids), found.finish_reason) == (MAX_LENGTH - len(PROMPT), "length")


@pytest.mark.parametrize("policy", [POLICIES[0], POLICIES[3]], ids=repr)
def test_logprobs_of_minus_one_are_of_the_whole_vocabulary(make_engine: MakeEngine, policy: DepthPolicy) -> None:
    engine = make_engine(depth=policy)
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=-1, prompt_logprobs=-1)
    output = engine.generate(PROMPT, params, use_tqdm=False)[0]
    assert output.prompt_logprobs is not None
    rows = [*output.prompt_logprobs[1:], *(output.outputs[0].logprobs or [])]
    assert len(rows) == len(PROMPT) - 1 + 4
    for row in rows:
        assert row is not None
        assert set(row) == set(range(VOCABULARY))
        assert math.isclose(sum(math.exp(entry.logprob) for entry in row.values()), 1.0, rel_tol=1e-5)
        assert sorted(entry.rank for entry in row.values()) == list(range(1, VOCABULARY + 1))


def test_token_ids_of_logit_bias_may_be_written_as_strings(make_engine: MakeEngine) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logit_bias={"17": 100.0, "4": -1})
    assert params == SamplingParams(temperature=0, max_tokens=3, logit_bias={17: 100.0, 4: -1})
    assert make_engine().generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids == [17, 17, 17]


@pytest.mark.parametrize("temperature", [0, 1e-6])
def test_several_greedy_answers_are_refused(temperature: float) -> None:
    with assert_refused("n", "temperature"):
        SamplingParams(n=2, temperature=temperature)
    assert SamplingParams(n=2, temperature=0.1).n == 2


def test_a_clone_is_equal_and_another_object() -> None:
    params = SamplingParams(temperature=0.5, stop=["a"], logit_bias={3: 1.0}, depth=D3(0.9, 0.5))
    clone = params.clone()
    assert clone == params
    assert clone is not params


def test_stop_strings_need_text() -> None:
    with assert_refused("stop", "detokenize"):
        SamplingParams(stop="a", detokenize=False)


def test_include_stop_str_in_output_shows_a_stop_token_too() -> None:
    with Engine("demo", device="cpu", kv_cache_memory_bytes=2**24) as engine:
        prompt, params = "Question: Tom has", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        whole = engine.generate(prompt, params, use_tqdm=False)[0].outputs[0]
        place = next(n for n in range(2, 12) if whole.token_ids[n] not in whole.token_ids[:n])
        stopping = replace(params, stop_token_ids=[whole.token_ids[place]])
        hidden, shown, by_text = (
            engine.generate(prompt, each, use_tqdm=False)[0].outputs[0]
            for each in (
                stopping,
                replace(stopping, include_stop_str_in_output=True),
                replace(stopping, include_stop_str_in_output=True, stop=whole.text),
            )
        )
        up_to = engine.generate(prompt, replace(params, max_tokens=place + 1), use_tqdm=False)[0].outputs[0]
    assert hidden.token_ids == shown.token_ids == up_to.token_ids
    assert (shown.text, shown.finish_reason, shown.stop_reason) == (up_to.text, "stop", whole.token_ids[place])
    assert hidden.text == shown.text.removesuffix(shown.text[len(hidden.text) :])
    assert len(hidden.text) < len(shown.text)
    assert by_text.stop_reason == whole.token_ids[place]


def test_end_of_sequence_is_hidden_unless_specials_are_shown() -> None:
    """An end of sequence is special, and hidden unless special tokens are shown."""
    with Engine("demo", device="cpu", kv_cache_memory_bytes=2**24) as engine:
        assert engine.tokenizer is not None
        eos = engine.tokenizer.eos_token_id
        assert eos is not None
        params = SamplingParams(temperature=0, allowed_token_ids=[eos], include_stop_str_in_output=True)
        kinds = [params, replace(params, skip_special_tokens=False)]
        texts = [output.outputs[0].text for output in engine.generate(["a", "a"], kinds, use_tqdm=False)]
        assert texts == ["", engine.tokenizer.special_tokens["eos_token"]]


def test_prompt_and_answer_are_the_whole_text() -> None:
    with Engine("demo", device="cpu", kv_cache_memory_bytes=2**24) as engine:
        assert engine.tokenizer is not None
        output = engine.generate("Question: Tom has", SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)[0]
        ids = output.prompt_token_ids + output.outputs[0].token_ids
        assert "Question: Tom has" + output.outputs[0].text == engine.tokenizer.decode(ids)
