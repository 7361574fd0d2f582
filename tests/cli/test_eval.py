"""`d3engine eval` on a few problems: the same figures for people and for machines, and paired with full depth."""

import json
import shutil
import sys
from collections import Counter
from operator import eq
from pathlib import Path
from typing import Any

import pytest
from invoking import invoke, refused, report_of, succeed
from watching import watch

from d3engine.cli import eval as command
from d3engine.engine.engine import Engine
from d3engine.engine.model_directory import model_directory
from d3engine.errors import D3EngineError, install_command
from d3engine.research.evaluation.accuracy import wilson_interval

D3_FLAGS = ("--depth", "d3 alpha=0.9 start=0.6")
SMALL = ("--limit", "4", "--max-tokens", "48", "--device", "cpu", "--kv-cache-memory-bytes", str(2**25))


EVAL = ("eval", "demo", *SMALL)


def scores_of(*arguments: str) -> dict[str, Any]:
    """The report of the only benchmark."""
    (found,) = report_of([*EVAL, *arguments])["benchmarks"]
    return dict(found)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return report_of([*EVAL, *D3_FLAGS, "--compare-full"])


def test_json_holds_both_scores_and_their_comparison(report: dict[str, Any]) -> None:
    (found,) = report["benchmarks"]
    full, decayed = found["scores"]
    assert (found["problems"], found["about"], report["seed"]) == (4, "test split, seed 0", 0)
    assert (full["depth"]["policy"], decayed["depth"]["policy"]) == ("full", "d3")
    for score in found["scores"]:
        interval = wilson_interval(score["correct"], 4)
        assert score["exact_match"] == score["correct"] / 4
        assert (score["interval_95"]["low"], score["interval_95"]["high"]) == (interval.low, interval.high)
        assert score["num_layers"] == 16
        assert score["tokens_per_second"] == pytest.approx(score["tokens"] / score["seconds"])
    assert full["realised_mean_layers"] == full["nominal_mean_layers"] == 16
    assert full["realised_flops_ratio"] == full["nominal_flops_ratio"] == 1
    assert 9 < decayed["nominal_mean_layers"] <= decayed["realised_mean_layers"] < 12
    assert 1.3 < decayed["realised_flops_ratio"] <= decayed["nominal_flops_ratio"] < 16 / 9
    assert full["minus_first"] is None
    comparison = decayed["minus_first"]
    assert comparison["difference"] == pytest.approx(decayed["exact_match"] - full["exact_match"])
    assert comparison["only_second"] - comparison["only_first"] == decayed["correct"] - full["correct"]


def test_the_table_and_the_page_have_the_figures_of_the_json(report: dict[str, Any], tmp_path: Path) -> None:
    result = succeed([*EVAL, *D3_FLAGS, "--compare-full", "--html", str(tmp_path / "page.html")])
    page = (tmp_path / "page.html").read_text()
    for line, score in zip(("Full depth", "D3, alpha 0.9, start 0.6"), report["benchmarks"][0]["scores"], strict=True):
        quality, cost = (row for row in result.stdout.splitlines() if row.startswith(line))
        exact_match = f"{score['exact_match']:.1%} ({score['correct']})"
        assert exact_match in quality
        assert exact_match in page
        assert f"{score['realised_mean_layers']:.2f}" in cost
        assert f"{score['realised_flops_ratio']:.3f}x" in cost
    assert "McNemar" in result.stdout


def test_eval_policies_run_in_order_compared_with_the_first(tmp_path: Path) -> None:
    """Policies run in their order, and each is compared with the first."""
    policies = ("--depth", "d3 alpha=0.9 start=0.7", "--depth", "full")
    short = ("--limit", "2", "--max-tokens", "24", "--split", "validation", "--answers", str(tmp_path / "kept.jsonl"))
    baselines = ("--baselines", "--exit-questions", "1")
    found = scores_of(*policies, *baselines, "--tasks", "word-problems", *short)
    kept = [json.loads(line) for line in (tmp_path / "kept.jsonl").read_text().splitlines()]
    exits = Counter(row["policy"] for row in kept if row["policy"].startswith("Early exit"))
    assert sorted(exits.values()) == [1] * (len(exits) - 1) + [2], "tried on one question, the one that is taken on two"
    names = [score["depth"]["policy"] for score in found["scores"]]
    assert names == ["d3", "skipdecode", "unified", "tail-skip", "full", "early-exit"]
    means = [score["nominal_mean_layers"] for score in found["scores"]]
    assert means[1:4] == pytest.approx([means[0]] * 3, abs=0.5)
    assert [score["minus_first"] is None for score in found["scores"]] == [True, False, False, False, False, False]
    d3, skip_decode, full = (
        [row["text"] for row in kept if row["policy"].startswith(name)] for name in ("D3", "SkipDecode", "Full depth")
    )
    same = [sum(map(eq, d3, texts)) for texts in (skip_decode, full)]
    assert [found["scores"][nth]["same_answers"] for nth in (0, 1, 4)] == [None, *same]
    assert found["about"] == "validation split, seed 0"


