"""The search for a draft: it finds what a model can do without where that is known, and tells it by fresh questions."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from invoking import invoke

from d3engine import DraftAndVerify, Engine, FullDepth, SamplingParams
from d3engine.depth.policy import policy_from_dict
from d3engine.errors import InvalidValueError, install_command
from d3engine.research.calibration import draft_search
from d3engine.research.calibration.draft_search import Drafted, best_draft, score_draft, search_draft
from d3engine.research.evaluation.accuracy import shape_of

pytest.importorskip("optuna", reason="needs the extra draft")


@dataclass
class Known:
    """A model that can do without some parts at no loss, and loses much with any other."""

    attention: set[int]
    mlp: set[int]
    asked: list[DraftAndVerify] = field(default_factory=list)

    def __call__(self, policy: DraftAndVerify) -> Drafted:
        self.asked.append(policy)
        good = len(self.attention & set(policy.skip_attention)) + len(self.mlp & set(policy.skip_mlp))
        bad = len(policy.skip_attention) + len(policy.skip_mlp) - good
        return Drafted(policy, 10, 10, 5, 5, 1 + 0.1 * good - 0.3 * bad, seconds=1 + good)


def test_search_is_close_to_the_best_and_never_repeats() -> None:
    """The search finds a setting close to the best, and never tries one twice."""
    known = Known({0, 3}, {2})
    tried = search_draft(known, 5, 120, seed=1)
    assert len(known.asked) == len(set(known.asked)) == len(tried) < 120
    assert max(found.gain for found in tried[:5]) < best_draft(tried).gain
    assert best_draft(tried).gain >= 1.2  # of 1.3
    again = [found.policy for found in search_draft(Known({0, 3}, {2}), 5, 20, seed=1)]
    assert again == known.asked[: len(again)]


def test_by_the_clock_it_looks_for_tokens_in_a_second() -> None:
    tried = search_draft(Known({1}, {2}), 5, 8, by_clock=True)
    assert best_draft(tried, by_clock=True).tokens_per_second == max(10 / found.seconds for found in tried)


def test_gain_is_full_depth_weights_over_weights_read() -> None:
    """A gain is the weights that full depth reads over those that were read."""
    # By hand: every pass and every draft of the answers, counted from what the requests tell.
    with Engine("demo", depth=FullDepth(), device="cpu") as engine:
        prompts = ["Question: Tom has 5 pens. Tom finds 3. How many pens does Tom have now?\nAnswer:"] * 2
        policy, params = DraftAndVerify([13, 14], [14], 4, 0.0, None), SamplingParams(temperature=0, max_tokens=20)
        found = score_draft(engine, prompts, params, policy)
        engine.reset_prefix_cache()
        before = engine.scheduler.counters.steps
        drafted = 0
        outputs = engine.generate(prompts[:1], SamplingParams(temperature=0, max_tokens=20, depth=policy))
        steps = engine.scheduler.counters.steps - before
        drafted = outputs[0].metrics.num_drafted_tokens
        shape = shape_of(engine.config)
    full = shape.num_layers * shape.layer_parameters + shape.head_parameters
    draft = full - 2 * shape.attention_parameters - shape.mlp_parameters
    tokens = len(outputs[0].outputs[0].token_ids)
    passes = steps - drafted - 1  # a step each for a drafted token, the prompt, and all else at full depth
    assert found.drafted == 2 * drafted > 0
    assert found.gain == pytest.approx((tokens - 1) * full / (passes * full + drafted * draft))


def run(*arguments: str) -> Any:
    return invoke(["calibrate", *arguments])


def test_the_command_writes_a_draft_that_the_engine_then_takes(tmp_path: Path) -> None:
    out = tmp_path / "d3.json"
    small = ("--limit", "2", "--max-tokens", "16", "--device", "cpu")
    result = run("demo", "--draft", "6", *small, "--out", str(out))
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    policy = policy_from_dict(written["depth"])
    assert isinstance(policy, DraftAndVerify)
    assert policy.draft_rule(16).length == 8
    assert written["task"] == "word-problems"
    assert written["evidence"]["fresh"]["gain_in_weights_read"] > 1
    assert f"Written to {out}" in result.stdout
    assert result.stdout.isascii()


def test_with_chat_the_prompts_are_those_of_the_chat_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        draft_search,
        "score_draft",
        lambda engine, prompts, *given: (asked.extend(prompts), score_draft(engine, prompts, *given))[1],
    )
    (tmp_path / "gsm8k").mkdir()
    lines = [json.dumps({"question": f"What is {n} + 1?", "answer": f"It is.\n#### {n + 1}"}) for n in range(40)]
    for split in ("train", "test"):
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text("\n".join(lines))
    task = ("--task", "gsm8k", "--data", str(tmp_path), "--chat", "--num-fewshot", "0")
    small = ("--limit", "2", "--max-tokens", "8", "--device", "cpu", "--out", str(tmp_path / "d3.json"))
    result = run("demo", "--draft", "2", *task, *small)
    assert result.exit_code in (0, 3), result.output
    assert len(asked) >= 4, "two to search by, and two fresh ones"
    assert all(isinstance(prompt, dict) for prompt in asked)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--draft", "3", "--answers", "kept.jsonl"], "--answers must be absent beside --draft"),
        (["--draft", "0"], "--draft must be an integer of at least 1; got 0"),
        (["--draft", "3", "--alpha", "0.9"], "--alpha must be absent beside --draft"),
        (["--draft", "3", "--limit", "0"], "--limit must be an integer of at least 1; got 0"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = run("demo", *arguments, "--out", str(tmp_path / "d3.json"))
    assert result.exit_code == 2
    assert message in result.stderr


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(ImportError) as raised:
        search_draft(Known({1}, set()), 5, 3)
    assert install_command("draft") in str(raised.value)
    with pytest.raises(InvalidValueError, match="trials must be an integer of at least 1; got 0"):
        search_draft(Known({1}, set()), 5, 0)
