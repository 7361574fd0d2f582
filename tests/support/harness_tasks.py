"""Tasks of lm-evaluation-harness as users write them, and the harness over them."""

import json
from pathlib import Path
from typing import Any

import pytest
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager


def write_task(folder: Path, name: str, items: list[dict[str, Any]], **fields: Any) -> None:
    """A YAML beside a data file."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(item) + "\n" for item in items))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        **fields,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML


def generation(prompt: str, target: str, until: list[str], tokens: int) -> dict[str, Any]:
    return {
        "output_type": "generate_until",
        "doc_to_text": prompt,
        "doc_to_target": target,
        "generation_kwargs": {"until": until, "do_sample": False, "max_gen_toks": tokens},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }


def choice(prompt: str, choices: str, target: str | int) -> dict[str, Any]:
    metrics = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
    asked = {"doc_to_text": prompt, "doc_to_choice": choices, "doc_to_target": target}
    return {"output_type": "multiple_choice", "metric_list": metrics, **asked}


def evaluate(folder: Path, tasks: list[str], **arguments: Any) -> dict[str, Any]:
    """What the harness finds of the tasks of a folder; the arguments are `simple_evaluate`'s."""
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found: dict[str, Any] = simple_evaluate(
        tasks=tasks, task_manager=manager, bootstrap_iters=0, log_samples=True, **arguments
    )
    return found


def responses(found: dict[str, Any], task: str) -> list[Any]:
    return [sample["resps"] for sample in sorted(found["samples"][task], key=lambda sample: sample["doc_id"])]


def assert_same(found: dict[str, Any], wanted: dict[str, Any], tasks: list[str]) -> None:
    """Equal texts and figures, and log-likelihoods within 0.002."""
    for task in tasks:
        for own, their in zip(responses(found, task), responses(wanted, task), strict=True):
            if isinstance(own[0][0], str):
                assert own == their
            else:
                pairs = zip(own, their, strict=True)
                assert all(a[0][0] == pytest.approx(b[0][0], abs=2e-3, rel=1e-5) for a, b in pairs)
                assert [a[0][1] for a in own] == [b[0][1] for b in their]
        scores, their_scores = found["results"][task], wanted["results"][task]
        numbers = {name: value for name, value in scores.items() if isinstance(value, float)}
        assert numbers
        assert numbers == pytest.approx({name: their_scores[name] for name in numbers})