def test_eval_shared_prompts_are_computed_once() -> None:
    """Prompts that policies share are computed once, and the answers stay the same."""
    asked = ("--depth", "full", "--depth", "d3 alpha=0.8 start=0.4", "--tasks", "word-sorting", "--num-fewshot", "2")
    small = ("--limit", "3", "--max-tokens", "12")
    apart, shared = (scores_of(*asked, *small, *more)["scores"] for more in ((), ("--share-prompts",)))
    for one, other in zip(apart, shared, strict=True):
        for name in ("correct", "tokens", "layers_run", "prompt_tokens"):
            assert one[name] == other[name]
    cached = [score["cached_prompt_tokens"] for score in shared]
    assert apart[0]["cached_prompt_tokens"] == 0
    assert cached[0] > shared[0]["prompt_tokens"] / 3, "later questions find the examples that the first one left"
    left = shared[1]["prompt_tokens"] - cached[1]
    assert 0 < left <= 3 * 16, "a prompt's last block, which has to yield its first token, is all that is done again"
    assert "came from the prefix cache" in succeed([*EVAL, *asked, *small, "--share-prompts"]).stdout


def test_tasks_are_measured_one_after_another_and_side_by_side() -> None:
    short = ("--limit", "2", "--max-tokens", "12")
    tasks = ("--tasks", "word-problems,word-sorting", "--num-fewshot", "1")
    result = succeed([*EVAL, "--depth", "full", *tasks, *short])
    assert "word-sorting: 2 questions, test split, seed 0, 1 shots" in result.stdout
    assert "All benchmarks" in result.stdout


