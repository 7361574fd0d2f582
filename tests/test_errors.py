"""What errors show, and that a number with more digits than Python converts is refused as any other value."""

from collections.abc import Callable
from typing import Any

import pytest

from d3engine import SamplingParams
from d3engine.cli.depth_options import window_of
from d3engine.cli.engine_options import read_threads
from d3engine.cli.speculate import _read_lengths
from d3engine.depth.speculative_config import as_mapping
from d3engine.errors import InvalidValueError, integer_in, must_be
from d3engine.request.params import BOUNDS, StructuredOutputsParams
from d3engine.text.structured.checker import in_words
from d3engine.text.structured.source import grammar_of

HUGE = 10**5000
DIGITS = "9" * 5000


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_huge_sampling_field_is_refused_by_name(name: str, sign: int) -> None:
    with pytest.raises(InvalidValueError, match=f"^{name} must be .*; got int with more than 4,300 digits$"):
        SamplingParams(**{name: sign * HUGE})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", {1: HUGE}),
        ("logit_bias", {-HUGE: 1}),
        ("logit_bias", {DIGITS: 1}),
        ("stop", HUGE),
        ("stop", [HUGE]),
        ("stop_token_ids", [-HUGE]),
        ("n", [HUGE]),
    ],
    ids=list("abcdefg"),
)
def test_a_huge_number_in_a_list_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidValueError, match=rf"^{name} must be "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "schema", [{"minimum": HUGE}, {"const": HUGE}, f'{{"maximum": {DIGITS}}}', {"enum": [[HUGE]]}], ids=list("abcd")
)
def test_a_schema_with_a_huge_number_is_refused(schema: Any) -> None:
    with pytest.raises(InvalidValueError, match=r"^json must be .*4300 digits"):
        StructuredOutputsParams(json=schema)


@pytest.mark.parametrize(
    "schema",
    [{"minimum": 10**400}, {"const": 10**400}, {"enum": [10**400]}, {"const": [10**99] * 99}],
    ids=list("abcd"),
)
def test_a_schema_with_a_large_number_shows_it_cut(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidValueError, match=r"^json must be .*0\.\.\. cannot be enforced") as raised:
        grammar_of(StructuredOutputsParams(json=schema))
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize("way", ["$ref", "not"])
def test_a_reference_to_a_huge_place_leads_nowhere(way: str) -> None:
    reference = {"$ref": f"#/allOf/{DIGITS}"}
    schema = {"allOf": [{"type": "string"}], **(reference if way == "$ref" else {"not": reference})}
    assert DIGITS in grammar_of(StructuredOutputsParams(json=schema))  # which the compiler refuses by name


def test_a_long_class_in_a_pattern_is_shown_cut() -> None:
    with pytest.raises(InvalidValueError, match=r"two hyphens in the class .*\.\.\.\); got ") as raised:
        grammar_of(StructuredOutputsParams(json={"type": "string", "pattern": f"[{'a' * 5000}--b]"}))
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize("error", [f'unknown name: "{DIGITS}"', f"regex parse error:\n  x\nerror: {DIGITS}"])
def test_a_long_message_of_a_compiler_is_cut(error: str) -> None:
    assert len(in_words(error)) == 300
    assert in_words(error).endswith("...")


@pytest.mark.parametrize(
    ("flag", "read"),
    [
        ("--window", lambda: window_of("--window", f"{DIGITS}:3", 9)),
        ("--window", lambda: window_of("--window", f"3:{DIGITS}", 9)),
        ("--threads", lambda: read_threads(DIGITS)),
        ("--lengths", lambda: _read_lengths(f"2,{DIGITS}")),
        ("speculative_config", lambda: as_mapping(f'{{"num_speculative_tokens": {DIGITS}}}')),
        ("speculative_config", lambda: as_mapping("[" * 100_000)),
    ],
    ids=list("abcdef"),
)
def test_a_huge_number_in_an_option_is_refused_by_name(flag: str, read: Callable[[], object]) -> None:
    with pytest.raises(InvalidValueError, match=f"^{flag} must be .*; got "):
        read()


def test_an_error_shows_field_and_value_cut() -> None:
    assert must_be("n" * 999, "x" * 999, "small") == f"{'n' * 297}... must be small; got '{'x' * 196}..."


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("12", 12),
        ("9" * 18, 10**18 - 1),
        ("9" * 19, None),
        ("", None),
        ("-1", None),
        ("²", None),
        ("٣", None),
    ],
)
def test_digits_are_read_as_an_integer_or_none(text: str, number: int | None) -> None:
    assert integer_in(text) == number
