"""lm-evaluation-harness over HTTP (its `local-completions`): the figures of our own backend in this process."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from demo_server import demo_server

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install '.[eval]'")
pytest.importorskip("tenacity", reason="lm-eval[api] is not installed: make test-with-clients does it")
pytest.importorskip("tiktoken", reason="lm-eval[api] is not installed: make test-with-clients does it")

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

import d3engine
from d3engine.integrations.lm_eval import D3EngineLM
from d3engine.research.evaluation.procedural import all_problems

pytestmark = pytest.mark.usefixtures("offline")
DEMO = Path(d3engine.__file__).parent / "demo_model"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with demo_server(depth=d3engine.FullDepth()) as address:
        yield f"{address}/v1/completions"


def write_tasks(folder: Path) -> list[str]:
    """A task that is scored by log-likelihoods, and one that generates."""
    problems = islice(all_problems("word-problems", "test", 0), 12)
    items = [{"prompt": one.prompt, "answer": str(one.answer), "choices": ["7", "12"]} for one in problems]
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "items.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{prompt}}",
    }
    chosen = {"task": "chosen", "output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": 0}
    chosen |= {"metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]}
    written = {
        "task": "written",
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "do_sample": False, "max_gen_toks": 48},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    for task in (chosen, written):
        (folder / f"{task['task']}.yaml").write_text(json.dumps({**common, **task}))  # JSON is YAML
    return ["chosen", "written"]


def test_task_over_http_has_the_samples_of_this_process(url: str, tmp_path: Path) -> None:
    """A task over HTTP has the samples of the same task in this process."""
    tasks = write_tasks(tmp_path)
    arguments = f"base_url={url},model=demo,tokenizer={DEMO},tokenizer_backend=huggingface,add_bos_token=True"
    arguments += ",max_length=1023,num_concurrent=1"

    def evaluate(**model: Any) -> Any:
        manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
        return simple_evaluate(tasks=tasks, task_manager=manager, bootstrap_iters=0, log_samples=True, **model)

    remote = evaluate(model="local-completions", model_args=arguments)
    local = evaluate(model=D3EngineLM("demo", depth="full", kv_cache_memory_bytes=2**25))
    for task in tasks:
        for there, here in zip(remote["samples"][task], local["samples"][task], strict=True):
            if task == "written":
                assert there["resps"] == here["resps"]
            else:
                for (found, greedy), (wanted, is_greedy) in zip(
                    there["filtered_resps"], here["filtered_resps"], strict=True
                ):
                    assert found == pytest.approx(wanted, abs=1e-3)
                    assert greedy == is_greedy
        assert remote["results"][task] == local["results"][task]
