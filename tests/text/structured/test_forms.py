"""Which tokens a form allows, where it ends, and what is refused before anything runs."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bad_values import assert_refused, bad_values
from fixture_types import MakeEngine
from small_tokenizers import byte_ids, save_word_level

from d3engine import Engine, InvalidValueError, SamplingParams, StructuredOutputsParams
from d3engine.errors import MissingExtraError
from d3engine.request.constraint import Allowed, Constraint
from d3engine.request.params import MAX_CHARACTERS, MAX_CHOICES
from d3engine.text.detokenizer import TokenTexts
from d3engine.text.limited_process import ProcessLimits
from d3engine.text.structured import forms as structured_forms
from d3engine.text.structured.forms import Forms
from d3engine.text.tokenizer import Tokenizer, load_tokenizer

PROMPT = {"prompt_token_ids": [5, 6, 7]}


@pytest.fixture(scope="module")
def forms(tokenizer: Tokenizer) -> Forms:
    return Forms(tokenizer, tokenizer.vocab_size)


@pytest.fixture(scope="module")
def engine(random_engine: Callable[..., Engine]) -> Iterator[Engine]:
    with random_engine("sentencepiece") as engine:
        yield engine


def ids(allowed: Allowed | None) -> set[int]:
    assert allowed is not None
    return set(np.unpackbits(allowed, bitorder="little").nonzero()[0].tolist())


def begin(forms: Forms, ends: frozenset[int] = frozenset({2}), **form: Any) -> Constraint:
    return forms.compile(StructuredOutputsParams(**form)).begin(ends)


class TestAllowedTokens:
    CHOICES = (" yes", " yes, sir", "né!", "no")

    @pytest.mark.parametrize("written", ["", " ", " y", " yes", " yes,", "n", "né"])
    def test_they_are_all_whose_bytes_begin_what_may_come(
        self, forms: Forms, tokenizer: Tokenizer, written: str
    ) -> None:
        place = begin(forms, choice=self.CHOICES)
        rest = [c.encode()[len(written.encode()) :] for c in self.CHOICES if c.startswith(written)]
        texts = TokenTexts(tokenizer)
        wanted = {
            token
            for token in range(tokenizer.vocab_size)
            if token not in tokenizer.special_ids
            and (found := texts.of(token)[1])
            and any(one.startswith(found) for one in rest)
        }
        if written in self.CHOICES:
            wanted.add(2)
        assert ids(place.allowed(byte_ids(tokenizer, written))) == wanted

    def test_a_draft_leaves_nothing_behind(self, forms: Forms, tokenizer: Tokenizer) -> None:
        place, other = (begin(forms, json={"type": "object"}) for _ in range(2))
        for token in byte_ids(tokenizer, '{"a": [1'):
            place.allowed([token, *byte_ids(tokenizer, "0")])
            place.is_over([token])
            place.take(token)
            other.take(token)
            assert ids(place.allowed()) == ids(other.allowed())
        assert place.fault is None

    def test_end_token_is_allowed_only_where_the_grammar_may_end(self, forms: Forms, tokenizer: Tokenizer) -> None:
        """A token that ends a sequence is allowed where the grammar may end, nowhere else."""
        (digit,) = byte_ids(tokenizer, "7")
        place = begin(forms, frozenset({2, 11, digit}), regex="[0-9]{2,}x?")
        for _ in range(2):
            assert ids(place.allowed()).isdisjoint({2, 11, digit})
            place.take(digit)
        assert ids(place.allowed()) >= {2, 11, digit}
        assert not place.is_over()
        assert place.is_over(byte_ids(tokenizer, "x"))
        assert place.is_over([2]), "behind the end of text"
        assert place.allowed([2]) is None

    def test_special_tokens_are_no_text(self, forms: Forms) -> None:
        assert ids(begin(forms, regex="(?s:.)*").allowed()).isdisjoint({0, 1})

    def test_token_not_allowed_is_a_fault_and_then_none_is_allowed(self, forms: Forms, tokenizer: Tokenizer) -> None:
        """A token that was not allowed is a fault, and then no token is allowed."""
        place = begin(forms, regex="ab")
        place.take(byte_ids(tokenizer, "x")[0])
        assert place.fault is not None
        assert place.fault.startswith("structured_outputs: ")
        assert ids(place.allowed()) == set()


class TestEnds:
    def test_answer_ends_with_the_token_that_completes_it(self, engine: Engine) -> None:
        """An answer ends with the token that completes it, and shows that token."""
        params = SamplingParams(max_tokens=30, structured_outputs=StructuredOutputsParams(regex="[a-c]{4}"))
        for given in (params, replace(params, ignore_eos=True), replace(params, stop_token_ids=[9])):
            (answer,) = engine.generate(PROMPT, given, use_tqdm=False)[0].outputs
            assert (len(answer.text), answer.finish_reason, answer.stop_reason) == (4, "stop", None)
            assert engine.get_tokenizer().decode(answer.token_ids) == answer.text

    def test_stop_strings_and_lengths_still_cut_an_answer(self, engine: Engine) -> None:
        form = StructuredOutputsParams(regex="[a-c]{4}-[a-c]{40}")
        params = SamplingParams(max_tokens=20, structured_outputs=form, bad_words=[])
        (answer,) = engine.generate(PROMPT, params, use_tqdm=False)[0].outputs
        assert answer.finish_reason == "length"
        (answer,) = engine.generate(PROMPT, replace(params, stop="-"), use_tqdm=False)[0].outputs
        assert (len(answer.text), answer.stop_reason) == (4, "-")

    def test_a_stop_token_ends_an_open_answer_where_it_may_end(self, engine: Engine) -> None:
        form = StructuredOutputsParams(regex="[a-c]{2,}")
        given = SamplingParams(
            max_tokens=30, structured_outputs=form, ignore_eos=True, stop_token_ids=[9], logit_bias={9: 100.0}
        )
        (answer,) = engine.generate(PROMPT, given, use_tqdm=False)[0].outputs
        assert (answer.finish_reason, answer.stop_reason) == ("stop", 9)
        assert len(engine.get_tokenizer().decode(answer.token_ids[:-2])) < 2 <= len(answer.text)

    def test_a_fault_of_a_form_ends_its_request_and_nobody_elses(self, engine: Engine) -> None:
        heavy = "start: " + " | ".join(f'"a{nth}"' for nth in range(2500))  # too many to follow at once
        plain = SamplingParams(max_tokens=12, ignore_eos=True, seed=5)
        faulty = replace(plain, structured_outputs=StructuredOutputsParams(grammar=heavy))
        alone = engine.generate(PROMPT, plain, use_tqdm=False)[0].outputs[0]
        beside, ended = engine.generate([PROMPT, PROMPT], [plain, faulty], use_tqdm=False)
        assert beside.outputs[0] == alone
        (answer,) = ended.outputs
        assert answer.finish_reason == "abort"
        assert str(answer.stop_reason).startswith("structured_outputs: ")
        assert "2000" in str(answer.stop_reason)

    def test_tokens_that_contradict_a_form_end_the_request_by_name(self, engine: Engine) -> None:
        form = StructuredOutputsParams(regex="[0-9]+")
        (answer,) = engine.generate(
            PROMPT, SamplingParams(structured_outputs=form, allowed_token_ids=[5]), use_tqdm=False
        )[0].outputs
        assert (answer.finish_reason, answer.token_ids) == ("abort", [])
        assert "leave none of the tokens" in str(answer.stop_reason)

    def test_stop_tokens_that_a_form_needs_end_it_by_name(self, engine: Engine) -> None:
        """What comes behind them in a run of steps is no fault of the form."""
        texts = TokenTexts(engine.get_tokenizer())
        needed = [token for token in range(engine.config.vocab_size) if b"q" in texts.of(token)[1]]
        params = SamplingParams(
            structured_outputs=StructuredOutputsParams(regex="aq"), stop_token_ids=needed, temperature=0, max_tokens=20
        )
        (answer,) = engine.generate(PROMPT, params, use_tqdm=False)[0].outputs
        assert (answer.finish_reason, answer.text) == ("abort", "a")
        assert "stop_token_ids leave none of the tokens" in str(answer.stop_reason)


HOSTILE: list[tuple[str, Any, str]] = [
    ("json", {"type": "nonsense"}, "Invalid type: nonsense"),
    ("json", {"$ref": "#/nowhere"}, "does not exist"),
    ("json", {"$ref": "http://localhost/x.json"}, "does not fetch"),
    ("json", {"$ref": "file:///etc/passwd"}, "does not fetch"),
    ("json", {"not": {"pattern": "a"}}, "Unimplemented keys"),
    ("json", {"type": "integer", "minimum": 2, "maximum": 1}, "Unsatisfiable"),
    ("json", {"type": "string", "pattern": "("}, r"\(unclosed group\)"),
    ("json", {"$ref": "#"}, "no answer"),
    ("json", {"allOf": [{"type": "integer", "multipleOf": p} for p in (9973, 9967, 9949, 9941)]}, "processor time"),
    ("json", {"x-guidance": {"lenient": True}, "not": {}}, "without x-guidance"),
    ("regex", "(a", r"\(unclosed group\)"),
    ("regex", "a(?=b)", "look-ahead"),
    ("regex", r"(a)\1", "backreferences"),
    ("regex", r"[^\s\S]", "no answer"),
    ("regex", "(" * 2000 + "a" + ")" * 2000, "nest limit|nested|limit"),
    ("grammar", "start: nowhere", "nowhere"),
    ("grammar", 'start: "a', r"\(1\(10\): lexer error"),
    ("grammar", 'start: "a"\n%llguidance {"no_forcing": false}', "without %llguidance"),
    ("grammar", "start: r0\n" + "\n".join(f'r{n}:"a" r{n + 1}|"b"' for n in range(3000)) + '\nr3000:"x"', "stack"),
]


class TestRefusals:
    @pytest.mark.parametrize(("form", "value", "why"), HOSTILE, ids=[str(row[1])[:30] for row in HOSTILE])
    def test_uncompilable_grammar_is_refused_by_name_before_a_run(
        self, forms: Forms, form: str, value: Any, why: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A grammar that cannot be compiled is refused by name before it runs."""
        monkeypatch.setattr(structured_forms, "LIMITS", ProcessLimits(seconds=0.3))
        with assert_refused(form, why) as caught:
            begin(forms, **{form: value})
        assert len(str(caught.value)) < 700

    @pytest.mark.parametrize(
        ("given", "field"),
        [
            *(({}, "structured_outputs"), ({"regex": "a", "choice": ["a"]}, "structured_outputs")),
            ({"json_object": False}, "structured_outputs"),
            *bad_values(json=["[1]", "{", 3, "[" * 100_000], regex=["", "a" * (MAX_CHARACTERS + 1)]),
            *bad_values(json=[{"const": one} for one in (float("nan"), object(), "\ud800", "x" * MAX_CHARACTERS)]),
            *bad_values(choice=["yes", [], ["a", "a"], ["a", ""], [str(nth) for nth in range(MAX_CHOICES + 1)]]),
            *bad_values(grammar=[b"start: A"], json_object=[1]),
            ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern"),
            ({"json_object": True, "whitespace_pattern": " ", "disable_any_whitespace": True}, "whitespace_pattern"),
            ({"json_object": True, "disable_any_whitespace": "no"}, "disable_any_whitespace"),
            *(
                ({"regex": "a", "reasoning": marks}, "reasoning")
                for marks in ([None, "</think>"], ["<think>", ""], ["</think>"])
            ),
            ({"regex": "a", "reasoning_tokens": 3}, "reasoning_tokens"),
            ({"regex": "a", "openings": ["b"]}, "openings"),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_a_form_that_is_none_is_refused_where_it_is_written(self, given: dict[str, Any], field: str) -> None:
        with assert_refused(field):
            StructuredOutputsParams(**given)

    def test_a_self_containing_schema_is_no_json(self) -> None:
        schema: dict[str, Any] = {"type": "array"}
        schema["items"] = schema
        with pytest.raises(InvalidValueError, match="Circular"):
            StructuredOutputsParams(json=schema)

    def test_a_schema_is_kept_as_it_was(self) -> None:
        schema = {"type": "object", "properties": {"b": {}, "a": {}}}
        form = StructuredOutputsParams(json=schema)
        schema["type"] = "array"
        assert form.json == '{"type":"object","properties":{"b":{},"a":{}}}'
        assert form == StructuredOutputsParams(json='{"type": "object", "properties": {"b": {}, "a": {}}}')

    def test_params_say_where_they_contradict_a_form(self) -> None:
        form = StructuredOutputsParams(regex="a")
        for given, field in bad_values(min_tokens=[1], structured_outputs=["a"]):
            with assert_refused(field):
                SamplingParams(**{"structured_outputs": form, **given})

    def test_an_engine_without_a_tokenizer_knows_no_forms(self, make_engine: MakeEngine) -> None:
        params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
        with assert_refused("structured_outputs", "no tokenizer"):
            make_engine().generate(PROMPT, params, use_tqdm=False)

    def test_a_tokenizer_whose_tokens_have_no_bytes_is_refused(self, tmp_path: Path) -> None:
        save_word_level(tmp_path)
        with pytest.raises(InvalidValueError, match="stands for single bytes"):
            begin(Forms(load_tokenizer(tmp_path), 5), regex="a")

    def test_without_llguidance_an_extra_is_named(self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "llguidance", None)
        with pytest.raises(MissingExtraError, match=r"structured_outputs needs the package 'llguidance'.*structured"):
            begin(Forms(tokenizer, tokenizer.vocab_size), regex="a")


def test_schema_within_a_grammar_is_written_as_alone() -> None:
    """A schema within a grammar is written as a schema by itself is."""
    from d3engine.text.structured.source import grammar_of

    alone = grammar_of(StructuredOutputsParams(json={"type": "integer"})).splitlines()[0].removeprefix("start: ")
    text = 'start: "%json {}" /%json [{]}/ inner // %json {}\ninner: %json {"type": "integer"} "."'
    written = grammar_of(StructuredOutputsParams(grammar=text))
    assert written.startswith(text.replace('%json {"type": "integer"}', alone))
    with pytest.raises(InvalidValueError, match="x-guidance"):
        grammar_of(StructuredOutputsParams(grammar='start: %json {"x-guidance": {}}'))