def test_questions_of_files_are_read_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / "gsm8k").mkdir()
    lines = [{"question": f"What is {i}?", "answer": f"#### {i}"} for i in range(12)]
    for name in ("train", "test"):
        (tmp_path / "gsm8k" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = ("--data", str(tmp_path), "--tasks", "gsm8k")
    found = scores_of(*data, "--limit", "2", "--num-fewshot", "2", "--max-tokens", "12")
    assert (found["task"], found["problems"], found["about"]) == ("gsm8k", 2, "test split, 2 shots, seed 0")


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, whose kernel confines the code")
def test_eval_functions_are_judged_by_running_them(tmp_path: Path) -> None:
    """Code is asked for in the chat form and judged in a sandbox, under each policy; kept answers are judged again."""
    asked = ("--tasks", "functions", "--chat", "--limit", "2", "--max-tokens", "8", "--compare-full", *D3_FLAGS)
    kept = tmp_path / "kept.jsonl"
    found = scores_of(*asked, "--share-prompts", "--answers", str(kept))
    assert (found["problems"], found["about"]) == (2, "test split, as a chat")
    assert [score["verdicts"] for score in found["scores"]] == [{"no code": 2}] * 2
    assert found["scores"][1]["minus_first"]["difference"] == 0
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    right = (
        "```python\ndef minutes_between(start, end):\n    a, b = (int(t[:2]) * 60 + int(t[3:]) for t in (start, end))\n"
    )
    kept.write_text("".join(json.dumps(row | {"text": f"{right}    return b - a\n```"}) + "\n" for row in rows))
    again = scores_of(*asked, "--share-prompts", "--answers", str(kept))
    assert [score["verdicts"] for score in again["scores"]] == [{"right": 1, "no code": 1}] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "functions", "--num-fewshot", "2"], "--num-fewshot must be 0 with functions"),
        (["--tasks", "functions", "--split", "train"], "--split must be 'test'"),
        (["--tasks", "word-sorting", "--chat"], "--chat must be given with functions"),
        (["--tasks", "arc_easy", "--chat"], "--chat must be given with functions"),
        (["--limit", "0"], "limit"),
        (["--tasks", "word-sorting,arc_easy"], "--tasks"),
        (["--tasks", "word-sorting,word-sorting"], "--tasks"),
        (["--depth", "deep"], "--depth"),
        (["--depth", "full", "--depth", "full"], "--depth must be a different one each time; got 'Full depth'"),
        (["--depth", "full", "--baselines"], "--baselines"),
        (["--data", "no/such/folder", "--tasks", "gsm8k"], "--data"),
        (["--tasks", "arc_easy", "--temperature", "1"], "--temperature"),
        (["--tasks", "arc_easy", "--split", "train"], "--split"),
        (["--split", "secret"], "--split"),
        (["--include-path", "."], "--include-path"),
        (["--depth", "d3 alpha=0.9 start=0.6", "--exit-questions", "4"], "--exit-questions"),
        (["--depth", "d3 alpha=0.9 start=0.6", "--baselines", "--exit-questions", "0"], "--exit-questions"),
        (["--depth", "tail-skip mean-layers=12"], "--depth 'tail-skip mean-layers=12' must be given with decay-steps"),
        (
            ["--depth", "lossless draft=d3 alpha=0.9 start=0.6"],
            "--depth 'lossless draft=d3 alpha=0.9 start=0.6': draft must be absent",
        ),
        (["--depth", "d3 alpha=0.9 start=0.6 alpha=0.8"], "once"),
        (["--compare-full", "--depth", "full"], "--compare-full"),
        (["--depth", "d3"], "--depth"),
        (["--temperature", "-1"], "temperature"),
    ],
)
def test_what_is_not_allowed_is_refused_in_one_line(arguments: list[str], message: str) -> None:
    assert message in refused([*EVAL, *arguments]).splitlines()[-1]


def test_without_the_harness_its_tasks_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("lm_eval", "lm_eval.tasks"):  # both: what is imported already is not looked for in its package
        monkeypatch.setitem(sys.modules, module, None)
    stderr = refused([*EVAL, "--tasks", "arc_easy"])
    assert install_command("eval") in stderr
    assert "--tasks arc_easy, which is not one of word-problems, " in stderr


def test_eval_policies_decided_by_tokens_have_no_nominal_figures() -> None:
    """Policies that tokens decide have no nominal figures, and FLOPs ratios that count all that ran."""
    policies = ("--depth", "lossless alpha=0.8 start=0.7", "--depth", "early-exit threshold=0.5")
    short = ("--limit", "2", "--max-tokens", "24")
    drafted, early = scores_of(*policies, *short)["scores"]
    assert drafted["realised_mean_layers"] > 16
    assert drafted["realised_flops_ratio"] < 1
    assert early["realised_mean_layers"] < 16
    assert early["lm_head_rows"] > early["tokens"]
    layers_alone = 16 / early["realised_mean_layers"]
    assert early["realised_flops_ratio"] < layers_alone
    for score in (drafted, early):
        assert score["nominal_mean_layers"] is score["nominal_flops_ratio"] is None


