"""lm-evaluation-harness itself over our engine, offline, against its own HF backend on the same tiny model.
The tasks are made here from a few items: of the public data sets where they lie beside the repository, and of the
generated problems anywhere."""

import json
import re
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
from tiny_models import TinyLlama
from typer.testing import CliRunner

from d3engine.cli import app
from d3engine.research.evaluation.accuracy import paired, wilson_interval
from d3engine.research.evaluation.procedural import all_problems

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install '.[eval]'")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install '.[test]'")
pytest.importorskip("datasets", reason="datasets is not installed: pip install '.[eval]'")

import datasets
from harness_tasks import assert_same, choice, evaluate, generation, write_task
from huggingface_hub import constants
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from d3engine.integrations.lm_eval import D3EngineLM

CACHE = {"kv_cache_memory_bytes": 2**24}
pytestmark = pytest.mark.usefixtures("offline")


def test_generated_problems_score_as_with_the_hf_backend(tmp_path: Path, tiny: TinyLlama, theirs: HFLM) -> None:
    """The harness gives the scores of its HF backend on generated problems."""
    # The model by name and arguments, as `simple_evaluate` and `lm_eval --model_args` take them.
    words = list(islice(all_problems("word-problems", "test", 0), 3))
    swaps = list(islice(all_problems("tracking-shuffled-objects", "test", 0), 3))
    items = [{"q": p.question, "a": str(p.answer), "choices": ["7", str(p.answer), "ball"]} for p in (*words, *swaps)]
    prompt = "Question: {{q}}\nAnswer:"
    write_task(tmp_path, "own_generation", items, **generation(prompt, "{{a}}", ["\n", "e"], 8))
    write_task(tmp_path, "own_choice", items, **choice(prompt, "{{choices}}", "{{choices.index(a)}}"))
    tasks = ["own_generation", "own_choice"]
    arguments = f"pretrained={tiny.directory},depth=full,kv_cache_memory_bytes={2**24}"
    found = evaluate(tmp_path, tasks, model="d3engine", model_args=arguments, num_fewshot=0)
    assert_same(found, evaluate(tmp_path, tasks, model=theirs, num_fewshot=0), tasks)


def test_gsm8k_and_bbh_items_score_as_with_the_hf_backend(
    tmp_path: Path, shared_data: Path, ours: D3EngineLM, theirs: HFLM
) -> None:
    """The harness gives the scores of its HF backend on items of GSM8K and BBH."""
    with (shared_data / "gsm8k" / "test.jsonl").open() as lines:
        gsm8k = [json.loads(line) for line in islice(lines, 3)]
    bbh = json.loads((shared_data / "bbh" / "boolean_expressions.json").read_text())["examples"][:4]
    question, expression = "Question: {{question}}\nAnswer:", "Q: {{input}}\nA:"
    write_task(tmp_path, "own_gsm8k", gsm8k, **generation(question, "{{answer}}", ["Question:", "</s>"], 8))
    write_task(tmp_path, "own_bbh", bbh, **generation(expression, "{{target}}", ["</s>", "Q", "\n\n"], 8))
    write_task(tmp_path, "own_bbh_choice", bbh, **choice(expression, "['True', 'False']", "{{target}}"))
    tasks = ["own_gsm8k", "own_bbh", "own_bbh_choice"]
    assert_same(evaluate(tmp_path, tasks, model=ours), evaluate(tmp_path, tasks, model=theirs), tasks)


def test_the_command_compares_policies_on_tasks_of_the_harness(tmp_path: Path) -> None:
    """The bundled model at full depth and far too shallow, on its own problems and on a perplexity."""
    items = [{"q": p.question, "a": str(p.answer)} for p in islice(all_problems("word-problems", "test", 0), 3)]
    fields = generation("Question: {{q}}\nAnswer:", "{{a}}", ["\n"], 64)
    strict = [{"function": "regex", "regex_pattern": "#### (-?[0-9]+)"}, {"function": "take_first"}]
    write_task(tmp_path, "own_words", items, **fields, filter_list=[{"name": "strict", "filter": strict}])
    rolling = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{q}}"}
    write_task(tmp_path, "own_perplexity", items, **rolling, metric_list=[{"metric": "bits_per_byte"}])
    words = ["eval", "demo", "--tasks", "own_words,own_perplexity", "--include-path", str(tmp_path), "--compare-full"]
    shallow = ["--depth", "d3 alpha=0.5 start=0.3", "--limit", "3", "--kv-cache-memory-bytes", str(2**25)]
    result = CliRunner().invoke(app, [*words, *shallow, "--json"])
    assert result.exit_code == 0, result.output
    full, less = json.loads(result.stdout[result.stdout.index("{\n") :])["harness"]
    exact_match, perplexity = full["metrics"]
    assert (exact_match["task"], exact_match["metric"]) == ("own_words", "exact_match (strict)")
    assert (exact_match["value"], exact_match["questions"]) == (1.0, 3)
    assert exact_match["interval_95"]["low"] == pytest.approx(wilson_interval(3, 3).low)
    assert perplexity["interval_95"] is None
    assert 0 < perplexity["value"] == pytest.approx(less["metrics"][1]["value"])
    assert less["metrics"][0]["value"] < 1
    assert full["generated"]["layers"] == 16 * full["generated"]["tokens"]
    assert 4 * less["generated"]["tokens"] < less["generated"]["layers"] < 8 * less["generated"]["tokens"]
    (difference, of_perplexity), (none, _) = ([m["minus_first"] for m in run["metrics"]] for run in (less, full))
    right = [True] * 3, [True] * round(3 * less["metrics"][0]["value"]) + [False] * 3
    expected = paired(right[0], right[1][:3])  # of three that are all right at first, any order gives the same
    assert difference == asdict(expected)
    assert none is None
    assert of_perplexity is None


