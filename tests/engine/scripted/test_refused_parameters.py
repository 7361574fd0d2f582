"""A value of SamplingParams out of its bounds is refused by field, value and what is allowed."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from d3engine import D3, Engine, InvalidValueError, SamplingParams

NOT_NUMBERS = [math.nan, math.inf, -math.inf, "1", True, [1.0]]
NOT_INTEGERS = [1.5, math.nan, "1", True, [1]]
REFUSED: dict[str, list[Any]] = {
    "structured_outputs": [{"regex": "a"}, "a", 1],
    "n": [0, -1, 65, None, *NOT_INTEGERS],
    "temperature": [-0.1, 100.1, None, 10**400, *NOT_NUMBERS],
    "top_p": [0.0, -0.5, 1.01, None, *NOT_NUMBERS],
    "top_k": [-2, None, *NOT_INTEGERS],
    "min_p": [-0.1, 1.1, None, *NOT_NUMBERS],
    "presence_penalty": [-2.1, 2.1, None, *NOT_NUMBERS],
    "frequency_penalty": [-2.1, 2.1, None, *NOT_NUMBERS],
    "repetition_penalty": [0.0, 1e-300, -1.0, 100.1, None, *NOT_NUMBERS],
    "seed": [-2, 2**63, *NOT_INTEGERS],
    "pooling": ["max", "", 1, True],
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
    "typical_p": [0.0, 1.1, None, *NOT_NUMBERS],
    "top_n_sigma": [-1, 101, None, *NOT_NUMBERS],
    "xtc_probability": [-0.1, 1.1, None, *NOT_NUMBERS],
    "xtc_threshold": [-0.1, 1.1, None, *NOT_NUMBERS],
    "dry_multiplier": [-0.1, 101, None, *NOT_NUMBERS],
    "dry_base": [0.9, 11, None, *NOT_NUMBERS],
    "dry_allowed_length": [0, -1, None, *NOT_INTEGERS],
    "dry_penalty_last_n": [-2, None, *NOT_INTEGERS],
    "dry_sequence_breakers": ["word", [""], [1], 5, ["x"] * 65],
    "truncate_prompt_tokens": [0, -2, *NOT_INTEGERS],
    "logits_processors": [5, "ab", [5], [lambda: 0], [lambda a: a], [lambda a, b, c, d: a], [max] * 17],
    "capture": [[], "12", -1, 4096, True, [1.5], [True], [1, 1], {1: 2}, [None], range(10**9)],
    "steer": [
        {},
        5,
        [1.0],
        {"1": [1.0]},
        {-1: [1.0]},
        {4096: [1.0]},
        {True: [1.0]},
        {1: []},
        {1: 5.0},
        {1: [math.nan]},
        {1: np.array([1e60])},
        {1: ["a", "b"]},
        {1: [[1.0], [2.0, 3.0]]},
        {1: np.ones((3, 3))},
        {1: (np.ones((2, 3)), np.ones((3, 4)))},
        {1: (np.ones((513, 3)), np.ones((3, 513)))},
        {1: None},
    ],
    "skip_special_tokens": [0, None, "no"],
    "detokenize": [1, None],
    "include_stop_str_in_output": [1, None],
    "cache_salt": ["", "x" * 129, b"x", 5],
    "output_kind": [1, None, "DELTA"],
    "depth": ["d3", 0.9, {"policy": "d3"}, D3],
}


@pytest.mark.parametrize("field", REFUSED)
def test_sampling_value_out_of_bounds_is_refused_by_field(field: str) -> None:
    """Every value out of bounds is refused by field, value and what is allowed."""
    for value in REFUSED[field]:
        with pytest.raises(InvalidValueError) as caught:
            SamplingParams(**{field: value})
        assert caught.value.field == field
        assert str(caught.value).startswith(f"{field} must be ")
        assert "; got " in str(caught.value)
        assert len(str(caught.value)) < 400
        assert isinstance(caught.value, ValueError)


def test_sampling_field_has_values_that_are_refused() -> None:
    """Every field of sampling params has values that are refused."""
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
    with pytest.raises(TypeError, match="pipeline_parallel_size"):
        Engine(directory, pipeline_parallel_size=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="max_tokens"):
        engine.generate("a", max_tokens=5)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        SamplingParams(2)  # type: ignore[misc]


def test_sampling_params_after_the_check_cannot_be_changed() -> None:
    """Sampling params cannot be changed after they were checked."""
    with pytest.raises(AttributeError):
        SamplingParams().temperature = math.nan  # type: ignore[misc]
