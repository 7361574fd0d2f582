"""What is not allowed is refused by name; a request's fault ends that request alone, an engine's fault the engine.

The model is scripted: an executor that makes each request say what the test wants, so that text, stops and faults are
exact. Scheduler, cache, sampler, tokenizer and the engine around them are the real ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import d3engine
from d3engine import D3, Engine, EngineDeadError, FullDepth, InvalidValueError, RequestOutput, SamplingParams, Waves
from d3engine.depth import DepthPolicy, Schedule
from d3engine.errors import D3EngineError
from d3engine.executor.computed import Computed
from d3engine.model.config import ModelConfig
from d3engine.model.weights import LlamaWeights, random_weights
from d3engine.plan import Plan
from d3engine.stats import EngineStats

DEMO = Path(d3engine.__file__).parent / "demo_model"
VOCABULARY, EOS, LAYERS = 800, 2, 4  # the embedding has more rows than the tokenizer has pieces
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": EOS,
}
Scripts = dict[tuple[int, ...], list[int]]


class Scripted:
    """An executor that makes each sequence generate the script of its prompt, and EOS after it."""

    def __init__(self, scripts: Scripts) -> None:
        self.scripts = scripts
        self.fault: BaseException | None = None
        self.poisoned: set[str] = set()

    def run(self, plan: Plan) -> Computed:
        if self.fault is not None:
            raise self.fault
        logits = torch.zeros(len(plan.logit_rows), VOCABULARY)
        for row, chunk in enumerate(plan.sampled.tolist()):
            sequence = plan.sequences[chunk]
            script = [*self.scripts.get(tuple(sequence.prompt_token_ids), range(100, 200)), EOS, EOS, EOS, EOS]
            logits[row, script[sequence.step]] = 30.0
            if sequence.request_id in self.poisoned:
                logits[row, 5] = math.nan
        return Computed(logits)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="module")
def weights(directory: Path) -> LlamaWeights:
    return random_weights(ModelConfig.from_directory(directory), dtype=torch.float32, device="cpu", seed=0)


@pytest.fixture
def make_engine(directory: Path, weights: LlamaWeights) -> Callable[..., Engine]:
    def make(scripts: Scripts | None = None, **changes: Any) -> Engine:
        arguments: dict[str, Any] = {"weights": weights, "tokenizer": DEMO, "max_num_seqs": 8, "device": "cpu"}
        engine = Engine(directory, **(arguments | changes))
        engine.executor = Scripted(scripts or {})  # type: ignore[assignment]
        return engine

    return make


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine()


def executor_of(engine: Engine) -> Scripted:
    executor = engine.executor
    assert isinstance(executor, Scripted)
    return executor


def greedy(max_tokens: int = 8, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **more)


def likeliest(max_tokens: int, **more: Any) -> SamplingParams:
    """As `greedy`, but drawn: so there may be several answers, all the same."""
    return SamplingParams(top_k=1, max_tokens=max_tokens, **more)


def ids(engine: Engine, text: str) -> list[int]:
    assert engine.tokenizer is not None
    return engine.tokenizer.encode(text, add_special_tokens=False)


def finish(engine: Engine) -> dict[str, RequestOutput]:
    """Step to the end; the last output of every request that was returned."""
    last = {}
    for _ in range(200):
        if not engine.has_unfinished_requests():
            return last
        last |= {output.request_id: output for output in engine.step()}
    raise AssertionError("the engine does not finish")


# -- SamplingParams --------------------------------------------------------------------------------------------------

NOT_NUMBERS = [math.nan, math.inf, -math.inf, "1", True, [1.0]]
NOT_INTEGERS = [1.5, math.nan, "1", True, [1]]
REFUSED: dict[str, list[Any]] = {
    "n": [0, -1, 65, None, *NOT_INTEGERS],
    "temperature": [-0.1, 100.1, None, 10**400, *NOT_NUMBERS],
    "top_p": [0.0, -0.5, 1.01, None, *NOT_NUMBERS],
    "top_k": [-2, None, *NOT_INTEGERS],
    "min_p": [-0.1, 1.1, None, *NOT_NUMBERS],
    "presence_penalty": [-2.1, 2.1, None, *NOT_NUMBERS],
    "frequency_penalty": [-2.1, 2.1, None, *NOT_NUMBERS],
    "repetition_penalty": [0.0, -1.0, 100.1, None, *NOT_NUMBERS],
    "seed": [-2, 2**63, *NOT_INTEGERS],
    "stop": ["", [""], [1], 5, ["x"] * 17, "x" * 1025, {"x"}, [None], b"x"],
    "stop_token_ids": [5, "12", [-1], [1.5], [True], list(range(257)), {1}],
    "ignore_eos": [1, "yes", None],
    "max_tokens": [0, -1, 2**24 + 1, *NOT_INTEGERS],
    "min_tokens": [-1, 17, None, *NOT_INTEGERS],  # max_tokens is 16
    "logprobs": [-2, 65, *NOT_INTEGERS],
    "prompt_logprobs": [-2, 65, *NOT_INTEGERS],
    "logit_bias": [
        {1: math.nan},
        {1: 101.0},
        {1: -101.0},
        {1: "2"},
        {-1: 1.0},
        {"one": 1.0},
        {"-1": 1.0},
        {"9" * 5000: 1.0},
        {"1": 1.0, 1: 2.0},
        [1],
        5,
        dict.fromkeys(range(1025), 1.0),
    ],
    "allowed_token_ids": [[], [-1], [1.5], [False], 5, "12", {3}, range(2**40)],
    "bad_words": ["word", [""], [1], 5, ["x"] * 257, ["x" * 1025]],
    "skip_special_tokens": [0, None, "no"],
    "detokenize": [1, None],
    "include_stop_str_in_output": [1, None],
    "output_kind": [1, None, "DELTA"],
    "depth": ["d3", 0.9, {"policy": "d3"}, D3],
}


@pytest.mark.parametrize("field", REFUSED)
def test_every_value_out_of_bounds_is_refused_by_field_value_and_what_is_allowed(field: str) -> None:
    for value in REFUSED[field]:
        with pytest.raises(InvalidValueError) as caught:
            SamplingParams(**{field: value})
        assert caught.value.field == field
        assert str(caught.value).startswith(f"{field} must be ")
        assert "; got " in str(caught.value)
        assert len(str(caught.value)) < 400
        assert isinstance(caught.value, ValueError)


def test_every_field_of_sampling_params_has_values_that_are_refused() -> None:
    assert set(REFUSED) == set(SamplingParams.__dataclass_fields__)


@pytest.mark.parametrize(
    "values",
    [
        {"n": 64, "temperature": 100.0, "top_p": 1e-9, "top_k": 10**6, "min_p": 1.0, "presence_penalty": -2},
        {"stop": ["x" * 1024] * 16, "stop_token_ids": [0] * 256, "max_tokens": 2**24, "min_tokens": 2**24},
        {"logprobs": 64, "prompt_logprobs": 0, "logit_bias": {0: -100.0, 1: 100}, "repetition_penalty": 100},
        {"seed": 2**63 - 1, "min_p": 0, "max_tokens": np.int64(3), "stop_token_ids": (), "bad_words": [], "top_p": 1},
    ],
)
def test_values_at_their_bounds_are_taken_as_they_are(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    lists_as_tuples = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    assert {name: getattr(params, name) for name in values} == lists_as_tuples


def test_unknown_names_raise(engine: Engine, directory: Path) -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="tensor_parallel_size"):
        Engine(directory, tensor_parallel_size=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="max_tokens"):
        engine.generate("a", max_tokens=5)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        SamplingParams(2)  # type: ignore[misc]


def test_sampling_params_cannot_be_changed_after_they_were_checked() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().temperature = math.nan  # type: ignore[misc]


# -- engine arguments ------------------------------------------------------------------------------------------------


class TooShort(DepthPolicy):
    """A user's own policy that is wrong about the model."""

    def schedule(self, num_layers: int) -> Schedule:
        return Schedule.nested([1] * (num_layers - 1))


