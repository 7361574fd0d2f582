"""`d3engine speculate tune`: every drafter answers the same prompts, and a token that one changes is found."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from invoking import invoke, refused, succeed

from d3engine import Engine, PromptLookup
from d3engine.engine.draft_model import DRAFT_TOKENS_FILE, DRAFT_VOCABULARY, head_tokens
from d3engine.engine.model_directory import model_directory
from d3engine.errors import ModelFormatError
from d3engine.model.config import ModelConfig
from d3engine.request.outputs import RequestOutput
from d3engine.research.speculation import Candidate, Measured, TuneReport, candidates_of
from d3engine.text.tokenizer import load_tokenizer

FEW = ["--max-tokens", "24", "--threads", "1"]
REPEATS = "Say it again: one two three four one two three four one two three"


def tuned(*words: str) -> tuple[int, dict[str, Any]]:
    result = invoke(["speculate", "tune", "demo", "--json", *FEW, *words])
    return result.exit_code, json.loads(result.stdout)


def test_every_drafter_and_length_answers_as_none_does(tmp_path: Path, native_library: None) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps([REPEATS, "Tom has 3 apples. He buys 4 more. How many?"]))
    code, found = tuned("--draft", "demo", "--prompts", str(prompts), "--lengths", "2,5", "--at-once", "2")
    assert code == 0
    rows = [(row["drafter"], (row["speculative_config"] or {}).get("num_speculative_tokens")) for row in found["rows"]]
    drafters = ("lookup", "suffix", "draft model")
    assert rows == [("none", None), *((one, k) for one in drafters for k in (2, 5, None)), ("none", None)]
    for row in found["rows"]:
        assert (row["equal"], row["answers"]) == (2, 2)
        assert row["tokens"] == found["rows"][0]["tokens"] > 2
    by_model = found["rows"][8]
    assert by_model["speculative_config"] == {"method": "draft_model", "model": "demo", "num_speculative_tokens": 5}
    assert by_model["acceptance_by_position"][0] == 1  # the model drafts for itself
    assert len(by_model["acceptance_by_position"]) == 5
    assert by_model["tokens_per_verification"] == 1 + by_model["accepted"] / by_model["verifications"] > 3
    assert found["rows"][0]["drafted"] == 0


def test_the_table_ends_with_the_option_to_copy(native_library: None) -> None:
    result = succeed(["speculate", "tune", "demo", "--lengths", "3", *FEW])
    assert "Best: " in result.stdout
    assert "lookup   as pays" in result.stdout
    assert "Without --draft-model, no model has drafted." in result.stdout


def test_a_token_changed_by_drafts_is_found_not_recommended(
    monkeypatch: pytest.MonkeyPatch, native_library: None
) -> None:
    generate = Engine.generate

    def broken(self: Engine, prompts: Any, params: Any, **options: Any) -> list[RequestOutput]:
        outputs = generate(self, prompts, params, **options)
        asked = params[0] if isinstance(params, list) else params
        if asked.depth == PromptLookup(3):
            outputs[0].outputs[0].token_ids[-1] += 1
        return outputs

    monkeypatch.setattr(Engine, "generate", broken)
    code, found = tuned("--lengths", "3")
    assert code == 1
    assert found["equal"] is False
    wrong = [row for row in found["rows"] if row["equal"] < row["answers"]]
    assert [row["speculative_config"] for row in wrong] == [{"method": "ngram", "num_speculative_tokens": 3}]
    assert found["best"] != wrong[0]["speculative_config"]


def measured(candidate: Candidate, seconds: float, equal: int = 2) -> Measured:
    return Measured(candidate, 100, seconds, 0, 0, 0, (), 2, equal)


def test_tune_best_is_equal_and_faster_than_both_plain_passes() -> None:
    """The best drafter is faster than both passes without drafts, and gives equal tokens."""
    first, second, third, *others = candidates_of([2], "draft")
    assert len(others) == 3
    assert (first.length, second.length) == (2, None)
    plain = Candidate(None)
    report = TuneReport("m", "draft", 2, measured(plain, 5), measured(plain, 4))
    slow, fast, wrong = measured(first, 4.5), measured(second, 3), measured(third, 1, equal=1)
    assert report.best is plain
    assert replace(report, candidates=[slow]).best is plain  # it is faster than their mean alone
    assert replace(report, candidates=[slow, wrong, fast]).best is second
    assert not replace(report, candidates=[wrong]).holds


def test_counted_tokens_are_proposed_before_the_first(tmp_path: Path) -> None:
    """A draft model with a cut head proposes the frequent tokens of a text, and as many of the first ones as fit."""
    shutil.copytree(model_directory("demo"), tmp_path / "draft")
    config = json.loads((tmp_path / "draft" / "config.json").read_text()) | {"vocab_size": 70_000}
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    own = ModelConfig.from_directory(tmp_path / "draft")
    plain = head_tokens(own, tmp_path / "draft").tolist()
    (tmp_path / "draft" / DRAFT_TOKENS_FILE).write_text("[60000, 5]")
    counted = head_tokens(own, tmp_path / "draft").tolist()
    assert set(counted) - set(plain) == set(range(60_000, 60_016))
    assert counted == sorted(counted)
    assert len(counted) == len(plain) >= DRAFT_VOCABULARY
    assert len(counted) % 32 == 0
    text = tmp_path / "text.txt"
    text.write_text("Tom has 5 pens and 5 cups.")
    result = succeed(["speculate", "tokens", str(tmp_path / "draft"), "--text", str(text)])
    assert "can propose 100.0%, before 100.0%" in result.stderr.replace("\n", " ")
    tokens = json.loads((tmp_path / "draft" / DRAFT_TOKENS_FILE).read_text())
    assert sorted(tokens) == sorted(set(load_tokenizer(tmp_path / "draft").encode(text.read_text())))
    (tmp_path / "draft" / DRAFT_TOKENS_FILE).write_text("[70000]")
    with pytest.raises(ModelFormatError, match="must be a list of the model's token ids"):
        head_tokens(own, tmp_path / "draft")
    said = refused(["speculate", "tokens", "demo", "--text", str(text)])
    assert "DRAFT_MODEL must be a model of 65,536 tokens at least" in said.replace("\n", " ")


@pytest.mark.parametrize("given", ["", "0", "33", "2,2", "two", "1,2,3,4,5,6,7,8,9"])
def test_lengths_that_no_draft_has_are_refused(given: str) -> None:
    said = refused(["speculate", "tune", "demo", "--lengths", given])
    assert "--lengths must be 1 to 8 different integers from 1 to 32" in said


def test_a_draft_model_of_another_vocabulary_is_refused_by_name(tiny_llama: Any, native_library: None) -> None:
    directory = str(tiny_llama(vocab_size=300).directory)
    words = ["speculate", "tune", "demo", "--draft", directory, "--max-model-len", "512", *FEW]
    assert "--draft-model must be " in refused(words)
