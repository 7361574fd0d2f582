"""The rehearsal of the GPU round runs to its end on a CPU, and its file has every figure; no time is judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks import gpu_round
from benchmarks.gpu import kernels
from benchmarks.gpu.common import Round
from benchmarks.gpu.tests import counts

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("round") / "round.json"
    command = [sys.executable, "-m", "benchmarks.gpu_round", "--smoke", f"--out={file}"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_every_part_ends(report: dict[str, Any]) -> None:
    assert {name: part["status"] for name, part in report["parts"].items()} == {
        "device": "done",
        "tests": "skipped",
        "kernels": "done",
        "engine": "done",
    }
    assert report["rehearsal"] is True
    assert str(ROOT) not in json.dumps(report)


def test_ceilings_are_measured_twice(report: dict[str, Any]) -> None:
    ceilings = report["parts"]["device"]["ceilings"]
    assert list(ceilings) == ["copy", "read", "matmul"]
    for row in ceilings.values():
        assert row["rates"] == [row["amount"] / seconds for seconds in row["seconds"]]
        assert len(row["rates"]) == 2


def test_every_operation_is_near_float64(report: dict[str, Any]) -> None:
    found = report["parts"]["kernels"]
    assert found["triton"] == "skipped: no GPU"
    assert len({row["operation"] for row in found["rows"]}) == 9
    assert len(found["rows"]) == 2 * 9
    for row in found["rows"]:
        errors = row["reference"].get("relative_error") or row["reference"]["tokens_that_differ"]
        assert max(errors) < 1e-5, row["operation"]
        assert row["bytes_moved"] > 0
        assert row["reference"]["eager_s"] > 0


def test_measuring_leaves_the_inputs_as_they_were() -> None:
    current = Round(torch.device("cpu"), True, 100.0)
    for case in kernels.cases(kernels.TINY[0], 3, current):
        before = {name: tensor.clone() for name, tensor in case.inputs.items()}
        row: dict[str, Any] = {}
        kernels.measure(row, case, current)
        assert row["reference"]["eager_s"] > 0
        for name, tensor in case.inputs.items():
            assert torch.equal(tensor, before[name]), (case.operation, name)


def test_the_engine_is_fitted_over_depth(report: dict[str, Any]) -> None:
    found = report["parts"]["engine"]
    assert [row["batch"] for row in found["batches"]] == [1, 8]
    for batch in found["batches"]:
        assert [row["depth"] for row in batch["depths"]] == [6, 4, 3]
        assert set(batch["fit"]) == {"layer_s", "fixed_s", "largest_misfit"}
    assert [row["rows_with_equal_tokens"] for row in found["transformers"]["rows"]] == [1, 8]


def fails(found: dict[str, Any], current: Round) -> None:
    found["so_far"] = 1
    raise ArithmeticError("on purpose")


def test_a_part_that_fails_leaves_its_traceback_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_round, "PARTS", {"first": fails, "second": lambda found, current: None})
    report: dict[str, Any] = {"parts": {}}
    saved: list[list[str]] = []
    gpu_round.run_parts(
        report,
        ["first", "second"],
        Round(torch.device("cpu"), True, 100.0),
        gpu_round.run_here,
        lambda: saved.append(list(report["parts"])),
        Console(quiet=True),
    )
    first, second = report["parts"].values()
    assert (first["status"], first["so_far"], second["status"]) == ("failed", 1, "done")
    assert "on purpose" in first["traceback"]
    assert saved == [["first"], ["first", "second"]]


def test_a_part_whose_process_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_round, "LIMITS_S", {"engine": 0.01})
    monkeypatch.setattr(gpu_round, "LEAST_S", 0.01)
    found = gpu_round.run_apart("engine", Round(torch.device("cpu"), True, 100.0))
    assert found["status"] == "failed"
    assert "was stopped" in found["traceback"]


def test_a_spent_budget_skips_parts() -> None:
    report: dict[str, Any] = {"parts": {}}
    current = Round(torch.device("cpu"), True, 1.0)
    gpu_round.run_parts(report, ["device"], current, pytest.fail, lambda: None, Console(quiet=True))
    assert report["parts"]["device"]["status"] == "skipped"


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("..F\n== 1 failed, 2 passed, 3 skipped in 4.05s ==\n", {"failed": 1, "passed": 2, "skipped": 3}),
        ("1 passed, 2 errors in 0.10s\n", {"passed": 1, "error": 2}),
        ("killed\n", {}),
    ],
)
def test_counts_are_read_from_the_end_of_the_output(output: str, expected: dict[str, int]) -> None:
    assert counts(output) == expected