def test_tables_and_page_show_paired_differences_with_drafts(tmp_path: Path) -> None:
    """Tables and page of the harness show paired differences, of drafting policies too."""
    items = [{"q": p.question, "a": str(p.answer)} for p in islice(all_problems("word-problems", "test", 0), 2)]
    write_task(tmp_path, "own_words", items, **generation("Question: {{q}}\nAnswer:", "{{a}}", ["\n"], 12))
    page = tmp_path / "page.html"
    words = ["eval", "demo", "--tasks", "own_words", "--include-path", str(tmp_path), "--compare-full"]
    policies = ["--depth", "lossless alpha=0.8 start=0.7", "--kv-cache-memory-bytes", str(2**25)]
    result = CliRunner().invoke(app, [*words, *policies, "--html", str(page)])
    assert result.exit_code == 0, result.output
    interval = paired([False] * 2, [False] * 2).interval
    cell = f"+0.0 ({100 * interval.low:+.1f} to {100 * interval.high:+.1f})"
    assert cell in result.output
    text = page.read_text()
    assert f"<td>{cell}</td>" in text
    assert text.count("<circle") == 2
    assert re.search(r"Lossless.* \d+\.\d\d +- +\d\.\d{3}x +-", result.output)
    assert "Drafts:" in result.output


def test_without_the_data_of_a_task_one_line_says_what_to_do(tmp_path: Path) -> None:
    write_task(tmp_path, "own_words", [{"q": "?", "a": "1"}], **generation("{{q}}", "{{a}}", ["\n"], 4))
    (tmp_path / "own_words.jsonl").unlink()
    result = CliRunner().invoke(app, ["eval", "demo", "--tasks", "own_words", "--include-path", str(tmp_path)])
    assert result.exit_code == 2
    (line,) = (line for line in result.output.splitlines() if line.startswith("error:"))
    assert "own_words" in line
    assert "--data" in line
    assert "--include-path" in line


UNREACHABLE = "http://127.0.0.1:9"
"""Where nothing listens."""


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    for settings, endpoint in ((constants, "ENDPOINT"), (datasets.config, "HF_ENDPOINT")):
        monkeypatch.setattr(settings, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(settings, endpoint, UNREACHABLE)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", False)


@pytest.mark.usefixtures("no_hub")
def test_a_hub_that_does_not_answer_is_asked_once_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)  # before the hub's library asks again
    write_task(tmp_path, "own_words", [], **generation("{{q}}", "{{a}}", ["\n"], 4), dataset_path="ada/questions")
    words = ["eval", "demo", "--tasks", "own_words", "--include-path", str(tmp_path), "--depth", "full"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert not waits
    (line,) = (line for line in result.output.splitlines() if line.startswith("error:"))
    assert line.startswith(f"error: the data of own_words cannot be loaded ({UNREACHABLE} cannot be reached: ")
    assert "--data DIR reads gsm8k, bbh, humaneval and mbpp from a folder" in line


@pytest.mark.usefixtures("no_hub")
def test_a_task_with_data_of_its_own_needs_no_hub(tmp_path: Path) -> None:
    write_task(tmp_path, "own_words", [{"q": "?", "a": "1"}], **generation("{{q}}", "{{a}}", ["\n"], 4))
    words = ["eval", "demo", "--tasks", "own_words", "--include-path", str(tmp_path), "--depth", "full", "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert constants.HF_HUB_OFFLINE is False, "whoever asks next may have a network again"


def test_a_task_that_the_harness_does_not_have_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))  # thousands of files
    result = CliRunner().invoke(app, ["eval", "demo", "--tasks", "no_such_task", "--include-path", str(tmp_path)])
    assert result.exit_code == 2
    assert "no_such_task" in result.output
