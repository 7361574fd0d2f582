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
from bridge_files import some_maps, write_maps
from eagle3_heads import EAGLE3_TARGET, save_head
from fixture_types import MakeEngine, MakeLlama
from peft_adapters import ADAPTERS, save_adapter
from rank_tests import engine_of
from stepping import see_steps
from thread_ranks import over_threads
from tiny_models import save_random
from transformers import LlamaConfig, LlamaForCausalLM

from d3engine import D3, Distilled, FullDepth, SamplingParams, Speculative
from d3engine.engine.settings import EngineSettings
from d3engine.executor.warm_up import warm_up
from d3engine.model.bridges import BRIDGES_FILE, read_bridges, write_bridges
from d3engine.model.expected_tensors import fingerprint
from d3engine.model.students import NEURONS, STUDENT_FILE, Student, write_student

ROOT = Path(__file__).parents[2]

SIZES = {"num_hidden_layers": 2, "max_position_embeddings": 256}

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def printed_by(program: str, *arguments: str) -> Any:
    """What a program of `tests/support` prints, with Triton as on a GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "tests/support" / program), *arguments]
    result = subprocess.run(command, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


FEW = [[1], [2], [9], [17], [33], [65], [80], [41], [1, 2], [3, 3], [3, 70, 1, 9], [20] * 4]
"""Prompts of each class of rows, and each way to choose tokens alone and in a batch."""


def compiled(model: Path, **case: Any) -> Any:
    """What an engine loads at its start, where adapters and policies come, and later."""
    return printed_by("compiled_once.py", str(model), json.dumps(case))


@needs_triton
def test_no_step_loads_a_kernel_after_the_warm_up(tmp_path: Path) -> None:
    """Prompts of 1 to 80 rows, batches, and answers of four ways to choose, by graphs of several depths."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | SIZES))
    warm, cold = (compiled(tmp_path, engine={"warm_up": given}) for given in (True, False))
    assert warm["start"] >= sum(cold["later"].values()) > 40
    assert not warm["later"]
    assert not cold["start"]
    assert warm["steps"] == cold["steps"]
    assert min(warm["steps"]) > 80


@needs_triton
def test_no_step_of_a_draft_loads_a_kernel_after_the_warm_up(tmp_path: Path) -> None:
    """The same with a draft model of other widths: its prompts, its drafts and their verifications."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | SIZES))
    smaller = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 80}
    save_random(tmp_path / "draft", LlamaForCausalLM(LlamaConfig(**(CONFIG | SIZES | smaller))))
    found = compiled(tmp_path, depth=Speculative(str(tmp_path / "draft"), 3).describe())
    assert found["start"] > 40
    assert not found["later"]
    assert min(found["steps"]) > 80


@needs_triton
def test_an_engine_with_an_eagle3_head_warms_up(tmp_path: Path) -> None:
    """The head runs no kernel of ours, and nothing before its target."""
    target = save_random(tmp_path, LlamaForCausalLM(LlamaConfig(**(CONFIG | EAGLE3_TARGET))))
    (tmp_path / "head").mkdir()
    policy = Speculative(str(save_head(target, tmp_path / "head")), 3)
    found = compiled(tmp_path, depth=policy.describe(), engine={"enforce_eager": True}, batches=[[1], [9], [33]])
    assert found["start"] > 20
    assert not found["later"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with bridges, of another rank where they cross all layers, and a student of other widths."""
    directory = tmp_path_factory.mktemp("warm") / "model"
    save_random(directory, LlamaForCausalLM(LlamaConfig(**(CONFIG | SIZES))))
    size, layers = CONFIG["hidden_size"], SIZES["num_hidden_layers"]
    found = []
    for rank in (None, 5):
        write_maps(some_maps(layers, size), directory, directory / BRIDGES_FILE, rank)
        found.append(read_bridges(directory / BRIDGES_FILE))
    windows = {**found[0].by_window, (0, layers): found[1].by_window[0, layers]}
    write_bridges(replace(found[0], by_window=windows), directory / BRIDGES_FILE)
    narrow = {layer: {NEURONS: torch.arange(40), "down": torch.randn(size, 40)} for layer in range(layers)}
    student = Student(fingerprint(directory), layers, size, (), narrow)
    write_student(student, directory / STUDENT_FILE)
    return directory


@needs_triton
def test_no_request_of_an_adapter_loads_a_kernel(model: Path, tmp_path: Path) -> None:
    """Of an adapter that is loaded at the start, with the LM head: for its prompts as for its answers."""
    save_adapter(model, tmp_path / "own", 0, **ADAPTERS["some"])
    engine = {"lora_modules": {"own": str(tmp_path / "own")}}
    found = compiled(model, engine=engine, adapters=["own"])
    assert found["start"] > 60
    assert not found["later"]
    assert min(found["steps"]) > 80


