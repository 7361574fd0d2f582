"""Parts of the GPU round by tools that few machines have: made-up ones stand on the path here."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import compiled, tool_target, tools
from benchmarks.gpu.cases import Case
from benchmarks.gpu.common import Round
from benchmarks.gpu.end_to_end import CHECKED_TOKENS, check
from benchmarks.gpu.models import dequantized, new_engine, quantized, random_model

ROOT = Path(__file__).parents[2]
NCU = """"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","_product_kernel","dram__bytes.sum","byte","1,024"
"0","_product_kernel","gpu__time_duration.sum","ns","2,500.5"
"1","single_rows_kernel","launch__registers_per_thread","register/thread","168"
"""


def tool(folder: Path, name: str, *lines: str) -> None:
    """A tool that writes down how it was called, says something and ends."""
    file = folder / name
    file.write_text("\n".join(["#!/bin/sh", f'echo "$@" >> "{folder}/calls"', *lines]) + "\n")
    file.chmod(0o755)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path


def current(budget: float = 1e6) -> Round:
    return Round(torch.device("cpu"), smoke=True, budget=budget)


def test_sanitizer_runs_each_check_and_findings_fail_the_part(path: Path) -> None:
    """The sanitizer runs each check, and what it finds fails the part."""
    report: dict[str, Any] = {}
    tool(path, "compute-sanitizer", 'echo "========= ERROR SUMMARY: 0 errors"')
    tools.sanitized(report, current())
    assert {name: found["errors"] for name, found in report["checks"].items()} == dict.fromkeys(tools.CHECKS, 0)
    calls = (path / "calls").read_text().splitlines()
    assert [line.split()[1] for line in calls] == list(tools.CHECKS)
    assert all(line.endswith("-m benchmarks.gpu.tool_target operations") for line in calls)
    tool(path, "compute-sanitizer", 'echo "========= RACECHECK SUMMARY: 2 hazards displayed"', "exit 9")
    with pytest.raises(RuntimeError, match="memcheck, racecheck, initcheck"):
        tools.sanitized(report, current())


def test_tools_find_the_checkout_without_an_installation(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the working directory nor a package of this environment brings it."""
    monkeypatch.setenv("PYTHONPATH", "/of/the/caller")
    tool(path, "ncu", 'echo "$PYTHONPATH"', "exit 1")
    report: dict[str, Any] = {}
    with pytest.raises(RuntimeError, match="exit code 1"):
        tools.profiled(report, current())
    assert report["tail"].split() == [f"{ROOT}:/of/the/caller"]


def test_the_profiler_s_table_becomes_a_row_a_kernel(path: Path) -> None:
    report: dict[str, Any] = {}
    (path / "table").write_text(NCU)
    tool(path, "ncu", 'echo "==PROF== Connected"', f'/bin/cat "{path}/table"')
    tools.profiled(report, current())
    assert report["kernels"] == [
        {"kernel": "_product_kernel", "memory_bytes": 1024.0, "time": 2500.5},
        {"kernel": "single_rows_kernel", "registers": 168.0},
    ]
    tool(path, "ncu", 'echo "==ERROR== no permission"', "exit 1")
    with pytest.raises(RuntimeError, match="exit code 1"):
        tools.profiled(report, current())
    assert "no permission" in report["tail"]


def test_a_part_whose_tool_is_absent_is_skipped_by_name(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(path))
    for part, name in ((tools.sanitized, "compute-sanitizer"), (tools.profiled, "ncu")):
        report: dict[str, Any] = {}
        part(report, current())
        assert report == {"skipped": f"{name} is not on the path"}


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@needs_triton
def test_what_runs_under_the_tools_runs() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.tool_target", "layer"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "done" in result.stdout


@needs_triton
def test_what_is_compiled_beforehand_is_not_compiled_again(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(ROOT / "tests/support/compiled_before.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["before"] == found["after"] == found["launches"] == 4


@needs_triton
def test_operations_under_the_sanitizer_are_compiled_before(monkeypatch: pytest.MonkeyPatch, interpreter: None) -> None:
    """Under the tool compiling would take the time of its checks."""
    monkeypatch.setattr(compiled.switches, "questions", lambda _: [])
    monkeypatch.setattr(compiled, "SHAPES", ())
    on_gpu = compiled.Described(torch.device("meta"), False, 1e6)
    described = [(case.operation, case.bytes_moved) for case, _ in compiled._cases(on_gpu)]
    monkeypatch.setattr(Case, "results", lambda case, *_: ran.append((case.operation, case.bytes_moved)))
    ran: list[tuple[str, int]] = []
    assert tool_target.operations(on_gpu) == len(ran) > 20
    assert described == ran


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_quantized_model_is_checked_by_its_dequantized_matrices(scheme: str) -> None:
    """A quantized model is checked against the matrices that it stands for."""
    with random_model("llama2-7b", current()) as plain:
        model = quantized(plain, scheme)
        matrices = dequantized(model.weights)
        assert torch.equal(matrices.layers[0].qkv, model.weights.layers[0].qkv.dequantize(torch.float32))
        with new_engine(model, current(), max_num_seqs=2, max_model_len=64, kv_tokens=128) as engine:
            found = check(engine, model, current())
            assert found["tokens"] == 2 * CHECKED_TOKENS
            assert found["largest_gap"] < 1e-4
            other = quantized(plain, "int4" if scheme == "int8" else "int8")
            assert check(engine, other, current())["largest_gap"] > 1e-4