@pytest.mark.parametrize(
    ("field", "values", "allowed"),
    [
        ("max_num_seqs", [0, -1, 4097, 1.5, "8", True], "an integer from 1 to 4096"),
        ("max_num_batched_tokens", [0, -5, 2.0, None], "an integer of at least 1"),
        ("max_num_batched_tokens", [7], "at least max_num_seqs=8"),
        ("block_size", [0, 1025, "16", False], "an integer from 1 to 1024"),
        ("seed", [-1, 2**63, 0.5, None], "an integer from 0 to"),
        ("max_model_len", [1, 0, 65, 10.0, "64"], "an integer from 2 to 64"),
        ("kv_cache_memory_bytes", [0, -1, 1.5, LAYERS * 16 * 2 * 16 * 4 - 1], "an integer of at least 8192"),
        ("dtype", ["float16", "int8", "bf16", torch.int32, 7], "one of auto, float32, bfloat16 on cpu"),
        ("device", ["tpu", "meta", "gpu"], '"auto", "cpu", "cuda" or "cuda:N"'),
        ("depth", ["d3", 0.9, None, D3], "a DepthPolicy"),
        ("depth", [TooShort()], "a schedule of the model's 4 layers"),
        ("tail", [D3(0.9, 0.5, tail=3)], "at most 2"),
    ],
)
def test_an_engine_argument_is_refused_by_name_value_and_what_is_allowed(
    make_engine: Callable[..., Engine], field: str, values: list[Any], allowed: str
) -> None:
    for value in values:
        with pytest.raises(InvalidValueError) as caught:
            make_engine(**{"depth" if field == "tail" else field: value})
        assert caught.value.field == field
        assert allowed in caught.value.allowed
        assert str(caught.value).startswith(f"{field} must be ")


