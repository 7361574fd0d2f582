"""`d3engine eval` on a few problems: the same figures for people and for machines, and paired with full depth."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from d3engine.cli import app
from d3engine.evaluation.accuracy import wilson_interval

D3_FLAGS = ("--depth", "d3", "--alpha", "0.9", "--start", "0.6")
SMALL = ("--limit", "6", "--max-tokens", "48", "--device", "cpu", "--kv-cache-memory-bytes", str(2**25))


def evaluate(*arguments: str) -> Any:
    try:
        runner = CliRunner(mix_stderr=False)  # type: ignore[call-arg]  # before click 8.2
    except TypeError:
        runner = CliRunner()
    return runner.invoke(app, ["eval", "demo", *SMALL, *arguments])


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    result = evaluate(*D3_FLAGS, "--compare-full", "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_json_holds_both_scores_and_their_comparison(report: dict[str, Any]) -> None:
    full, decayed = report["scores"]
    assert (report["problems"], report["split"], report["seed"]) == (6, "test", 0)
    assert (full["depth"]["policy"], decayed["depth"]["policy"]) == ("full", "d3")
    for score in report["scores"]:
        interval = wilson_interval(score["correct"], 6)
        assert score["exact_match"] == score["correct"] / 6
        assert (score["interval_95"]["low"], score["interval_95"]["high"]) == (interval.low, interval.high)
        assert score["num_layers"] == 16
    assert full["realised_mean_layers"] == full["nominal_mean_layers"] == 16
    assert 9 < decayed["nominal_mean_layers"] <= decayed["realised_mean_layers"] < 12
    comparison = report["comparison"]
    assert comparison["difference"] == pytest.approx(decayed["exact_match"] - full["exact_match"])
    assert comparison["only_second"] - comparison["only_first"] == decayed["correct"] - full["correct"]


def test_the_table_has_the_figures_of_the_json(report: dict[str, Any]) -> None:
    result = evaluate(*D3_FLAGS, "--compare-full")
    assert result.exit_code == 0, result.output
    full, decayed = report["scores"]
    rows = {line[:26].strip(): line[26:].split("  ") for line in result.stdout.splitlines()}
    cells = [cell.strip() for cell in rows["exact match"] if cell.strip()]
    assert cells == [f"{score['exact_match']:.1%} ({score['correct']})" for score in (full, decayed)]
    assert f"{decayed['realised_mean_layers']:.2f} of 16" in result.stdout
    assert "D3, alpha 0.9, start 0.6 minus full depth: " in result.stdout
    assert "McNemar" in result.stdout


def test_one_policy_alone_has_no_comparison() -> None:
    result = evaluate("--depth", "full", "--split", "validation", "--seed", "3", "--json")
    report = json.loads(result.stdout)
    assert (report["comparison"], len(report["scores"]), report["split"], report["seed"]) == (None, 1, "validation", 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "0"], "limit"),
        (["--compare-full", "--depth", "full"], "--compare-full"),
        (["--depth", "d3"], "--depth"),
        (["--temperature", "-1"], "temperature"),
    ],
)
def test_what_is_not_allowed_is_refused_in_one_line(arguments: list[str], message: str) -> None:
    result = evaluate(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr.splitlines()[-1]


def test_an_unknown_task_or_split_is_refused() -> None:
    assert evaluate("--task", "poetry").exit_code == 2
    assert evaluate("--split", "secret").exit_code == 2
