"""lm-evaluation-harness over HTTP (its `local-completions`): the figures of our own backend in this process."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from demo_server import demo_server

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install '.[eval]'")
pytest.importorskip("tenacity", reason="lm-eval[api] is not installed: make test-with-clients does it")
pytest.importorskip("tiktoken", reason="lm-eval[api] is not installed: make test-with-clients does it")

from harness_tasks import assert_same, choice, evaluate, generation, write_task

import d3engine
from d3engine.integrations.lm_eval import D3EngineLM
from d3engine.research.evaluation.procedural import all_problems

pytestmark = pytest.mark.usefixtures("offline")
DEMO = Path(d3engine.__file__).parent / "demo_model"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with demo_server(depth=d3engine.FullDepth()) as address:
        yield f"{address}/v1/completions"


def test_task_over_http_has_the_samples_of_this_process(url: str, tmp_path: Path) -> None:
    """A task over HTTP has the samples of the same task in this process."""
    problems = islice(all_problems("word-problems", "test", 0), 12)
    items = [{"prompt": one.prompt, "answer": str(one.answer), "choices": ["7", "12"]} for one in problems]
    write_task(tmp_path, "chosen", items, **choice("{{prompt}}", "{{choices}}", 0))
    write_task(tmp_path, "written", items, **generation("{{prompt}}", "{{answer}}", ["\n"], 48))
    tasks = ["chosen", "written"]
    arguments = f"base_url={url},model=demo,tokenizer={DEMO},tokenizer_backend=huggingface,add_bos_token=True"
    arguments += ",max_length=1023,num_concurrent=1"
    remote = evaluate(tmp_path, tasks, model="local-completions", model_args=arguments)
    local = evaluate(tmp_path, tasks, model=D3EngineLM("demo", depth="full", kv_cache_memory_bytes=2**25))
    assert_same(remote, local, tasks)