def test_a_directory_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(InvalidValueError, match=r"model must be a directory.*; got 'nowhere at all'"):
        Engine("nowhere at all")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("admission", 5),
        ("enforce_eager", "yes"),
        ("enable_prefix_caching", "no"),
        ("skip_tokenizer_init", 0.5),
        ("gpu_memory_utilization", math.nan),
        ("gpu_memory_utilization", 1.5),
        ("tokenizer", 5),
    ],
)
def test_an_engine_argument_of_a_wrong_type_is_refused_by_name(
    make_engine: Callable[..., Engine], field: str, value: Any
) -> None:
    with pytest.raises(InvalidValueError, match=field):
        make_engine(**{field: value})


# -- prompts ---------------------------------------------------------------------------------------------------------


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
def test_a_prompt_that_cannot_run_is_refused_and_the_engine_is_as_before(
    engine: Engine, prompt: Any, message: str
) -> None:
    with pytest.raises(InvalidValueError, match=message):
        engine.add_request("bad", prompt, greedy())
    with pytest.raises(InvalidValueError, match=message):
        engine.stream(prompt, greedy())
    with pytest.raises(InvalidValueError, match=message):
        engine.generate(["good", prompt], greedy(), use_tqdm=False)
    assert engine.get_num_unfinished_requests() == engine.stats().num_waiting == 0
    assert engine.generate("good", greedy(2), use_tqdm=False)[0].finished


def test_ids_of_embedding_rows_that_the_tokenizer_does_not_know_are_taken(engine: Engine) -> None:
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
def test_token_ids_in_parameters_are_checked_against_the_model(
    engine: Engine, field: str, params: dict[str, Any]
) -> None:
    with pytest.raises(InvalidValueError, match=f"{field} must be .*rows of the embedding; got 800"):
        engine.add_request("a", "text", greedy(**params))
    assert not engine.has_unfinished_requests()


def test_text_features_are_refused_by_name_without_a_tokenizer(make_engine: Callable[..., Engine]) -> None:
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
def test_a_value_of_a_type_that_is_never_allowed_is_refused_by_name(engine: Engine, call: str) -> None:
    wrong: Any = {"5": 5, "None": None, "bytes": b"ab", "{}": {}}[call.split()[1]]
    calls: dict[str, Callable[[], object]] = {
        "generate": lambda: engine.generate(wrong, greedy(), use_tqdm=False),
        "add": lambda: engine.add_request("a", wrong, greedy()),
        "params": lambda: engine.generate("a", wrong, use_tqdm=False),
        "add-params": lambda: engine.add_request("a", "text", wrong),
    }
    with pytest.raises(InvalidValueError):
        calls[call.split()[0]]()


