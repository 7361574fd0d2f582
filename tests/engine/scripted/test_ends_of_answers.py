"""An answer ends at its EOS, its stop or its length, and shows no more than it should."""

from itertools import pairwise
from typing import Any

import pytest
from fixture_types import MakeEngine
from scripted import EOS, LAYERS, executor_of, greedy, ids

from d3engine import SamplingParams


def answer(make_engine: MakeEngine, text: str, params: SamplingParams) -> Any:
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


def test_eos_ends_an_answer_and_is_not_shown(make_engine: MakeEngine) -> None:
    output = answer(make_engine, "one and two", greedy(40))
    assert (output.text, output.finish_reason, output.stop_reason) == (" one and two", "stop", None)
    assert output.token_ids[-1] == EOS
    assert len(output.depths) == len(output.token_ids)
    assert set(output.depths) == {LAYERS}


def test_ignore_eos_goes_on_to_the_length(make_engine: MakeEngine) -> None:
    length = len(ids(make_engine(), "one and two"))
    output = answer(make_engine, "one and two", greedy(length + 3, ignore_eos=True))
    assert output.finish_reason == "length"
    assert output.token_ids[length:] == [EOS] * 3
    assert output.text == " one and two"


def test_max_tokens_ends_an_answer_with_all_its_text(make_engine: MakeEngine) -> None:
    tokens = ids(make_engine(), "one and two and three")
    output = answer(make_engine, "one and two and three", greedy(4))
    assert (output.token_ids, output.finish_reason) == (tokens[:4], "length")
    engine = make_engine()
    assert engine.tokenizer is not None
    assert output.text == " " + engine.tokenizer.decode(tokens[:4])  # it stands behind a prompt


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", ["two", " and t", "e", ["nowhere", "two and"], ["two and", "o a"]])
def test_stop_string_ends_the_text_and_never_leaks(make_engine: MakeEngine, stop: Any, include: bool) -> None:
    """A stop string ends the text before or behind it and never leaks."""
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


def test_stop_string_at_last_token_is_a_stop_not_a_length(make_engine: MakeEngine) -> None:
    """A stop string at the last token allowed is a stop and no length."""
    tokens = ids(make_engine(), "one and two")
    output = answer(make_engine, "one and two", greedy(len(tokens), stop="two"))
    assert (output.text, output.finish_reason, output.stop_reason) == (" one and ", "stop", "two")


def test_a_stop_token_id_ends_an_answer_is_named_and_not_shown(make_engine: MakeEngine) -> None:
    tokens = ids(make_engine(), "one and two and three")
    output = answer(make_engine, "one and two and three", greedy(40, stop_token_ids=[tokens[3], 799]))
    first = tokens.index(tokens[3])
    assert (output.finish_reason, output.stop_reason) == ("stop", tokens[3])
    assert output.token_ids == tokens[: first + 1]
    engine = make_engine()
    assert engine.tokenizer is not None
    assert output.text == " " + engine.tokenizer.decode(tokens[:first])


@pytest.mark.parametrize("what", ["eos", "stop id", "stop string"])
def test_before_min_tokens_nothing_ends_an_answer(make_engine: MakeEngine, what: str) -> None:
    tokens = ids(make_engine(), "one one one one one one")
    count = 5 if what == "eos" else 6
    text = "one" if what == "eos" else "one one one one one one"
    stops = {"eos": {}, "stop id": {"stop_token_ids": [tokens[0]]}, "stop string": {"stop": "one"}}[what]
    at_once = answer(make_engine, text, greedy(30, **stops))
    later = answer(make_engine, text, greedy(30, min_tokens=count, **stops))
    assert len(at_once.token_ids) < count <= len(later.token_ids)
    if what != "stop string":  # EOS and stop ids are not even chosen before
        assert not {EOS, *stops.get("stop_token_ids", ())} & set(later.token_ids[: count - 1])


def test_special_tokens_are_hidden_unless_asked_for(make_engine: MakeEngine) -> None:
    """Special tokens are left out of the text unless asked for."""
    engine = make_engine()
    script = [*ids(engine, "a"), 1, *ids(engine, "b")]
    executor_of(engine).scripts[(7,)] = script
    shown = engine.generate([[7], [7]], [greedy(), greedy(skip_special_tokens=False)], use_tqdm=False)
    assert "<s>" not in shown[0].outputs[0].text
    assert "<s>" in shown[1].outputs[0].text
    assert shown[0].outputs[0].token_ids == shown[1].outputs[0].token_ids


def test_bad_words_are_never_completed(make_engine: MakeEngine) -> None:
    output = answer(make_engine, "one and two", greedy(12, bad_words=["and"], ignore_eos=True))
    assert " and" not in output.text
