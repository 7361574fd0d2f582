"""An engine on a GPU compiles its kernels before it is ready, and none while a request waits."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import BLOCK, CONFIG, LAYERS, block_bytes
from fixture_types import MakeEngine
from peft_adapters import ADAPTERS, save_adapter
from stepping import see_steps
from tiny_models import save_random
from transformers import LlamaConfig, LlamaForCausalLM

from d3engine.executor.warm_up import warm_up

ROOT = Path(__file__).parents[2]

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def printed_by(program: str, *arguments: str) -> Any:
    """What a program of `tests/support` prints, with Triton as on a GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "tests/support" / program), *arguments]
    result = subprocess.run(command, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@needs_triton
def test_no_step_loads_a_kernel_after_the_warm_up(tmp_path: Path) -> None:
    """Prompts of 1 to 80 rows, batches, and answers of four ways to choose, by graphs of several depths."""
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": 256}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | sizes))
    warm, cold = (printed_by("compiled_once.py", str(tmp_path), given, "", "") for given in ("true", "false"))
    assert warm["start"] >= sum(cold["later"].values()) > 40
    assert not warm["later"]
    assert not cold["start"]
    assert warm["steps"] == cold["steps"]
    assert min(warm["steps"]) > 80


@needs_triton
def test_no_step_of_a_draft_loads_a_kernel_after_the_warm_up(tmp_path: Path) -> None:
    """The same with a draft model of other widths: its prompts, its drafts and their verifications."""
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": 256}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | sizes))
    smaller = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 80}
    save_random(tmp_path / "draft", LlamaForCausalLM(LlamaConfig(**(CONFIG | sizes | smaller))))
    found = printed_by("compiled_once.py", str(tmp_path), "true", str(tmp_path / "draft"), "")
    assert found["start"] > 40
    assert not found["later"]
    assert min(found["steps"]) > 80


@needs_triton
def test_no_request_of_an_adapter_loads_a_kernel(tmp_path: Path) -> None:
    """Of an adapter that is loaded at the start: for its prompts as for its answers."""
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": 256}
    save_random(tmp_path, LlamaForCausalLM(LlamaConfig(**(CONFIG | sizes))))
    save_adapter(tmp_path, tmp_path / "own", 0, **ADAPTERS["all"])
    found = printed_by("compiled_once.py", str(tmp_path), "true", "", str(tmp_path / "own"))
    assert found["start"] > 60
    assert not found["later"]
    assert min(found["steps"]) > 80


@needs_triton
def test_prompts_run_the_kernels_of_graphs_and_of_the_warm_up() -> None:
    """But for attention of long chunks; of three models with weights of three forms, compared on meta tensors.
    What graphs hold is what `inspect` compiles."""
    found = printed_by("kernel_variants.py")
    assert len(found) == 18
    for model in found.values():
        assert model["graphs"] >= model["eager"] > 20
        assert not model["in no graph"]
        assert not model["not warmed up"]
        assert not model["not inspected"]


def test_only_triton_on_a_gpu_warms_up(make_engine: MakeEngine) -> None:
    settings = make_engine().settings
    assert settings.warm_up
    assert not settings.warms_up
    on_gpu = replace(settings, device=torch.device("cuda"))
    assert on_gpu.warms_up
    assert not replace(on_gpu, warm_up=False).warms_up
    assert not replace(on_gpu, backend="torch").warms_up


@pytest.mark.parametrize(("blocks", "longest"), [(5, 17), (16, 33)])
def test_warm_up_stays_within_a_small_cache(make_engine: MakeEngine, blocks: int, longest: int) -> None:
    """Prompts that the cache cannot hold are not run: their entries would lie beyond it."""
    engine = make_engine(kv_cache_memory_bytes=LAYERS * blocks * block_bytes(), enforce_eager=True)
    rows: list[int] = []
    see_steps(engine, after=lambda plan, computed: rows.append(plan.num_rows))
    warm_up(engine.executor, engine.settings.scheduler_config, block_size=BLOCK)
    assert max(rows) == longest