def test_an_enormous_top_k_is_refused_and_the_largest_keeps_all_tokens(engine: Engine) -> None:
    with pytest.raises(InvalidValueError, match=r"top_k must be .*from -1 to 2147483647"):
        SamplingParams(top_k=2**70)
    largest = SamplingParams(top_k=2**31 - 1, max_tokens=2)
    assert len(engine.generate("a", largest, use_tqdm=False)[0].outputs[0].token_ids) == 2


# -- stops and lengths -----------------------------------------------------------------------------------------------


def answer(make_engine: Callable[..., Engine], text: str, params: SamplingParams) -> Any:
    """The finished output of a request whose model says `text`, and the joined growth of its stream."""
    engine = make_engine()
    prompt = ids(engine, "the prompt")
    executor_of(engine).scripts[tuple(prompt)] = ids(engine, text)
    texts = []
    for output in engine.stream(prompt, params):
        texts.append(output.outputs[0].text)
        assert output.finished == (output.outputs[0].finish_reason is not None)
    for earlier, later in pairwise(texts):
        assert later.startswith(earlier), "a stream took text back"
    final = engine.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    assert output.outputs[0] == final
    assert not engine.has_unfinished_requests()
    return final


def test_eos_ends_an_answer_and_is_not_shown(make_engine: Callable[..., Engine]) -> None:
    output = answer(make_engine, "one and two", greedy(40))
    assert (output.text, output.finish_reason, output.stop_reason) == (" one and two", "stop", None)
    assert output.token_ids[-1] == EOS
    assert len(output.depths) == len(output.token_ids)
    assert set(output.depths) == {LAYERS}


def test_ignore_eos_goes_on_to_the_length(make_engine: Callable[..., Engine]) -> None:
    length = len(ids(make_engine(), "one and two"))
    output = answer(make_engine, "one and two", greedy(length + 3, ignore_eos=True))
    assert output.finish_reason == "length"
    assert output.token_ids[length:] == [EOS] * 3
    assert output.text == " one and two"


def test_max_tokens_ends_an_answer_with_all_its_text(make_engine: Callable[..., Engine]) -> None:
    tokens = ids(make_engine(), "one and two and three")
    output = answer(make_engine, "one and two and three", greedy(4))
    assert (output.token_ids, output.finish_reason) == (tokens[:4], "length")
    engine = make_engine()
    assert engine.tokenizer is not None
    assert output.text == " " + engine.tokenizer.decode(tokens[:4])  # it stands behind a prompt


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", ["two", " and t", "e", ["nowhere", "two and"], ["two and", "o a"]])
def test_a_stop_string_ends_the_text_before_or_behind_it_and_never_leaks(
    make_engine: Callable[..., Engine], stop: Any, include: bool
) -> None:
    text = " one and two and three"
    output = answer(make_engine, text.lstrip(), greedy(40, stop=stop, include_stop_str_in_output=include))
    stops = [stop] if isinstance(stop, str) else stop
    end, found = min((text.index(s), s) for s in stops if s in text and text.index(s) >= 0)
    wanted = {found, *(s for s in stops if s in text)}
    assert output.stop_reason in wanted
    start = text.index(output.stop_reason)
    assert output.text == text[: start + len(output.stop_reason) if include else start]
    assert output.finish_reason == "stop"
    assert output.token_ids[-1] != EOS
    assert start == end or len(stops) > 1


def test_a_stop_string_at_the_last_token_allowed_is_a_stop_and_no_length(make_engine: Callable[..., Engine]) -> None:
    tokens = ids(make_engine(), "one and two")
    output = answer(make_engine, "one and two", greedy(len(tokens), stop="two"))
    assert (output.text, output.finish_reason, output.stop_reason) == (" one and ", "stop", "two")