def test_eval_prints_finished_tables_when_a_later_task_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables of a finished benchmark are printed although a later one fails."""

    def failing(engine: Any, benchmark: Any, *arguments: Any) -> Any:
        if benchmark.name == "word-sorting":
            raise D3EngineError("the second benchmark fails")
        return measured(engine, benchmark, *arguments)

    measured = command._measure
    monkeypatch.setattr(command, "_measure", failing)
    tasks = ("--tasks", "word-problems,word-sorting")
    result = invoke([*EVAL, "--depth", "full", *tasks, "--limit", "1", "--max-tokens", "4"])
    assert result.exit_code == 2
    assert "word-problems: cost" in result.stdout


def test_eval_too_long_prompt_is_refused_before_any_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that is too long is refused before any question is asked."""

    def asked(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("a question was asked")

    monkeypatch.setattr(Engine, "generate", asked)
    tasks = ("--tasks", "word-problems,tracking-shuffled-objects", "--num-fewshot", "9")
    stderr = refused([*EVAL, "--depth", "full", *tasks])
    assert "question 1 of tracking-shuffled-objects must be shorter" in stderr


def test_a_run_goes_on_from_the_answers_of_one_that_was_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = watch(monkeypatch, Engine, "generate", lambda engine, prompts, *_, **__: len(prompts))
    kept = tmp_path / "answers.jsonl"
    policies = ("--depth", "full", "--depth", "d3 alpha=0.9 start=0.4", "--max-tokens", "12")

    def scores(*more: str) -> list[dict[str, Any]]:
        asked.clear()
        return list(scores_of(*policies, *more)["scores"])

    def without_time(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{key: value for key, value in one.items() if "second" not in key} for one in found]

    straight = scores("--limit", "3")
    scores("--limit", "2", "--answers", str(kept))
    with kept.open("a") as file:
        file.write('{"key": "what was being written when the run')
    assert without_time(scores("--limit", "3", "--answers", str(kept))) == without_time(straight)
    assert asked == [1, 1], "the third question under each policy"
    scores("--limit", "3", "--answers", str(kept))
    assert asked == []
    assert {json.loads(line)["policy"] for line in kept.read_text().splitlines()} == {
        "Full depth",
        "D3, alpha 0.9, start 0.4",
    }
    scores("--limit", "3", "--answers", str(kept), "--bad-words", "Adding")
    assert asked == [1, 2, 3], "another way of sampling is another answer; the first question is asked beforehand"


def test_kept_answers_are_of_the_same_engine_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another KV cache gives other answers, and a longer context ends them elsewhere."""
    asked = watch(monkeypatch, Engine, "generate", lambda engine, prompts, *_, **__: len(prompts))
    run = ("--depth", "full", "--limit", "2", "--max-tokens", "60", "--answers", str(tmp_path / "kept.jsonl"))

    def tokens(*more: str) -> tuple[int, list[int]]:
        asked.clear()
        (score,) = scores_of(*run, *more)["scores"]
        return score["tokens"], list(asked)

    short, first = tokens("--max-model-len", "45")
    whole, again = tokens()
    assert (first, again) == ([1, 1], [1, 1]), "the first question is asked beforehand"
    assert short < whole == tokens()[0]
    assert asked == []
    assert tokens("--kv-cache-dtype", "fp8")[1] == [1, 1]


def test_eval_of_a_named_depth_reads_no_stale_d3_json(tmp_path: Path) -> None:
    """A setting of other weights refuses `auto` alone, as its message says."""
    model = tmp_path / "model"
    shutil.copytree(model_directory("demo"), model)
    content = json.loads((model / "d3.json").read_text())
    (model / "d3.json").write_text(json.dumps({**content, "fingerprint": "sha256:0"}))
    run = ["eval", str(model), "--limit", "1", "--max-tokens", "4", "--device", "cpu"]
    assert report_of([*run, "--depth", "full"])["benchmarks"][0]["problems"] == 1
    assert "or name a depth" in refused([*run, "--depth", "full", "--depth", "auto"])
    out = tmp_path / "own.jsonl"
    words = ["depth", "answers", str(model), "--out", str(out), "--kinds", "arithmetic", "--texts", "1"]
    assert report_of([*words, "--held-out-texts", "1", "--max-tokens", "4"])["texts"] == 2


def test_eval_answers_that_cannot_be_kept_are_refused(tmp_path: Path) -> None:
    """A file that holds no answers is refused, and so are answers that cannot be kept."""
    kept = tmp_path / "answers.jsonl"
    for arguments, message in (
        (("--temperature", "1"), "must be absent unless answers are greedy"),
        (("--depth", "early-exit threshold=0.5 exit-batch=batch_min"), "company changes answers"),
    ):
        assert message in refused([*EVAL, "--answers", str(kept), *arguments]).splitlines()[-1]
    kept.write_text('{"key": "of something else"}\n')
    assert f"{kept}, line 1, is no answer of d3engine eval" in refused([*EVAL, "--answers", str(kept)])
    assert kept.read_text() == '{"key": "of something else"}\n'
    kept.write_text('{"mine": "without a line feed at its end"}')
    assert f"{kept} is no file of d3engine eval" in refused([*EVAL, "--answers", str(kept)])
    assert kept.read_text() == '{"mine": "without a line feed at its end"}'