@needs_triton
def test_an_adapter_is_compiled_where_it_is_loaded(model: Path, tmp_path: Path) -> None:
    """In an engine that began without any; one of another rank needs nothing, one of other matrices those alone."""
    changes = {"some": {}, "rank-2": {"r": 2}, "one": {"r": 3, "target_modules": ["v_proj"]}}
    kinds = {name: ADAPTERS["some"] | own for name, own in changes.items()} | {"all": ADAPTERS["all"]}
    for name, kind in kinds.items():
        save_adapter(model, tmp_path / name, 0, **kind)
    paths = [str(tmp_path / name) for name in kinds]
    found = compiled(model, loads=paths, adapters=[None, *kinds], batches=FEW)
    some, rank_2, one, every = found["loads"]
    assert some >= 15
    assert not rank_2
    assert not one
    assert 5 < every < some
    assert not found["later"]


BRIDGED = D3(0.6, 0.4, bridges="auto")
"""One layer is crossed at step 1, both from step 2 on."""


@needs_triton
@pytest.mark.parametrize("kind", ["graphs", "eager"])
def test_no_bridge_of_the_engines_policy_loads_a_kernel(model: Path, kind: str) -> None:
    """In graphs of up to 72 rows; and step by step, with copied entries."""
    if kind == "graphs":
        batches = [[1], [2], [1] * 9, [1] * 30, [1] * 70]
        found = compiled(model, depth=BRIDGED.describe(), engine={"max_num_seqs": 72}, batches=batches)
        assert found["steps"][1] > 50
    else:
        policy = replace(BRIDGED, start=0.5, on_skip="copy")
        found = compiled(model, depth=policy.describe(), engine={"enforce_eager": True}, batches=FEW)
        assert found["steps"][1] == 0
    assert not found["later"]


@needs_triton
def test_no_student_of_the_engines_policy_loads_a_kernel(model: Path) -> None:
    found = compiled(model, depth=Distilled().describe(), batches=FEW)
    assert not found["later"]


@needs_triton
def test_what_policies_of_requests_name_is_compiled_first(model: Path) -> None:
    """Bridges and a student are compiled where a request is read, and not by a step."""
    asks = [policy.describe() for policy in (FullDepth(), BRIDGED, Distilled())]
    found = compiled(model, asks=asks, batches=FEW)
    full, bridges, student = found["asks"]
    assert not full
    assert bridges >= 2
    assert student >= 5
    assert not found["later"]


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


def test_what_is_loaded_meanwhile_changes_no_answer(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of an adapter go on as if no other adapter, bridges and student had been compiled between two steps."""
    monkeypatch.setattr(EngineSettings, "warms_up", True)
    for name in ("some", "all"):
        save_adapter(model, tmp_path / name, 0, **ADAPTERS[name])
    modules = {"some": str(tmp_path / "some")}
    prompts = {"short": [5, 17, 3], "long": [*range(9, 60)]}
    answers: list[dict[str, list[int]]] = []
    for loads in (False, True):
        with engine_of(model, device="cpu", backend="torch", max_model_len=128, lora_modules=modules) as engine:
            for name, prompt in prompts.items():
                engine.add_request(name, prompt, SamplingParams(temperature=0, max_tokens=8), lora_request="some")
            found = engine.step()
            if loads:
                engine.load_lora_adapter("all", tmp_path / "all")
                for policy in (BRIDGED, Distilled()):
                    engine.prepare([1], SamplingParams(depth=policy))
                assert engine.stats().eager_steps == 1
            while engine.has_unfinished_requests():
                found += engine.step()
        answers.append({one.request_id: one.outputs[0].token_ids for one in found})
    assert answers[0] == answers[1]
    assert all(len(tokens) == 8 for tokens in answers[0].values())


def test_ranks_warm_up_and_answer(tiny_llama: MakeLlama) -> None:
    """Of a prompt of one row ranks choose the token among themselves, and tables are those of one sequence at first."""
    prompts = [[5, 17, 3], [9, 9], [4], [8, 1]]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    directory = tiny_llama(num_hidden_layers=2).directory
    with engine_of(directory, device="cpu") as whole, engine_of(directory, device="cpu") as engine:
        wanted = whole.generate(prompts, params, use_tqdm=False)
        ranks = over_threads(engine, 2)
        warm_up(ranks.executor, ranks.settings.scheduler_config, block_size=ranks.settings.block_size)
        found = ranks.generate(prompts, params, use_tqdm=False)
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in wanted]