def test_a_stop_token_id_ends_an_answer_is_named_and_not_shown(make_engine: Callable[..., Engine]) -> None:
    tokens = ids(make_engine(), "one and two and three")
    output = answer(make_engine, "one and two and three", greedy(40, stop_token_ids=[tokens[3], 799]))
    first = tokens.index(tokens[3])
    assert (output.finish_reason, output.stop_reason) == ("stop", tokens[3])
    assert output.token_ids == tokens[: first + 1]
    engine = make_engine()
    assert engine.tokenizer is not None
    assert output.text == " " + engine.tokenizer.decode(tokens[:first])


@pytest.mark.parametrize("what", ["eos", "stop id", "stop string"])
def test_before_min_tokens_nothing_ends_an_answer(make_engine: Callable[..., Engine], what: str) -> None:
    tokens = ids(make_engine(), "one one one one one one")
    count = 5 if what == "eos" else 6
    text = "one" if what == "eos" else "one one one one one one"
    stops = {"eos": {}, "stop id": {"stop_token_ids": [tokens[0]]}, "stop string": {"stop": "one"}}[what]
    at_once = answer(make_engine, text, greedy(30, **stops))
    later = answer(make_engine, text, greedy(30, min_tokens=count, **stops))
    assert len(at_once.token_ids) < count <= len(later.token_ids)
    if what != "stop string":  # EOS and stop ids are not even chosen before
        assert not {EOS, *stops.get("stop_token_ids", ())} & set(later.token_ids[: count - 1])


def test_special_tokens_are_left_out_of_the_text_unless_asked_for(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    script = [*ids(engine, "a"), 1, *ids(engine, "b")]
    executor_of(engine).scripts[(7,)] = script
    shown = engine.generate([[7], [7]], [greedy(), greedy(skip_special_tokens=False)], use_tqdm=False)
    assert "<s>" not in shown[0].outputs[0].text
    assert "<s>" in shown[1].outputs[0].text
    assert shown[0].outputs[0].token_ids == shown[1].outputs[0].token_ids


def test_bad_words_are_never_completed(make_engine: Callable[..., Engine]) -> None:
    output = answer(make_engine, "one and two", greedy(12, bad_words=["and"], ignore_eos=True))
    assert " and" not in output.text


# -- the step API ----------------------------------------------------------------------------------------------------


def test_streams_grow_by_what_each_step_brings(engine: Engine) -> None:
    lengths = [len(output.outputs[0].token_ids) for output in engine.stream("a", greedy(6))]
    assert lengths == [1, 2, 3, 4, 5, 6]


def test_leaving_a_stream_aborts_its_request(engine: Engine) -> None:
    stream = engine.stream("a", greedy(30))
    next(stream)
    assert engine.get_num_unfinished_requests() == 1
    assert isinstance(stream, Generator)
    stream.close()
    assert not engine.has_unfinished_requests()
    assert engine.stats().num_running == 0


def test_an_abort_ends_a_request_with_what_it_has_and_others_go_on(engine: Engine) -> None:
    engine.add_request("a", "one", greedy(20))
    engine.add_request("b", "one", greedy(5))
    engine.add_request("c", "waits", likeliest(20, n=3))
    engine.step()
    engine.step()
    engine.abort_request(["a", "c", "unknown"])
    engine.abort_request("a")
    assert engine.has_unfinished_requests()
    assert engine.get_num_unfinished_requests() == 1
    last = finish(engine)
    assert [c.finish_reason for c in last["a"].outputs + last["c"].outputs] == ["abort"] * 4
    assert last["a"].finished
    assert last["a"].outputs[0].token_ids == [100, 101]
    assert last["b"].outputs[0].token_ids == [100, 101, 102, 103, 104]


def test_generate_leaves_the_outputs_of_unfinished_requests_to_step(engine: Engine) -> None:
    engine.add_request("short", "mine", greedy(2))
    engine.add_request("long", "mine too", greedy(20))
    engine.step()
    answers = engine.generate(["x", "y"], greedy(6), use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in answers] == [6, 6]
    last = finish(engine)
    assert len(last["short"].outputs[0].token_ids) == 2
    assert len(last["long"].outputs[0].token_ids) == 20
    assert all(output.finished for output in last.values())


def test_generate_does_not_take_the_id_of_a_request_that_a_caller_has_named(engine: Engine) -> None:
    engine.add_request("request-1", "mine", greedy(4))
    engine.generate("x", greedy(6), use_tqdm=False)
    assert finish(engine)["request-1"].prompt == "mine"


def test_leaving_a_stream_loses_no_output_of_other_requests(engine: Engine) -> None:
    engine.add_request("mine", "a", greedy(1))
    stream = engine.stream("b", greedy(20))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert finish(engine)["mine"].finished


def test_streams_that_are_read_in_turns_all_come_to_their_end(engine: Engine) -> None:
    streams = [engine.stream("a", greedy(2)), engine.stream("b", greedy(5))]
    done = [0, 0]
    real_step, calls = engine.step, 0

    def counted() -> list[RequestOutput]:
        nonlocal calls
        calls += 1
        assert calls < 50, "a stream waits for an output that another stream has taken"
        return real_step()

    engine.step = counted  # type: ignore[method-assign]
    for _ in range(8):
        for nth, stream in enumerate(streams):
            output = next(stream, None)
            done[nth] = len(output.outputs[0].token_ids) if output else done[nth]
    assert done == [2, 5]


def test_ready_weights_of_another_dtype_are_refused(directory: Path) -> None:
    config = ModelConfig.from_directory(directory)
    narrow = random_weights(config, dtype=torch.bfloat16, device="cpu", seed=0)
    with pytest.raises(ValueError, match=r"weights must be torch.float32 on cpu.*; got 'torch.bfloat16 on cpu'"):
        Engine(directory, weights=narrow, tokenizer=DEMO, device="cpu")


def test_without_parameters_generation_config_decides(directory: Path, weights: LlamaWeights, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.7, "max_new_tokens": 3}')
    engine = Engine(tmp_path, weights=weights, tokenizer=DEMO, device="cpu")
    engine.executor = Scripted({})  # type: ignore[assignment]
    assert engine.default_sampling_params == SamplingParams(temperature=0.0, max_tokens=3)
    assert engine.generate("a", use_tqdm=False)[0].outputs[0].token_ids == [100, 101, 102]


# -- faults ----------------------------------------------------------------------------------------------------------


def test_a_request_whose_logits_are_not_finite_ends_alone(make_engine: Callable[..., Engine]) -> None:
    def run(poisoned: bool) -> dict[str, RequestOutput]:
        engine = make_engine()
        for name in ("a", "b", "c"):
            engine.add_request(name, f"prompt {name}", SamplingParams(temperature=3.0, seed=1, max_tokens=12))
        engine.step()
        engine.step()
        if poisoned:
            executor_of(engine).poisoned = {"b"}
        last = finish(engine)
        assert engine.stats().kv_blocks_in_use == 0
        return last

    healthy, broken = run(False), run(True)
    assert broken["b"].outputs[0].finish_reason == "abort"
    assert "not finite" in str(broken["b"].outputs[0].stop_reason)
    assert broken["b"].outputs[0].token_ids == healthy["b"].outputs[0].token_ids[:2]
    for name in ("a", "c"):
        assert broken[name].outputs == healthy[name].outputs


class FailingTokenizer:
    """The demo's tokenizer, which fails at one id."""

    def __init__(self, real: Any, at: int) -> None:
        self._real, self._at = real, at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def convert_id_to_token(self, token: int) -> Any:
        if token == self._at:
            raise RuntimeError("this id has no piece")
        return self._real.convert_id_to_token(token)

    def decode(self, tokens: list[int], **options: Any) -> Any:
        if self._at in tokens:
            raise RuntimeError("this id has no text")
        return self._real.decode(tokens, **options)


def with_failing_tokenizer(engine: Engine, at: int) -> Engine:
    engine._outputs._tokenizer = FailingTokenizer(engine.tokenizer, at)  # type: ignore[assignment]
    return engine


@pytest.mark.parametrize("logprobs", [None, 0])
def test_a_request_whose_text_cannot_be_made_ends_alone(make_engine: Callable[..., Engine], logprobs: Any) -> None:
    scripts = {(11,): [100, 101, 150, 102, 103, 104], (12,): [100, 101, 102, 103, 104, 105]}
    params = greedy(6, logprobs=logprobs)
    healthy = make_engine(scripts).generate([[12], [12]], params, use_tqdm=False)
    engine = with_failing_tokenizer(make_engine(scripts), at=150)
    outputs = engine.generate(
        [[12], [11], [12]], [params, likeliest(6, logprobs=logprobs, n=2), params], use_tqdm=False
    )
    for completion in outputs[1].outputs:
        assert completion.finish_reason == "abort"
        assert "RuntimeError: this id has no" in str(completion.stop_reason)
    assert [outputs[0].outputs, outputs[2].outputs] == [healthy[0].outputs, healthy[1].outputs]
    assert engine.stats().kv_blocks_in_use == 0
    assert engine.generate([12], params, use_tqdm=False)[0].outputs == healthy[0].outputs


def test_text_that_fails_at_the_last_token_is_an_abort_and_no_length(make_engine: Callable[..., Engine]) -> None:
    engine = with_failing_tokenizer(make_engine({(11,): [100, 101, 150]}), at=150)
    output = engine.generate([11], greedy(3), use_tqdm=False)[0].outputs[0]
    assert output.finish_reason == "abort"
    assert "this id has no piece" in str(output.stop_reason)


def test_prompt_logprobs_whose_text_cannot_be_made_end_their_request_alone(make_engine: Callable[..., Engine]) -> None:
    engine = with_failing_tokenizer(make_engine(), at=150)
    params = [greedy(3, prompt_logprobs=0), greedy(3)]
    outputs = engine.generate([[5, 150, 6], [5, 6]], params, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["abort", "length"]


def test_an_encoder_that_fails_queues_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> list[int]:
        raise RuntimeError("no ids for this")

    engine.add_request("other", "a", greedy(3))
    engine.step()
    with monkeypatch.context() as patched:
        patched.setattr(engine.tokenizer, "encode", fail)
        with pytest.raises(RuntimeError, match="no ids"):
            engine.generate(["a", "b"], greedy(), use_tqdm=False)
    assert engine.get_num_unfinished_requests() == 1
    assert finish(engine)["other"].outputs[0].token_ids == [100, 101, 102]


def test_an_engine_fault_ends_the_engine_for_every_caller_with_its_cause(engine: Engine) -> None:
    engine.add_request("waits", "a", greedy(5))
    stream = engine.stream("b", greedy(5))
    next(stream)
    fault = ZeroDivisionError("in the middle of a layer")
    executor_of(engine).fault = fault
    assert [output.request_id for output in engine.step()] == ["waits"]  # its output of the step before
    with pytest.raises(EngineDeadError, match="in the middle of a layer") as caught:
        engine.step()
    assert caught.value.__cause__ is fault
    executor_of(engine).fault = None  # the engine does not come back although the cause is gone
    calls: list[Callable[[], object]] = [
        engine.step,
        lambda: engine.generate("a", greedy(), use_tqdm=False),
        lambda: engine.add_request("new", "a", greedy()),
        lambda: engine.stream("a", greedy()),
        lambda: next(stream),
        engine.step,
    ]
    for call in calls:
        with pytest.raises(EngineDeadError, match="in the middle of a layer") as caught:
            call()
        assert caught.value.__cause__ is fault
    engine.close()


def test_an_interrupt_keeps_its_name_and_leaves_no_engine_to_go_on_with(engine: Engine) -> None:
    engine.add_request("a", "a", greedy(5))
    executor_of(engine).fault = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    with pytest.raises(EngineDeadError):
        engine.step()


def test_a_closed_engine_says_so(make_engine: Callable[..., Engine]) -> None:
    with make_engine() as engine:
        engine.generate("a", greedy(1), use_tqdm=False)
    engine.close()
    engine.close()
    calls: list[Callable[[], object]] = [
        engine.step,
        lambda: engine.generate("a", greedy(), use_tqdm=False),
        lambda: engine.add_request("new", "a", greedy()),
        lambda: engine.stream("a", greedy()),
    ]
    for call in calls:
        with pytest.raises(D3EngineError, match="the engine is closed"):
            call()


# -- stats -----------------------------------------------------------------------------------------------------------


def test_stats_count_what_the_engine_has_done_and_holds(make_engine: Callable[..., Engine]) -> None:
    policy = D3(0.8, 0.5)
    engine = make_engine(depth=policy, block_size=4, max_num_seqs=2)
    empty = engine.stats()
    total = engine.scheduler.cache.pool.num_blocks
    assert empty == EngineStats(0, 0, 0, 0, 0, 0, 0, None, None, total, 0, 0, 0, 0, 0)
    prompt = list(range(10, 20))
    for name in ("a", "b", "c"):
        engine.add_request(name, prompt, greedy(10, ignore_eos=True))
    assert (engine.stats().num_waiting, engine.stats().num_running) == (3, 0)
    nominal = float(policy.schedule(LAYERS).depths(10).mean())
    assert engine.stats().nominal_mean_layers == pytest.approx(nominal)
    engine.step()
    stats = engine.stats()
    assert (stats.num_waiting, stats.num_running, stats.num_steps) == (1, 2, 1)
    assert (stats.generated_tokens, stats.realised_mean_layers) == (2, LAYERS)
    block_bytes = 2 * 4 * 16 * 4
    # Ten entries of two sequences at the layers of step 1; the other layers' two full blocks are the prefix cache's.
    layers = policy.schedule(LAYERS).depth_at(1)
    assert layers == LAYERS - 1
    assert stats.kv_blocks_cached == 2 * (LAYERS - layers)
    assert stats.kv_blocks_in_use == 2 * 3 * layers
    assert stats.kv_bytes_in_use == stats.kv_blocks_in_use * block_bytes
    assert stats.kv_bytes_saved == 2 * 3 * (LAYERS - layers) * block_bytes
    engine.scheduler._preempt(engine.scheduler.running[1])
    finish(engine)
    stats = engine.stats()
    assert (stats.num_waiting, stats.num_running, stats.num_preemptions) == (0, 0, 1)
    assert (stats.prompt_tokens, stats.cached_prompt_tokens) == (30, 8)  # only the third found the others' prompt
    assert stats.generated_tokens == 30
    assert stats.realised_mean_layers == pytest.approx(nominal)
    assert stats.kv_blocks_in_use == stats.kv_bytes_in_use == stats.kv_bytes_saved == 0
    assert stats.kv_blocks_cached == 2 * LAYERS
    assert stats.kv_bytes_saved_at_end > 0
    engine.reset_prefix_cache()
    assert engine.stats().kv_blocks_cached == 0


def test_realised_depth_is_that_of_the_tokens_that_came_and_nominal_that_of_those_allowed(
    make_engine: Callable[..., Engine],
) -> None:
    policy = D3(0.5, 0.25)
    engine = make_engine({(9,): [100]}, depth=policy)
    engine.generate([9], greedy(20), use_tqdm=False)  # one token and EOS
    schedule = policy.schedule(LAYERS)
    assert engine.stats().realised_mean_layers == pytest.approx(float(schedule.depths(2).mean()))
    assert engine.stats().nominal_mean_layers == pytest.approx(float(schedule.depths(20).mean()))


def test_metrics_come_in_their_order(engine: Engine) -> None:
    output = engine.generate("a", greedy(3), use_tqdm=False)[0].metrics
    assert output.first_token_time is not None
    assert output.finished_time is not None
    assert output.arrival_time <= output.first_token_time <= output.finished_time
    assert output.num_preemptions == 0


def test_waves_let_requests_join_only_between_them_but_an_idle_engine_at_once(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine(admission=Waves(4), depth=FullDepth())
    engine.step()
    engine.add_request("a", "a", greedy(20))
    joined = []
    for step in range(10):
        if step == 1:
            engine.add_request("b", "b", greedy(3))
        engine.step()
        joined.append(engine.scheduler.num_running)
    assert joined == [1, 1, 1, 1, 2, 2, 1, 1, 1, 1]
    with pytest.raises(InvalidValueError, match=r"steps must be .*; got 0"):
        Waves(0)
